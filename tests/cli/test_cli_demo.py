"""`dave demo` with a tiny model: its files, and scores by hand-made grids; test_newcomer runs the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from dave_vit import cli
from dave_vit.cli.options import ModelOptions
from dave_vit.data.builtin import CLASS_NAMES
from dave_vit.data.grids import GridCandidate
from dave_vit.explanations import comparison as demo
from tiny_adapters import adapter


def all_of_them(logits: torch.Tensor, labels: list[int]) -> list[GridCandidate]:
    return [GridCandidate(index, label, 1.0) for index, label in enumerate(labels)]


@pytest.fixture
def small(monkeypatch, tmp_path):
    for name, value in {
        "PICTURES": (1, 2),
        "SCORED": 2,
        "GRIDS": 1,
        "POOL": 4,
        "SAMPLES": {"drawn": 3, "scored": 2},
    }.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(ModelOptions, "load", lambda options: adapter(names=CLASS_NAMES))
    monkeypatch.setattr(demo, "select_candidates", all_of_them)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("small")
def test_the_demo_draws_and_scores(capsys):
    assert cli.run(["demo"]) == 0
    endings = ("dave.json", "dave.npz", "dave.png", "dave.panels.png")
    expected = {f"picture-{number}.{ending}" for number in (1, 2) for ending in endings} | {"demo.png", "scores.json"}
    assert {path.name for path in Path("demo").iterdir()} == expected
    with Image.open("demo/demo.png") as figure:
        assert figure.width > figure.height  # five columns, two rows
    scores = json.loads(Path("demo/scores.json").read_text())
    assert (scores["grids"], scores["pictures"]) == (1, 2)
    for name in demo.METHODS:
        assert 0 < scores["scores"][name]["gridpg"] < 100
        assert 0 <= scores["scores"][name]["energypg"] < 100  # an untrained model may look past both objects
    assert scores["chance"]["gridpg"] == 25
    out = capsys.readouterr().out
    assert out.count("picture-1 shows: ") == 1
    assert all(word in out for word in ("GridPG", "EnergyPG", "input_x_gradient", "demo.png"))


@pytest.mark.usefixtures("small")
def test_the_demo_speaks_json(capsys):
    assert cli.run(["demo", "--json", "--out", "other"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [picture["image"]["name"] for picture in record["pictures"]] == ["picture-1", "picture-2"]
    assert set(record["scores"]["scores"]) == set(demo.METHODS)
