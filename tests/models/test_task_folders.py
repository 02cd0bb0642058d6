"""Detectors, segmentation and depth models from folders of transformers: their own processors, followed back."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import task_folders
import tiny_models
from dave_vit import cli, create_method, load_model
from dave_vit.data.geometry import Geometry
from dave_vit.errors import InputError, MissingExtra, ModelError
from dave_vit.models.loading import backbone
from dave_vit.models.prepare import Prepare
from dave_vit.models.tasks import PromptedModel

QUICK = ("YOLOS", "SegFormer, segmentation", "DPT", "SAM with a point")
STILL = [
    family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
    for family in task_folders.PIXELS
    if family not in ("VideoMAE", "TimeSformer", "ViViT", "V-JEPA 2")
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
        ("SegFormer, segmentation", [], "not a classifier; give what to explain"),
        ("SAM with a point", [], "--prompt x,y"),
        ("SAM with a point", ["--prompt", "500,5"], "outside of the picture"),
        ("Grounding DINO", [], "finds what a text names"),
        ("DPT", ["--prompt", "x"], "without a text half"),
    ]:
        assert cli.run([*line, f"hf:{folders(family)}", *options]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(InputError, match=r"call \.with_prompt"):
        load_model(f"hf:{folders('SAM with a point')}")(None)


def test_the_mask_of_a_query(folders, marked, tmp_path, capsys):
    (mask,) = explained(folders("EoMT, mask"), tmp_path, capsys, "--score", "region:0,0,120,80:2")
    assert mask["score"] == "region:0,0,120,80:2"


def test_sentences_are_the_classes_of_owl(folders, marked, tmp_path, capsys):
    options = ("--prompt", "a cat. w5", "--score", "query:2:w5")
    (found,) = explained(folders("OWLv2"), tmp_path, capsys, *options)
    model = load_model(f"hf:{folders('OWLv2')}").with_prompt(marked, "a cat. w5")
    logits = model(model.preprocess(marked)).logits
    assert model.class_names == ["a cat", "w5"]
    assert found["value"] == pytest.approx(logits[0, 2, 1].item(), rel=1e-4)


@pytest.mark.slow
def test_boxes_of_a_concept(folders, marked, tmp_path, capsys):
    found = explained(folders("SAM 3 with a text, object"), tmp_path, capsys, "--prompt", "cat", "--threshold", "0.01")
    assert {box["score"].split(":")[0] for box in found} == {"box"}


def test_the_doctor_asks_by_itself(folders, capsys):
    assert cli.run(["doctor", "--model", f"hf:{folders('SAM with a point')}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] < 1e-9


def test_a_point_stays_where_it_is_in_a_prepared_photograph(folders, marked, tmp_path):
    """SAM's own processor would place the point as if the photograph were not squashed."""
    own = load_model(f"hf:{folders('SAM with a point')}")
    squashed = load_model(f"hf:{folders('SAM with a point')}", prepare=Prepare(fit="squash"))
    points = [model.with_prompt(marked, "90,20").model.constants["input_points"] for model in (own, squashed)]
    expected = own.processor(images=marked, input_points=[[[90.0, 20.0]]], return_tensors="pt")["input_points"]
    torch.testing.assert_close(points[0], expected.to(points[0]), atol=0.2, rtol=0)
    torch.testing.assert_close(points[1].flatten(), torch.tensor([90 / WIDTH * 64, 20 / HEIGHT * 64]), atol=0.5, rtol=0)


def test_a_backbone_without_a_head_explains_a_similarity(tmp_path, marked, capsys):
    from transformers import DINOv3ViTConfig, DINOv3ViTImageProcessor, DINOv3ViTModel

    config = DINOv3ViTConfig(hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    tiny_models.drawn(DINOv3ViTModel(config)).save_pretrained(tmp_path / "dino")
    DINOv3ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path / "dino")
    marked.rotate(180).save(tmp_path / "other.png")
    (record,) = explained(tmp_path / "dino", tmp_path, capsys, "--score", f"similarity:{tmp_path / 'other.png'}")
    assert -1 <= record["value"] <= 1
    line = ["explain", str(tmp_path / "photo.png"), "--out", str(tmp_path), "--model", f"hf:{tmp_path / 'dino'}"]
    assert cli.run(line) == 2
    assert "--score similarity:FILE" in capsys.readouterr().err
    with pytest.raises(ModelError, match="transformers has no ImageClassification class for dinov3_vit"):
        backbone(f"hf:{tmp_path / 'dino'}", None, ["cat", "dog"])


def test_what_is_not_an_image_folder_is_one_line(folders, tmp_path, capsys, monkeypatch):
    folder = task_folders.save("DPT", tmp_path / "dpt")
    for content in ('{"image_processor_type": "Absent"}', "[1]", "{"):
        (folder / "preprocessor_config.json").write_text(content)
        with pytest.raises(ModelError) as caught:
            load_model(f"hf:{folder}")
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"dave-vit\[hf\]"):
        load_model("hf:some/model")
