"""`dave methods` and `dave compare`: what they print, write and refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from dave_vit import METHODS
from dave_vit.cli import run

MODEL = ["--model", "timm:vit_tiny_patch16_224", "--weights", "random"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A picture with a bright square, and a mask of the square."""
    path = tmp_path_factory.mktemp("pictures")
    pixels = np.random.default_rng(0).integers(0, 80, (240, 320, 3), dtype=np.uint8)
    pixels[60:180, 100:220] += 120
    mask = np.zeros((240, 320), dtype=np.uint8)
    mask[60:180, 100:220] = 255
    Image.fromarray(pixels).save(path / "square.png")
    Image.fromarray(mask).save(path / "mask.png")
    return path


def compare(folder, *options: str) -> int:
    return run(["compare", str(folder / "square.png"), *MODEL, "--out", str(folder), *options])


def test_methods_lists_all(capsys):
    assert run(["methods", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == set(METHODS)
    assert rows[0]["name"] == "dave"
    assert set(rows[0]) == {"name", "summary", "paper", "passes", "resolution", "class_specific", "unit"}
    assert run(["methods"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in METHODS)


def test_compare_draws_and_scores(folder, capsys):
    methods = "center,rollout,input_x_gradient,bcos"
    assert compare(folder, "--methods", methods, "--box", "100,60,220,180", "--target", "7", "--json") == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert "bcos is left out" in err
    assert record["target"]["index"] == 7
    assert [row["method"] for row in record["maps"]] == ["center", "rollout", "input_x_gradient"]
    assert all(0 < row["energy"] < 1 for row in record["maps"])
    assert record["maps"][0]["pointing"] == 1
    assert json.loads((folder / "square.7.compare.dave.json").read_text()) == record
    with Image.open(folder / "square.7.compare.dave.png") as figure:
        assert figure.width > figure.height  # four cells in a row


def test_a_mask_scores_as_its_box_does(folder, capsys):
    scores = []
    for region in (["--box", "100,60,220,180"], ["--mask", str(folder / "mask.png")]):
        assert compare(folder, "--methods", "center", *region, "--json") == 0
        scores.append(json.loads(capsys.readouterr().out)["maps"][0]["energy"])
    assert scores[0] == pytest.approx(scores[1], abs=0.01)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "legrat"], "did you mean legrad"),
        (["--methods", ","], "is empty"),
        (["--methods", "center", "--box", "1,2,3"], "left,top,right,bottom"),
        (["--methods", "center", "--box", "9,9,1,1"], "is empty"),
        (["--methods", "center", "--box", "0,0,9,9"], "outside of what the model sees"),
        (["--methods", "center", "--box", "1,1,9,9", "--mask", "mask.png"], "give one of them"),
        (["--methods", "center", "--target", "all-top5"], "5 classes"),
        (["--methods", "bcos"], "no B-cos module"),
    ],
)
def test_mistakes_are_one_clear_line(folder, capsys, options, said):
    assert compare(folder, *options) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
