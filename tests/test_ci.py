"""The script that a change must pass: it fails where it should, on a machine made of stand-ins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "run"


def run(tmp_path: Path, *, apt_get: str, apt_cache: str) -> subprocess.CompletedProcess[str]:
    """The script with stand-ins for all programs that it calls, and no Chromium."""
    tools = {"apt-get": apt_get, "apt-cache": apt_cache, "make": 'echo "make $1"', "id": "echo 0", "dirname": "echo ."}
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
    assert "make test-slow" in done.stdout


def test_it_goes_on_with_chromium(tmp_path):
    chromium = tmp_path / "bin" / "chromium"
    install = f'if [ "$1" = install ]; then : > {chromium}; /bin/chmod +x {chromium}; fi'
    done = run(tmp_path, apt_get=install, apt_cache="true")
    assert done.returncode == 0
    assert "skipped" not in done.stdout
