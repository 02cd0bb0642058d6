"""A newcomer: the wheel is built, installed into an empty folder, and what the README says works there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MODEL = "timm:deit_tiny_patch16_224"  # in the README; what is downloaded there is embedded here
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


def called(folder: Path, *words: str) -> str:
    """What a program prints, with the installed package before everything else."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "installed"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Path:
    """A folder that holds the unpacked wheel and one photograph."""
    folder = tmp_path_factory.mktemp("newcomer")
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    with zipfile.ZipFile(folder / built.stdout.strip().splitlines()[-1]) as wheel:
        wheel.extractall(folder / "installed")
    shutil.copy(ROOT / "docs" / "photos" / "chelsea.jpg", folder / "photo.jpg")
    return folder


def test_the_package_is_the_wheel_and_brings_its_model(empty):
    found = called(empty, "-c", "import dave_vit; print(dave_vit.__file__); dave_vit.load_model()")
    assert str(empty / "installed") in found


def test_the_python_of_the_readme_ends_in_a_picture(empty):
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        called(empty, "-c", block.replace(MODEL, "builtin").replace("DAVE(model)", "DAVE(model, samples=4)"))
    assert (empty / "map.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_of_the_readme_writes_its_files(empty):
    (line,) = re.findall(r"^    \.venv/bin/dave (explain .*)$", README, re.MULTILINE)
    called(
        empty,
        "-c",
        "from dave_vit.cli import main; main()",
        *shlex.split(line.replace(MODEL, "builtin")),
        "--samples",
        "4",
    )
    assert {"photo.dave.png", "photo.dave.json"} <= {path.name for path in (empty / "maps").iterdir()}
