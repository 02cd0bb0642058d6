"""Pictures: colours keep their order, scales are robust and printed, nothing in a figure is cut or overlaps."""

from __future__ import annotations

import io
import itertools

import matplotlib
import matplotlib.text
import numpy as np
import pytest
import torch
from PIL import Image

from dave_vit.data.images import LoadedImage
from dave_vit.errors import InputError, OptionError
from dave_vit.explanations.classes import ClassExplanation, classify, explain_classes
from dave_vit.explanations.explainer import Explainer
from dave_vit.methods import METHODS, Explanation
from dave_vit.methods.options import filter_options
from dave_vit.viz.colors import DAVE, colorize, hue
from dave_vit.viz.figures import Drawing, certainty_cell, draw_grid, image_cell, map_cell
from dave_vit.viz.panels import build_panels, draw_comparison, draw_side_by_side, show
from dave_vit.viz.pictures import animate
from dave_vit.viz.plots import STYLES, method_style
from dave_vit.viz.rendering import Panel, as_image, blend, colorize_map, overlay, resize_image, scale_map
from web_fixtures import adapter, make_picture

GENERATOR = torch.Generator().manual_seed(0)
IMAGE = torch.rand(3, 32, 48, generator=GENERATOR)
MAP = torch.randn(32, 48, generator=GENERATOR)


