"""Photographs and inputs: what is cut off is shown, other ways to fit, a user's own preprocessing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dave_vit
from dave_vit import cli
from dave_vit.data.geometry import Geometry
from dave_vit.data.images import LoadedImage
from dave_vit.errors import ModelError, OptionError
from dave_vit.explanations.classes import classify, explain_classes
from dave_vit.explanations.explainer import Explainer
from dave_vit.models import Prepare, Preprocessing
from dave_vit.models.prepare import Standard, tiles
from tiny_models import SIZE, huggingface_vit, vit

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.25, 0.25)
WIDE = (120, 60)


def photo(size: tuple[int, int] = WIDE) -> Image.Image:
    """Red on the left, green in the middle, blue on the right."""
    pixels = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    for number, part in enumerate(np.array_split(np.arange(size[0]), 3)):
        pixels[:, part, number] = 255
    return Image.fromarray(pixels)


def cropping(share: float = 0.8) -> Preprocessing:
    return Preprocessing(Standard(SIZE, MEAN, STD, share), MEAN, STD)


def squashing() -> Preprocessing:
    def transform(image: Image.Image) -> torch.Tensor:
        return Standard(SIZE, MEAN, STD)(image.resize((SIZE, SIZE)))

    return Preprocessing(transform, MEAN, STD)


def shown(preprocessing: Preprocessing, size: tuple[int, int] = WIDE) -> torch.Tensor:
    return preprocessing.picture(preprocessing(photo(size)))[0]


@pytest.mark.parametrize("own", [cropping(), cropping(1.0), squashing()])
@pytest.mark.parametrize("size", [WIDE, WIDE[::-1]])
def test_padding_and_squashing_show_the_whole_photograph(own, size):
    for fit in ("pad", "squash"):
        left, top, right, bottom = Geometry.measure(Prepare(fit=fit).of(own), size).visible_box
        assert (left, top) == pytest.approx((0, 0), abs=1.5)
        assert (right, bottom) == pytest.approx(size, abs=1.5)


def test_padding_keeps_proportions_and_fills_with_the_mean_colour():
    colours = shown(Prepare(fit="pad").of(cropping()))
    torch.testing.assert_close(colours[:, 2, 16], torch.tensor(MEAN), atol=0.01, rtol=0)
    geometry = Geometry.measure(Prepare(fit="pad").of(cropping()), WIDE)
    assert geometry.scale[0] == pytest.approx(geometry.scale[1], rel=0.05)


def test_cropping_takes_the_middle_where_the_model_would_squash():
    whole, middle = shown(squashing()), shown(Prepare(fit="crop").of(squashing()))
    assert whole[0, 16, 8] > 0.9  # red, which fills a third of the photograph and a sixth of its middle
    assert middle[1, 16, 8] > 0.9
    assert Geometry.measure(Prepare(fit="crop").of(squashing()), WIDE).visible_box == pytest.approx(
        (30, 0, 90, 60), abs=1.5
    )


@pytest.mark.parametrize("size", [(120, 60), (60, 121), (100, 100), (301, 100), (7, 100)])
def test_tiles_cover_the_photograph_and_overlap(size):
    covered = np.zeros(size[::-1], dtype=int)
    boxes = tiles(1.0, size)
    for left, top, right, bottom in boxes:
        assert (right - left, bottom - top) == (min(size), min(size))
        covered[top:bottom, left:right] += 1
    assert covered.min() >= 1
    assert (len(boxes) == 1) == (size == (100, 100))
    assert len(boxes) == 1 or covered.max() >= 2


def adapter(preprocessing: Preprocessing) -> dave_vit.models.Adapter:
    return dave_vit.models.Adapter(vit(), preprocessing, ["cat", "dog", "hen", "cock", "owl"], spec="tiny")


def result(preprocessing: Preprocessing, method: str = "effective", target: str = "dog"):
    model = adapter(preprocessing)
    classified = classify(model, LoadedImage("wide", photo()))
    return explain_classes(Explainer(model, method), classified, classified.pick(target))


def test_what_the_crop_cut_off_is_told_and_drawn():
    explained = result(cropping(0.8))
    record = explained.record()
    assert record["crop"] == pytest.approx([36, 6, 84, 54], abs=1)
    assert record["seen"] == pytest.approx(48 * 48 / (120 * 60), abs=0.02)
    assert any("covers 3" in note for note in explained.notes)
    drawn = np.asarray(explained.overlay(), dtype=float)
    assert drawn.shape[1] / drawn.shape[0] == pytest.approx(2, rel=0.02)  # the whole photograph
    assert drawn[:, :20].min() > 150  # what was cut off is pale
    assert not any("sees" in note for note in result(squashing()).notes)


@pytest.mark.parametrize("own", [cropping(0.8), squashing()])
def test_maps_of_several_targets_lie_on_what_they_are_maps_of(own, monkeypatch):
    drawn = []
    real = dave_vit.viz.panels.targets_cell
    monkeypatch.setattr(
        "dave_vit.viz.panels.targets_cell",
        lambda image, *rest, **more: drawn.append(image) or real(image, *rest, **more),
    )
    explained = result(own, target="dog,hen")
    explained.figure()
    shown = dave_vit.viz.rendering.as_image(drawn[0])
    height, width = explained.photo_panels[0].map.shape
    assert shown.shape[1] / shown.shape[0] == pytest.approx(width / height, rel=0.05)
    assert shown.min(-1).max() < 0.3  # pure colours: no part of it is pale


@pytest.mark.parametrize("target", ["dog", "dog,hen"])
def test_panels_show_photograph_and_map_at_one_scale(target):
    explained = result(cropping(0.8), target=target)
    figure = explained.figure()
    drawn = {axes.get_position().x0: axes for axes in figure.axes if axes.images and axes.get_position().height > 0.1}
    map_, photograph = list(drawn.values())[-1], next(iter(drawn.values()))
    assert map_.get_position().width == pytest.approx(photograph.get_position().width, rel=0.02)
    assert map_.get_position().height == pytest.approx(photograph.get_position().height, rel=0.02)
    coloured = (np.asarray(map_.images[0].get_array()).min(-1) < 0.99).nonzero()
    height, width = map_.images[0].get_array().shape[:2]
    seen = [
        coloured[1].min() / width,
        coloured[0].min() / height,
        coloured[1].max() / width,
        coloured[0].max() / height,
    ]
    assert seen == pytest.approx([36 / 120, 6 / 60, 84 / 120, 54 / 60], abs=0.03)


def test_colours_of_signed_panels_mean_one_thing():
    """With several classes there is no picture with a hue for each: violet and orange are for and against."""
    explained = result(cropping(0.8), target="dog,hen")
    titles = {view: {text.get_text() for text in explained.figure(view).texts} for view in ("map", "signed")}
    assert "all targets" in titles["map"] - titles["signed"]
    assert "overlay" in titles["signed"] - titles["map"]


def test_maps_of_squashed_photographs_have_their_proportions():
    explained = result(squashing())
    height, width = explained.photo_panels[0].map.shape
    assert width / height == pytest.approx(2, rel=0.05)
    assert explained.arrays()["map"].shape == (SIZE, SIZE)  # the raw numbers stay as they are
    assert explained.figure().to_bytes("png").startswith(b"\x89PNG")


def test_tiles_are_explained_one_by_one_and_lie_where_they_belong():
    explained = result(Prepare(fit="tiles").of(cropping()))
    parts = explained.explanation.attribution.shape[0]
    assert parts == len(explained.record()["crop"]) >= 2
    assert explained.record()["seen"] == 1
    assert explained.arrays()["attribution"].shape == (parts, 3, SIZE, SIZE)
    levels = explained.photo.place([torch.full((SIZE, SIZE), float(number)) for number in range(parts)])  # [60, 120]
    assert levels[30, 5] == 0  # seen by the first alone
    assert levels[30, 45] == pytest.approx(0.5)  # by two
    assert levels[30, 115] == parts - 1
    assert sum(each.probability for each in explained.classified.predictions) == pytest.approx(1)


def test_a_preprocessing_of_ones_own():
    model = dave_vit.load_model("builtin", prepare=Prepare(size=96, mean=MEAN, std=STD, crop=0.5))
    inputs = model.preprocess(photo())
    assert inputs.shape == (1, 3, 96, 96)
    torch.testing.assert_close(model.preprocessing.picture(inputs)[0, :, 48, 48], torch.tensor([0.0, 1.0, 0.0]))
    assert Geometry.measure(model.preprocessing, WIDE).visible_box == pytest.approx((45, 15, 75, 45), abs=1)
    partly = dave_vit.load_model("builtin", prepare=Prepare(crop=0.5))
    assert partly.preprocess(photo()).shape == (1, 3, 224, 224)
    assert partly.preprocessing.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("options", [{"size": 0}, {"crop": 1.5}, {"std": (1.0, 0.0, 1.0)}])
def test_impossible_preprocessings_are_refused(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        Prepare(**options)


def test_models_with_other_channels_keep_their_own():
    with pytest.raises(OptionError, match="6 channels"):
        dave_vit.load_model("builtin-bcos", prepare=Prepare(size=96))
    assert dave_vit.load_model("builtin-bcos", prepare=Prepare(fit="pad")).preprocess(photo()).shape == (1, 6, 224, 224)


def test_a_folder_without_a_preprocessor_asks_for_what_it_does(tmp_path):
    huggingface_vit().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"--size 224 --mean 0\.5,0\.5,0\.5 --std"):
        dave_vit.load_model(f"hf:{tmp_path}")
    model = dave_vit.load_model(f"hf:{tmp_path}", prepare=Prepare(size=SIZE, mean=MEAN, std=STD))
    assert model(model.preprocess(photo())).shape == (1, 5)
    torch.testing.assert_close(model.preprocess(photo())[0], Standard(SIZE, MEAN, STD)(photo()))


def test_the_command_line_takes_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    photo().save("wide.png")
    words = ["explain", "wide.png", "--method", "effective", "--target", "0", "--out", "out"]
    assert cli.run([*words, "--size", "224", "--mean", "0.5", "--std", "0.5,0.5,0.5", "--fit", "tiles", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)[0]
    assert record["shape"] == [3, 224, 224]
    assert record["prepare"]["fit"] == "tiles"
    assert len(record["crop"]) >= 2
    assert cli.run([*words, "--size", "224"]) == 0
    assert len(list(Path("out").glob("*.json"))) == 2  # another question
    assert cli.run([*words, "--mean", "0.5,0.5"]) == 2
    assert "three numbers" in capsys.readouterr().err
