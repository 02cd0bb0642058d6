"""Detectors, segmentation and depth models from folders of transformers: their own processors, followed back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

import task_folders
from dave_vit import cli, create_method, load_model
from dave_vit.data.geometry import Geometry
from dave_vit.errors import InputError, UnsupportedOperator
from dave_vit.models.prompted import PromptedModel

QUICK = ("YOLOS", "SegFormer, segmentation", "DPT", "SAM with a point")
STILL = [
    family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
    for family in task_folders.PIXELS
    if family not in ("VideoMAE", "TimeSformer", "ViViT")
]
WIDTH, HEIGHT, MARK = 120, 80, 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = task_folders.save(family, tmp_path_factory.mktemp("folder"))
        return made[family]

    return folder


@pytest.fixture
def marked(tmp_path) -> Image.Image:
    """A photograph, wider than high, that is nothing but a mark in its lower right corner."""
    pixels = np.full((HEIGHT, WIDTH, 3), 128, dtype=np.uint8)
    pixels[-MARK:, -MARK:] = 255
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return Image.fromarray(pixels)


@pytest.mark.parametrize("family", STILL)
def test_a_mark_is_found_where_it_is_in_the_photograph(family, folders, marked):
    model = load_model(f"hf:{folders(family)}")
    model = model.with_example_prompt(marked) if isinstance(model, PromptedModel) else model
    attribution = create_method("effective", model).attribute(model.preprocess(marked), model.task.check_score)
    found = Geometry.measure(model.preprocessing, marked.size).to_photo(attribution[0].sum(0)).abs()
    assert found[-MARK:, -MARK:].sum() > 0.9 * found.sum() > 0


def explained(folder, tmp_path, capsys, *options: str) -> list[dict]:
    line = ["explain", str(tmp_path / "photo.png"), "--model", f"hf:{folder}", "--method", "effective", "--json"]
    assert cli.run([*line, "--out", str(tmp_path / "out"), *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_usual_needs_no_score(folders, marked, tmp_path, capsys):
    (depth,) = explained(folders("DPT"), tmp_path, capsys)
    assert depth["score"] == "value"
    (mask,) = explained(folders("SAM with a point"), tmp_path, capsys, "--prompt", "100,60")
    assert mask["score"] == "region:95,55,105,65:0"
    boxes = explained(folders("YOLOS"), tmp_path, capsys, "--threshold", "0.01")
    assert {box["score"].split(":")[0] for box in boxes} == {"box"}


@pytest.mark.slow
def test_words_of_a_text_are_the_classes_of_a_detector(folders, marked, tmp_path, capsys):
    options = ("--prompt", "a cat.", "--score", "query:2:cat")
    (found,) = explained(folders("Grounding DINO"), tmp_path, capsys, *options)
    assert found["score"] == "query:2:cat"


def test_refusals(folders, marked, tmp_path, capsys):
    line = ["explain", str(tmp_path / "photo.png"), "--out", str(tmp_path), "--model"]
    for family, options, said in [
        ("SegFormer, segmentation", [], "no classifier; say what is explained"),
        ("SAM with a point", [], "--prompt x,y"),
        ("SAM with a point", ["--prompt", "500,5"], "outside of the picture"),
        ("Grounding DINO", [], "finds what a text names"),
        ("DPT", ["--prompt", "x"], "without a text half"),
    ]:
        assert cli.run([*line, f"hf:{folders(family)}", *options]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(InputError, match=r"call \.with_prompt"):
        load_model(f"hf:{folders('SAM with a point')}")(None)


@pytest.mark.slow
def test_the_mask_of_a_query_is_refused_by_name(folders, marked):
    model = load_model(f"hf:{folders('Mask2Former, class')}")
    with pytest.raises(UnsupportedOperator, match="mask_predictor"):
        create_method("effective", model).attribute(
            model.preprocess(marked), lambda output: output.masks_queries_logits[:, 2].mean((1, 2))
        )


def test_the_doctor_asks_by_itself(folders, capsys):
    assert cli.run(["doctor", "--model", f"hf:{folders('SAM with a point')}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] < 1e-9
