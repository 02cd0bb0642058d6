"""Build the wheel, install it into a bare environment and run the commands of the README there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
SHELL = re.findall(r"^    (\S.*)$", README, re.MULTILINE)
UNREACHABLE = re.compile("failed to fetch|error sending request|network was disabled", re.IGNORECASE)
# Installing came first, and `make test` would run this file again.
SKIPPED = ("pip install", "make test")
# The embedded model stands in for what the README downloads; what make would install is there already, from the wheel.
STAND_INS = {
    "dave ": ".venv/bin/dave ",
    "timm:deit_tiny_patch16_224": "builtin --samples 4",
    "SPEC": "builtin",
    "make": f"make -f {ROOT / 'Makefile'} -o .venv/core.stamp -o .venv/package.stamp",
}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an environment without this checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment = {**kept, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)


def run_checked(folder: Path, *words: str) -> str:
    done = run(folder, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def install(folder: Path, uv: str, extra: str = "") -> None:
    """Build the wheel, and install it with its dependencies and those of an extra only."""
    run_checked(
        folder, uv, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "-o", "dist", str(ROOT)
    )
    run_checked(folder, uv, "venv", "--python", sys.executable, ".venv")
    (wheel,) = (folder / "dist").glob("*.whl")
    locked = ROOT / "requirements" / "dev.txt"  # whose versions the smaller files share
    options = ["--python", ".venv/bin/python", "--constraints", str(locked)]
    done = run(folder, uv, "pip", "install", *options, f"{wheel}[{extra}]" if extra else str(wheel))
    if UNREACHABLE.search(done.stderr):
        pytest.skip("neither the packages nor a network to fetch them are there")
    assert done.returncode == 0, done.stderr


def bring_compiled(folder: Path) -> None:
    """Copy the bytecode that this environment has compiled, since compiling takes longer than the test."""
    here = Path(sysconfig.get_path("purelib"))
    (there,) = (folder / ".venv").glob("lib/python*/site-packages")
    for cache in here.glob("*/**/__pycache__"):
        place = there / cache.relative_to(here)
        if place.parent.is_dir():
            shutil.copytree(cache, place, dirs_exist_ok=True)


def test_the_wheel_holds_the_licences_and_no_tests(empty):
    (wheel,) = (empty / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    licences = [name for name in names if name.endswith(("LICENSE", "THIRD_PARTY_NOTICES"))]
    assert [name.partition("/")[2] for name in sorted(licences)] == ["licenses/LICENSE", "licenses/THIRD_PARTY_NOTICES"]
    assert [name for name in names if not name.startswith(("dave_vit/", "dave_vit-"))] == []


def find_uv() -> str:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        pytest.skip("needs uv")
    return uv


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Iterator[Path]:
    """A folder that holds a photograph and a bare environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("newcomer")
    install(folder, find_uv())
    bring_compiled(folder)
    shutil.copy(ROOT / "docs" / "photos" / "chelsea.jpg", folder / "photo.jpg")
    yield folder
    shutil.rmtree(folder / ".venv")


def test_the_package_is_the_wheel_and_needs_only_what_it_says(empty):
    found = run_checked(empty, ".venv/bin/python", "-c", "import dave_vit; print(dave_vit.__file__)")
    assert Path(found.strip()).is_relative_to(empty / ".venv")
    assert "explain" in run_checked(empty, ".venv/bin/dave", "--help")
    metadata = (empty / ".venv").glob("lib/python*/site-packages/*.dist-info")
    names = {path.name.partition("-")[0].replace("_", "-").lower() for path in metadata}
    locked = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements" / "core.txt").read_text(), re.MULTILINE))
    assert names - {"dave-vit"} <= locked
    served = run(empty, ".venv/bin/dave", "serve")
    assert served.returncode == 2
    assert served.stderr == "error: fastapi is not installed; run: pip install 'dave-vit[web]'\n"


def test_the_python_of_the_readme_ends_in_a_picture(empty):
    assert PYTHON
    for block in PYTHON:
        few = block.replace('"timm:deit_tiny_patch16_224"', '"builtin", samples=4')
        run_checked(empty, ".venv/bin/python", "-c", few)
    assert (empty / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def followed(empty) -> Path:
    """The same folder after all commands of the README, without those that are skipped."""
    for line in (line for line in SHELL if not line.startswith(SKIPPED)):
        for written, here in STAND_INS.items():
            line = line.replace(written, here)
        run_checked(empty, "bash", "-c", line)
    return empty


def test_the_commands_of_the_readme_leave_what_it_says(followed):
    assert {line.split()[0] for line in SHELL} == {"pip", "dave", "make"}
    assert len(SHELL) > 4
    assert {"photo.dave.png", "photo.dave.panels.png", "photo.dave.npz", "photo.dave.json"} <= names_in(
        followed / "maps"
    )
    assert {"demo.png", "picture-1.dave.png"} <= names_in(followed / "demo")


def test_the_demo_finds_the_objects(followed):
    pictures = [json.loads((followed / "demo" / f"picture-{number}.dave.json").read_text()) for number in (1, 2, 3)]
    assert [picture["top5"][0]["name"] for picture in pictures] == ["beer", "scissors", "dolphin"]
    scores = json.loads((followed / "demo" / "scores.json").read_text())["scores"]
    for metric in ("gridpg", "energypg"):
        assert scores["dave"][metric] > scores["effective"][metric] > scores["input_x_gradient"][metric]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
