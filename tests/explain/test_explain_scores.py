"""Scores of photographs on the command line: where boxes lie, which objects are found, what is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import tiny_models
from dave_vit import load_model
from dave_vit.cli import app
from dave_vit.data.geometry import Geometry
from dave_vit.data.images import LoadedImage
from dave_vit.engine.scores import parse_score
from dave_vit.errors import OptionError
from dave_vit.explanations.explainer import Explainer
from dave_vit.explanations.scores import detect_boxes, refine_score
from dave_vit.models import Adapter, Preprocessing
from model_coverage import architectures

PHOTO = (90, 60)  # width and height


def photograph(mark: tuple[int, int, int, int] | None = None) -> Image.Image:
    """Grey, with a white mark (x0, y0, x1, y1)."""
    pixels = np.full((PHOTO[1], PHOTO[0], 3), 100, dtype=np.uint8)
    if mark is not None:
        pixels[mark[1] : mark[3], mark[0] : mark[2]] = 255
    return Image.fromarray(pixels)


def resized(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image.resize((48, 64), Image.BILINEAR)).copy()).permute(2, 0, 1) / 255


def cropped(image: Image.Image) -> torch.Tensor:
    middle = image.resize((72, 48), Image.BILINEAR).crop((12, 0, 60, 48))
    return torch.from_numpy(np.asarray(middle).copy()).permute(2, 0, 1) / 255


def padded(image: Image.Image) -> torch.Tensor:
    small = torch.from_numpy(np.asarray(image.resize((60, 40), Image.BILINEAR)).copy()).permute(2, 0, 1) / 255
    return nn.functional.pad(small, (0, 4, 8, 16))  # left, right, above, below


class Lights(nn.Module):
    """Adds up how bright each place is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True)  # [B, 1, H, W]


def adapter(transform, model: nn.Module | None = None) -> Adapter:
    model = (model or Lights()).eval()
    model.register_parameter("unused", nn.Parameter(torch.zeros(())))
    return Adapter(model, Preprocessing(transform), ["light"], spec="lights")


TRANSFORMS = [resized, cropped, padded]


@pytest.mark.parametrize(
    ("transform", "step", "start"),
    [
        (resized, (90 / 48, 60 / 64), (0, 0)),
        (cropped, (90 / 72, 60 / 48), (15, 0)),
        (padded, (90 / 60, 60 / 40), (0, -12)),
    ],
)
def test_preprocessing_is_followed_back(transform, step, start):
    geometry = Geometry.measure(Preprocessing(transform), PHOTO)
    assert geometry.scale == pytest.approx(step, abs=0.02)
    assert (geometry.x.offset, geometry.y.offset) == pytest.approx(start, abs=0.6)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("mark", [(18, 3, 30, 15), (60, 42, 72, 57)])
def test_a_mark_in_a_corner_of_a_photograph_is_found_there(transform, mark):
    """The region around the mark is scored; its map, brought back to the photograph, lies on the mark."""
    x0, y0, x1, y1 = mark
    explainer = Explainer(adapter(transform), "effective")
    region = f"region:{x0 - 3},{y0 - 3},{x1 + 3},{y1 + 3}:light"
    picture = photograph(mark)
    score = parse_score(region, explainer.model, Geometry.measure(explainer.model.preprocess, picture.size))
    inputs = explainer.model.preprocess(picture)
    *_, scored = refine_score(explainer, LoadedImage("photo", picture), inputs, (region, score))
    assert scored.viewed_map().shape == (60, 90)
    inside = torch.zeros_like(scored.viewed_map(), dtype=torch.bool)
    inside[max(0, y0 - 5) : y1 + 5, max(0, x0 - 5) : x1 + 5] = True
    assert scored.viewed_map()[inside].sum() > 0.99 * scored.viewed_map().sum() > 0
    row, column = divmod(int(scored.viewed_map().argmax()), 90)
    assert y0 <= row < y1
    assert x0 <= column < x1


def test_scores_by_name():
    model = adapter(resized)
    geometry = Geometry.measure(model.preprocessing, PHOTO)
    assert parse_score("class:0", model, geometry).label == 0
    assert parse_score("value", model, geometry).index == 0
    assert parse_score("query:3:Light", model, geometry).query == 3
    assert parse_score("box:0,0,45,30:light", model, geometry).box == pytest.approx((0, 0, 0.5, 0.5), abs=0.02)
    for text, said in [
        ("nothing:3", "expected one of class:CLASS"),
        ("query:light", "expected query:NUMBER:CLASS"),
        ("region:1,2,3:light", "expected region:x0,y0,x1,y1:CLASS"),
        ("region:200,0,300,10:light", "outside of what the model sees"),
        ("class:dog", "'dog' is not one of lights"),
        ("token:cat", "has no words"),
        ("similarity:", "expected similarity:FILE"),
    ]:
        with pytest.raises(OptionError, match=said) as caught:
            parse_score(text, model, geometry)
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import YolosImageProcessor

    folder = tmp_path_factory.mktemp("detector")
    (entry,) = [entry for entry in architectures("transformers") if entry.family == "YOLOS"]
    model = tiny_models.drawn(entry.build())
    model.save_pretrained(folder)
    YolosImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder


def explained(*arguments: str) -> list[dict]:
    result = CliRunner().invoke(app, ["explain", *arguments, "--json", "--method", "effective"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_boxes_of_a_detector(detector, tmp_path):
    photo = tmp_path / "photo.png"
    photograph((10, 10, 40, 40)).save(photo)
    model = load_model(f"hf:{detector}")
    found = detect_boxes(
        Explainer(model, "effective"), LoadedImage("photo", photograph((10, 10, 40, 40))), threshold=0.0
    )
    assert 0 < len(found) <= 5
    x0, y0, x1, y1 = found[0].corners
    assert 0 <= x0 <= x1 <= PHOTO[0]
    assert 0 <= y0 <= y1 <= PHOTO[1]
    records = explained(str(photo), "--model", f"hf:{detector}", "--boxes", "--threshold", "0", "--out", str(tmp_path))
    assert [record["score"] for record in records] == [each.score for each in found]
    for record in records:
        assert all(Path(file).is_file() for file in record["files"])
    with Image.open(tmp_path / "photo.box1.effective.dave.png") as drawn:
        assert drawn.size == PHOTO
    with Image.open(tmp_path / "photo.boxes.effective.dave.png") as drawn:
        assert drawn.size == PHOTO
    together = json.loads((tmp_path / "photo.boxes.effective.dave.json").read_text())
    assert [box["score"] for box in together["boxes"]] == [each.score for each in found]


def test_a_score_is_recorded(detector, tmp_path):
    photo = tmp_path / "photo.png"
    photograph().save(photo)
    (record,) = explained(str(photo), "--model", f"hf:{detector}", "--score", "query:2:3", "--out", str(tmp_path))
    assert record["score"] == "query:2:3"
    model = load_model(f"hf:{detector}")
    with torch.no_grad():
        value = model(model.preprocess(photograph())).logits[0, 2, 3]
    assert record["value"] == pytest.approx(float(value), rel=1e-4)
    assert np.load(tmp_path / "photo.query-2-3.effective.dave.npz")["map"].shape == (60, 90)


def test_the_doctor_knows_detectors(detector):
    result = CliRunner().invoke(app, ["doctor", "--model", f"hf:{detector}", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["gap"] < 1e-9
