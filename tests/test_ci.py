"""The script that a change must pass: it fails where it should, on a machine made of stand-ins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "run"


def run(
    tmp_path: Path, *, apt_get: str = "false", apt_cache: str = "false", make: str = "true"
) -> subprocess.CompletedProcess[str]:
    """The script with stand-ins for all programs that it calls, and no Chromium."""
    tools = {"apt-get": apt_get, "apt-cache": apt_cache, "make": f'echo "make $*"\n{make}'}
    tools |= {"id": "echo 0", "dirname": "echo .", "cat": "exec /bin/cat", "nice": 'exec "$@"'}
    (tmp_path / "bin").mkdir()
    (tmp_path / "inner").mkdir()
    for name, body in tools.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    environment = {"PATH": str(tmp_path / "bin"), "CI": "true", "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(
        ["/bin/bash", str(SCRIPT)], cwd=tmp_path / "inner", env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("apt_get", ['[ "$1" = update ]', "true"], ids=["the installation fails", "nothing came of it"])
def test_it_fails_where_chromium_could_be_installed_and_was_not(tmp_path, apt_get):
    done = run(tmp_path, apt_get=apt_get, apt_cache="true")
    assert done.returncode != 0
    assert "make" not in done.stdout


def test_it_goes_on_where_there_is_no_chromium_to_install(tmp_path):
    done = run(tmp_path, apt_get="false", apt_cache="false")
    assert done.returncode == 0
    assert "skipped" in done.stdout
    assert done.stdout.splitlines()[1:] == ["make venv", "make test MARKS=", "make lint"]


def test_it_goes_on_with_chromium(tmp_path):
    chromium = tmp_path / "bin" / "chromium"
    install = f'if [ "$1" = install ]; then : > {chromium}; /bin/chmod +x {chromium}; fi'
    done = run(tmp_path, apt_get=install, apt_cache="true")
    assert done.returncode == 0
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("wrong", ["lint", "test", "venv"])
def test_it_fails_with_each_of_its_parts(tmp_path, wrong):
    done = run(tmp_path, make=f'[ "$1" != {wrong} ] || {{ echo "{wrong} is wrong" >&2; exit 3; }}')
    assert done.returncode == 3
    assert f"{wrong} is wrong" in done.stdout + done.stderr
    assert ("make lint" in done.stdout) == ("make test" in done.stdout) == (wrong != "venv")


def test_lint_and_tests_run_at_the_same_time(tmp_path):
    meet = ': > "../$1"; for _ in {1..200}; do [ -e ../lint -a -e ../test ] && exit; /bin/sleep 0.05; done; exit 9'
    done = run(tmp_path, make=f'[ "$1" = venv ] && exit\n{meet}')  # each waits for the other to begin
    assert done.returncode == 0, done.stdout + done.stderr
