"""Maps are read rightly: one scale beside each other, what speaks against, how sure, and too few samples said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dave_vit
from dave_vit.data.images import LoadedImage
from dave_vit.errors import OptionError, TargetError
from dave_vit.explanations.classes import classify, explain_classes
from dave_vit.explanations.explainer import Explainer
from dave_vit.methods import Explanation
from dave_vit.models import Adapter
from dave_vit.reduce import Significant
from dave_vit.viz.figures import Cell
from dave_vit.viz.panels import build_panels, draw_side_by_side, panel_cells, show
from dave_vit.viz.rendering import Panel, blend, overlay
from tiny_adapters import NAMES, adapter
from tiny_models import SIZE, vit

STRONG, WEAK = torch.rand(16, 16) + 1, (torch.rand(16, 16) + 1) / 100


@pytest.fixture(scope="module")
def model() -> Adapter:
    return adapter()


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 40, 3), dtype=np.uint8))


@pytest.fixture(autouse=True)
def opened(monkeypatch) -> list[Image.Image]:
    """The pictures for which a window would have opened."""
    pictures: list[Image.Image] = []
    monkeypatch.setattr(Image.Image, "show", lambda picture: pictures.append(picture))
    return pictures


def brightness(cells: list[Cell]) -> list[float]:
    return [float(cell.colours.mean()) for cell in cells]


@pytest.mark.parametrize("view", ["map", "signed"])
def test_a_weak_class_beside_a_strong_one_stays_weak_unless_each_has_its_own_scale(view):
    panels = [Panel(STRONG, "strong", signed=-STRONG), Panel(WEAK, "weak", signed=-WEAK)]
    empty = brightness(panel_cells([Panel(0 * WEAK, "nothing")], view=view))[0]
    strong, weak = (abs(each - empty) for each in brightness(panel_cells(panels, view=view)))
    assert weak < strong / 20
    strong, weak = (abs(each - empty) for each in brightness(panel_cells(panels, view=view, scales="own")))
    assert weak == pytest.approx(strong, rel=0.2)


def test_shared_scales_say_so():
    drawing = draw_side_by_side(torch.rand(3, 16, 16), [Panel(STRONG, "a", unit="logit"), Panel(WEAK, "b")])
    words = " ".join(text.get_text() for text in drawing.texts)
    assert words.count("99 % quantile, shared") == 2
    assert "logit" in words


def test_several_targets_in_one_picture_keep_their_strengths():
    left, right = torch.zeros(32, 48), torch.zeros(32, 48)
    left[:, :16], right[:, 32:] = 1, 0.01
    image = torch.full((3, 32, 48), 0.5)
    empty, shared = blend(image, [0 * left]), blend(image, [left, right])
    assert np.abs(shared - empty)[:, 40:].max() < 0.05
    assert np.abs(blend(image, [left, right], shared=False) - empty)[:, 40:].max() > 0.3


def test_what_speaks_against_is_orange_over_the_image_and_what_speaks_for_violet():
    values = torch.zeros(32, 48)
    values[:, :16], values[:, 32:] = 1, -1
    shown = overlay(torch.full((3, 32, 48), 0.5), values, signed=True)
    violet, orange = shown[16, 4], shown[16, 44]
    assert violet[2] > violet[0] > violet[1]
    assert orange[0] > orange[1] > orange[2]


def test_signed_maps_are_the_average_where_the_estimate_keeps_only_what_speaks_for_a_class(model, picture):
    made = dave_vit.DAVE(model, samples=8, reducer=Significant(patch=8)).explain(model.preprocess(picture))
    plain = dave_vit.DAVE(model, samples=8, reducer="mean").explain(model.preprocess(picture))
    torch.testing.assert_close(made.signed, plain.map)
    assert (made.map - plain.map).abs().max() > 0  # what is significant is another map
    torch.testing.assert_close(made.certainty, plain.map.abs() / plain.standard_error)


def test_certainty_is_nothing_where_nothing_is_known():
    error = torch.zeros(1, 4, 4)
    error[0, 0, 0] = 0.5
    made = Explanation(torch.ones(1, 3, 4, 4), torch.tensor([0]), error, mean=torch.full((1, 4, 4), -3.0))
    assert made.certainty[0, 0, 0] == 6
    assert made.certainty.sum() == 6
    assert Explanation(torch.ones(1, 3, 4, 4), torch.tensor([0])).certainty is None


def few(samples: int, error: float, *, significant: bool = True) -> Explanation:
    return Explanation(
        torch.ones(1, 3, 4, 4),
        torch.tensor([0]),
        torch.full((1, 4, 4), error),
        samples,
        significant=torch.tensor([significant]),
        drawn=torch.tensor([samples]),
        mean=torch.full((1, 4, 4), 1.0),
    )


def test_too_few_samples_are_said_with_how_many_would_do():
    assert few(8, 0.6).warnings == ["with 8 samples, 36% of this map is noise; with 29 it would be 10%"]
    assert few(8, 0.4).warnings == [None]
    assert "nothing exceeds the noise of 8 samples" in few(8, 0.1, significant=False).warnings[0]
    words = [text.get_text() for text in show(few(8, 0.6)).texts]
    assert any("36% of this map" in word for word in words)


def test_five_lines_end_in_a_picture(model, picture, tmp_path):
    picture.save(tmp_path / "photo.png")
    explanation = dave_vit.DAVE(model, samples=4).explain(model.preprocess(tmp_path / "photo.png"), target="hen")
    explanation.save(tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as saved:
        assert saved.width > 2 * saved.height  # image, map and certainty
    words = [text.get_text() for text in explanation.show().texts]
    assert {"image", "hen", "certainty"} <= set(words)
    with pytest.raises(OptionError, match="png, svg, pdf"):
        explanation.save(tmp_path / "map.bmp")


def test_pictures_of_a_model_of_which_nothing_is_known_are_drawn_as_well(tmp_path):
    plain: nn.Module = vit()
    explanation = dave_vit.create_method("effective", plain).explain(torch.randn(2, 3, SIZE, SIZE))
    words = [text.get_text() for text in explanation.show().texts]
    assert words.count("image") == 2
    assert any(word.startswith("class ") for word in words)
    assert len(explanation.select(torch.tensor([1])).subject.pictures) == 1


def test_a_window_opens_only_where_there_is_a_screen(monkeypatch, opened):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    few(8, 0.1).show()
    assert opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    few(8, 0.1).show()
    assert len(opened) == 1


def test_a_class_by_its_name_and_why_not_another(model, picture):
    inputs = model.preprocess(picture)
    explanation = dave_vit.create_method("effective", model).explain(inputs, dave_vit.Contrast("hen", against="dog"))
    assert build_panels(explanation, NAMES)[0].target == "hen, not dog"
    with pytest.raises(TargetError, match="did you mean 0 cat"):
        dave_vit.create_method("effective", model).explain(inputs, target="catt")


def test_lists_of_pictures_are_batches(model, picture, tmp_path):
    picture.save(tmp_path / "photo.png")
    batch = model.preprocess([picture, tmp_path / "photo.png"])
    assert batch.shape == (2, 3, SIZE, SIZE)
    torch.testing.assert_close(batch[:1], model.preprocess(picture))


def test_titles_tell_presets_apart(model, picture):
    made = {}
    for preset in ("default", "paper"):
        explainer = Explainer(model, "dave", samples=2, preset=preset)
        classified = classify(model, LoadedImage("photo", picture))
        made[preset] = explain_classes(explainer, classified, classified.pick("hen"))
    assert made["paper"].method_label == "dave, preset paper, 2 samples"
    assert made["default"].method_label.startswith("dave, preset default, ")
    words = [text.get_text() for text in made["paper"].figure("signed").texts]
    assert "photo: dave, preset paper, 2 samples, tiny" in words
    assert {"against"} <= set(words)


def test_maps_that_a_method_prescribes_have_no_unit(model, picture):
    classified = classify(model, LoadedImage("photo", picture))
    units = {
        preset: explain_classes(
            Explainer(model, "dave", samples=2, preset=preset), classified, classified.pick("hen")
        ).unit
        for preset in ("paper", "official")
    }
    assert units == {"paper": "logit", "official": ""}
