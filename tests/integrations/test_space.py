"""The folder of a Space: its page takes a photograph and returns the map, with Gradio itself."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from PIL import Image

from web_fixtures import make_picture

SPACE = Path(__file__).resolve().parents[2] / "examples" / "space"


def test_the_page_explains_a_photograph(monkeypatch):
    gradio = pytest.importorskip("gradio")
    monkeypatch.setenv("DAVE_MODEL", "builtin")
    space = runpy.run_path(str(SPACE / "app.py"))
    assert f"sdk_version: {gradio.__version__}" in (SPACE / "README.md").read_text()
    file, classes = space["explain"](make_picture((64, 48)), "dog", 2)
    with Image.open(file) as figure:
        assert figure.width > figure.height > 100
    assert sum(classes.values()) == pytest.approx(1, abs=1e-4)
    with pytest.raises(gradio.Error, match="no class is called"):
        space["explain"](make_picture(), "qwertyuiop", 2)