def lightness(colours: np.ndarray) -> np.ndarray:
    """CIE L* of sRGB colours."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    luminance = linear @ np.array([0.2126, 0.7152, 0.0722])
    return np.where(luminance > 0.008856, 116 * np.cbrt(luminance) - 16, 903.3 * luminance)


@pytest.mark.parametrize("name", ["dave", "dave_uncertainty"])
def test_colormaps_rise_evenly_in_lightness(name):
    steps = np.diff(lightness(colorize(np.linspace(0, 1, 65), name)))
    assert steps.min() > 0.4 * steps.mean()
    assert steps.max() < 1.8 * steps.mean()


def test_the_signed_colormap_is_lightest_at_zero_and_alike_on_both_sides():
    values = lightness(colorize(np.linspace(0, 1, 65), "dave_signed"))
    assert values.argmax() == 32
    assert (np.diff(values)[:32] > 0).all()
    assert (np.diff(values)[32:] < 0).all()
    assert abs(values[16] - values[48]) < 12


def test_matplotlib_knows_the_colormaps_by_name():
    assert matplotlib.colormaps["dave"](1.0)[:3] == pytest.approx((1.0, 0xED / 255, 0x71 / 255), abs=0.01)


def test_every_method_has_a_style_of_its_own():
    looks = {(one.colour, one.dash, one.marker) for one in STYLES.values()}
    assert len(looks) == len(STYLES)
    colours = {name: one.colour for name, one in STYLES.items() if not name.startswith("dave-")}
    assert len(set(colours.values())) == len(colours)
    assert set(METHODS) <= set(STYLES)
    assert method_style("dave").colour == method_style("dave-paper").colour == method_style("dave-16").colour == DAVE
    assert method_style("dave-16").label == "dave-16"
    assert method_style("mine").label == "mine"
    mine = method_style("mine")
    assert (mine.colour, mine.dash, mine.marker) not in looks


def test_one_bright_pixel_does_not_darken_the_rest():
    values = torch.full((20, 20), 0.5)
    values[:10] = 0.25
    values[0, 0] = 1000
    scaled = scale_map(values, quantile=0.99)
    assert (scaled.limit, scaled.values.max(), scaled.values[5, 5]) == (0.5, 1.0, 0.5)
    assert scale_map(values, quantile=1).limit == 1000
    assert "99 % quantile" in scaled.caption


def test_signed_maps_keep_both_signs_on_one_scale():
    scaled = scale_map(torch.tensor([[-4.0, 1.0], [2.0, 0.0]]), quantile=1, signed=True)
    assert scaled.values.tolist() == [[-1.0, 0.25], [0.5, 0.0]]
    orange, violet = colorize_map(torch.tensor([[-1.0, 1.0]]), "dave_signed")[0]
    assert orange[0] > orange[2]
    assert violet[2] > violet[1]


def test_a_map_of_zeros_and_a_negative_map_are_dark_not_an_error():
    for values in (torch.zeros(8, 8), -torch.ones(8, 8)):
        np.testing.assert_allclose(colorize_map(values), np.broadcast_to(colorize(np.zeros(1), "dave"), (8, 8, 3)))


def test_an_overlay_shows_the_image_where_the_map_is_zero_and_the_map_where_it_is_high():
    values = torch.zeros(32, 48)
    values[8:24, 8:24] = 1
    shown, empty = overlay(IMAGE, values), overlay(IMAGE, torch.zeros(32, 48))
    np.testing.assert_allclose(shown[:, 32:], empty[:, 32:])
    np.testing.assert_allclose(shown[16, 16], colorize(np.ones(1), "dave")[0], atol=0.06)
    assert np.abs(empty - as_image(IMAGE)).mean() < 0.3  # paler, and still the image


def test_strength_is_checked():
    with pytest.raises(OptionError, match="strength"):
        overlay(IMAGE, MAP, strength=2)


def test_each_of_several_targets_shows_in_its_own_hue_never_in_a_mixed_one():
    left, right = torch.zeros(32, 48), torch.zeros(32, 48)
    left[:, :16], right[:, 32:] = 1, 1
    both = torch.zeros(32, 48)
    both[:, 32:] = 0.9
    shown = blend(IMAGE, [left, right, both])
    for column, index in ((4, 0), (44, 1)):
        np.testing.assert_allclose(shown[16, column], hue(index), atol=0.06)


def test_images_of_another_size_are_fitted_to_the_map():
    assert resize_image(Image.new("RGB", (300, 200)), (32, 48)).shape == (32, 48, 3)


@pytest.mark.parametrize("image", [torch.rand(1, 3, 8, 8), np.zeros((8, 8)), torch.rand(4, 8, 8)])
def test_what_is_no_image_is_refused_with_its_shape(image):
    with pytest.raises(InputError, match=str(list(image.shape)).replace("[", r"\[")):
        image_cell(image)


def test_a_batch_of_maps_is_refused():
    with pytest.raises(InputError, match="one by one"):
        map_cell(torch.zeros(2, 8, 8))


LONG = "a class whose name is so long that it has to be wrapped, and even then does not fit above its picture at all"


def one(target: str, values: torch.Tensor = MAP) -> Panel:
    return Panel(values, target, values.abs())


def kinds() -> Drawing:
    signed, over = map_cell(MAP * 1e-5, LONG, signed=True), image_cell(overlay(IMAGE, MAP), "overlay")
    return draw_grid([[image_cell(IMAGE), signed, over, certainty_cell(MAP)]])


def grid() -> Drawing:
    columns = {name: [map_cell(MAP * 1e-7)] * 2 for name in ("dave", "integrated_gradients", "input_x_gradient")}
    return draw_comparison([IMAGE, IMAGE], columns, labels=[LONG, "cat"], title="a title")


DRAWINGS = {
    "one target": lambda: draw_side_by_side(IMAGE, [one("elephant (43.4%)")], title="el1: dave, 50 samples, timm:deit"),
    "five targets": lambda: draw_side_by_side(IMAGE, [one(LONG)] * 5, title=LONG * 2),
    "tall image": lambda: draw_side_by_side(torch.rand(3, 96, 32), [one(LONG, torch.rand(96, 32))], title=LONG),
    "wide image": lambda: draw_side_by_side(torch.rand(3, 16, 96), [one(LONG, torch.rand(16, 96))], title=LONG),
    "kinds of cells": kinds,
    "comparison": grid,
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_nothing_in_a_figure_is_cut_or_overlaps(name):
    drawing = DRAWINGS[name]()
    renderer = drawing.canvas.get_renderer()
    width, height = drawing.canvas.get_width_height()
    texts = [text for text in drawing.texts if text.get_text()]
    boxes = [text.get_window_extent(renderer) for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text
    pictures = [axes.get_window_extent(renderer) for axes in drawing.axes]
    for (text, first), second in itertools.product(zip(texts, boxes, strict=True), pictures):
        assert not first.padded(-1).overlaps(second.padded(-1)), f"{text} lies on a picture"
    for (one, first), (two, second) in itertools.combinations(zip(texts, boxes, strict=True), 2):
        assert not first.padded(-1).overlaps(second.padded(-1)), f"{one} lies on {two}"


def test_the_scale_is_printed_in_the_figure():
    drawing = draw_side_by_side(IMAGE, [Panel(torch.full((8, 8), 0.125), "cat")])
    words = [text.get_text() for text in drawing.texts]
    assert "0.12 = 99 % quantile" in words
    assert "cat" in words


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_figures_are_saved_by_the_ending_of_the_name(tmp_path, kind, start):
    drawing = draw_grid([[map_cell(MAP)]])
    drawing.save(tmp_path / "new" / f"map.{kind}")
    assert (tmp_path / "new" / f"map.{kind}").read_bytes().startswith(start)
    assert drawing.to_bytes(kind) == drawing.to_bytes(kind)


def test_another_ending_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(OptionError, match="png, svg, pdf"):
        draw_grid([[map_cell(MAP)]]).save(tmp_path / "map.bmp")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_an_animation_shows_each_step_and_rests_on_the_last(kind):
    steps = [(count, Panel(MAP * count, "", certainty=MAP.abs() / count)) for count in (1, 2, 4)]
    with Image.open(io.BytesIO(animate(IMAGE, steps, kind, seconds=1))) as moving:
        frames = []
        for number in range(moving.n_frames):
            moving.seek(number)
            frames.append((moving.convert("RGB"), moving.info["duration"]))
    assert [duration for _, duration in frames] == [500, 500, 2000]
    assert np.abs(np.asarray(frames[0][0], float) - np.asarray(frames[2][0], float)).mean() > 1


def test_frames_share_the_scale_of_the_last_one():
    steps = [(1, Panel(MAP / 10, "")), (2, Panel(MAP, ""))]
    with Image.open(io.BytesIO(animate(IMAGE, steps, "gif"))) as moving:
        first = np.asarray(moving.convert("RGB"), float)
        moving.seek(1)
        last = np.asarray(moving.convert("RGB"), float)
    assert first.mean() < last.mean()


def test_animations_of_nothing_or_of_another_kind_are_refused():
    with pytest.raises(OptionError, match="no steps"):
        animate(IMAGE, [])
    with pytest.raises(OptionError, match="gif, webp"):
        animate(IMAGE, [(1, Panel(MAP, ""))], "mp4")


@pytest.mark.parametrize("targets", [torch.tensor([1, 0]), torch.tensor([[1, 0, 2], [0, 1, 2]])])
def test_explanations_show_themselves(targets):
    attribution = torch.randn(*targets.shape, 3, 16, 16)
    error = attribution.abs().sum(-3)
    explanation = Explanation(attribution, targets, error, samples=8, mean=attribution.sum(-3))
    drawing = show(explanation, torch.rand(2, 3, 16, 16), ["cat", "dog", "hen"])
    words = [text.get_text() for text in drawing.texts]
    assert words.count("dog") == 1 + (targets.ndim - 1)
    assert words.count("certainty") == targets.numel()
    assert drawing._repr_png_().startswith(b"\x89PNG")


def test_maps_of_several_targets_are_the_sums_over_their_channels():
    attribution = torch.randn(1, 2, 3, 4, 4)
    panels = build_panels(Explanation(attribution, torch.tensor([[5, 7]])))
    assert [each.target for each in panels] == ["class 5", "class 7"]
    torch.testing.assert_close(panels[1].map, attribution[0, 1].sum(0))


def explain_tiny(name: str, **options) -> ClassExplanation:
    explainer = Explainer(adapter(), name, **options)
    classified = classify(explainer.model, LoadedImage("noise", make_picture()))
    return explain_classes(explainer, classified, classified.pick("top1"))


@pytest.mark.parametrize(
    ("name", "options", "effort"),
    [
        ("integrated_gradients", {"steps": 3}, "3 steps"),
        ("lime", {"samples": 8}, "8 masks"),
        ("rise", {"samples": 8}, "8 masks"),
        ("smoothgrad", {"samples": 3}, "3 samples"),
        ("saliency", {}, ""),
    ],
)
def test_titles_say_what_a_map_took(name, options, effort):
    result = explain_tiny(name, **options)
    assert result.method_label == ", ".join(filter(None, [name, effort]))


@pytest.mark.parametrize("name", ["rise", "occlusion"])
def test_maps_of_masks_are_drawn_from_their_smallest_to_their_largest_value(name):
    result = explain_tiny(name, **filter_options(name, samples=16))
    (panel,) = result.panels
    values, map_ = np.asarray(panel.map), result.explanation.map[0].numpy()
    assert (values.min(), values.max(), panel.unit) == (0, 1, "of its range")
    np.testing.assert_allclose(values, (map_ - map_.min()) / (map_.max() - map_.min()), atol=1e-5)


def test_the_figure_of_one_target_has_an_overlay():
    result = explain_tiny("saliency")
    texts = [text.get_text() for text in result.figure().findobj(matplotlib.text.Text)]
    assert {"image", "overlay"} <= set(texts)
