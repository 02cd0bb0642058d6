"""Deletion and insertion against a slow oracle that changes one pixel after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dave_vit.errors import InputError, OptionError
from dave_vit.metrics import Perturbation, area, deletion, insertion
from dave_vit.metrics.perturbation import gaussian_blur, protocol

FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.8, 1.0)


class Counting(nn.Module):
    """A small model that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.LazyLinear(5))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.net(x)


@pytest.fixture
def case():
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(4, 3, 6, 5, generator=draw)
    maps = torch.randn(4, 6, 5, generator=draw)
    model = Counting().eval()
    with torch.no_grad():
        model(inputs)
    model.calls = 0
    return model, inputs, maps, torch.tensor([0, 3, 1, 4])


def slow_curve(model, image, heat, target, fractions, *, most, fill, accuracy):
    """One image, one pixel at a time."""
    order = sorted(range(heat.size), key=lambda i: -heat.flat[i] if most else heat.flat[i])
    curve = []
    for fraction in fractions:
        changed = image.copy()
        for i in order[: round(fraction * heat.size)]:
            y, x = divmod(i, heat.shape[1])
            changed[:, y, x] = fill[:, y, x]
        with torch.no_grad():
            logits = model(torch.from_numpy(changed)[None])[0].double().numpy()
        odds = np.exp(logits - logits.max())
        curve.append(float(logits.argmax() == target) if accuracy else odds[target] / odds.sum())
    return curve


@pytest.mark.parametrize("order", ["least", "most"])
@pytest.mark.parametrize("score", ["probability", "accuracy"])
@pytest.mark.parametrize("baseline", ["zero", "black", "mean"])
def test_deletion_equals_the_slow_oracle(case, order, score, baseline):
    model, inputs, maps, target = case
    perturbation = Perturbation(FRACTIONS, order, baseline, score, black=(-2.0, -1.5, -1.0))
    curve = deletion(model, inputs, maps, target, perturbation)
    fills = {
        "zero": torch.zeros_like(inputs),
        "black": torch.tensor([-2.0, -1.5, -1.0])[None, :, None, None].expand_as(inputs),
        "mean": inputs.mean((2, 3), keepdim=True).expand_as(inputs),
    }
    for i in range(len(inputs)):
        expected = slow_curve(
            model,
            inputs[i].numpy(),
            maps[i].numpy(),
            int(target[i]),
            FRACTIONS,
            most=order == "most",
            fill=fills[baseline][i].numpy(),
            accuracy=score == "accuracy",
        )
        np.testing.assert_allclose(curve[i].numpy(), expected, atol=1e-6)


def test_one_forward_pass_per_fraction(case):
    model, inputs, maps, target = case
    deletion(model, inputs, maps, target, Perturbation(FRACTIONS))
    assert model.calls == len(FRACTIONS)


def test_insertion_puts_the_most_important_back_first(case):
    model, inputs, maps, target = case
    curve = insertion(model, inputs, maps, target, Perturbation(FRACTIONS, "most", "zero"))
    for i in range(len(inputs)):
        expected = slow_curve(
            model,
            np.zeros_like(inputs[i].numpy()),
            maps[i].numpy(),
            int(target[i]),
            FRACTIONS,
            most=True,
            fill=inputs[i].numpy(),
            accuracy=False,
        )
        np.testing.assert_allclose(curve[i].numpy(), expected, atol=1e-6)


def test_the_ends_of_the_curve_are_the_image_and_the_baseline(case):
    model, inputs, maps, target = case
    curve = deletion(model, inputs, maps, target, Perturbation((0.0, 1.0)))
    with torch.no_grad():
        ends = torch.stack([model(x).softmax(1)[range(4), target] for x in (inputs, torch.zeros_like(inputs))], 1)
    torch.testing.assert_close(curve, ends)


def test_a_map_that_is_not_finite_is_nan_and_leaves_the_others_alone(case):
    model, inputs, maps, target = case
    clean = deletion(model, inputs, maps, target)
    maps[1, 0, 0] = torch.nan
    maps[2, 0, 0] = -torch.inf
    curve = deletion(model, inputs, maps, target)
    assert curve.isnan().all(1).tolist() == [False, True, True, False]
    assert torch.equal(curve[[0, 3]], clean[[0, 3]])


def test_equal_pixels_go_by_lot_and_not_row_by_row(case):
    _, inputs, _, target = case
    taken = []

    def spy(x):
        taken.append((x == 0).all(1))
        return torch.zeros(len(x), 5)

    deletion(spy, inputs, torch.zeros(4, 6, 5), target, Perturbation((0.0, 0.5)))
    half = taken[1]
    assert half.flatten(1).sum(1).tolist() == [15] * 4
    assert torch.equal(half[0], half[1])  # the same lot for every map
    assert 0 < half[0, :3].sum() < 15  # neither the upper half nor the lower


def test_area_by_hand():
    curve = torch.tensor([[1.0, 0.5, 0.0], [1.0, 1.0, 1.0]])
    assert area(curve, (0.0, 0.5, 1.0)).tolist() == [0.5, 1.0]
    assert area(curve, (0.0, 0.2, 0.8))[0].item() == pytest.approx((0.2 * 0.75 + 0.6 * 0.25) / 0.8)


def test_blur_equals_torchvision_with_zeros_outside():
    functional = pytest.importorskip("torchvision.transforms.functional")
    images = torch.randn(2, 3, 40, 36, generator=torch.Generator().manual_seed(0))
    wide = functional.gaussian_blur(torch.nn.functional.pad(images, (31,) * 4), 31, 7.0)
    torch.testing.assert_close(gaussian_blur(images), wide[..., 31:-31, 31:-31])


def slow_blur(image):
    """A two-dimensional Gaussian of 31 pixels, sigma 7, one pixel at a time; zeros outside."""
    at = np.arange(-15, 16)
    kernel = np.exp(-(at[:, None] ** 2 + at[None] ** 2) / (2 * 7.0**2))
    kernel /= kernel.sum()
    padded = np.pad(image.astype(np.float64), ((0, 0), (15, 15), (15, 15)))
    height, width = image.shape[1:]
    rows = [[(padded[:, y : y + 31, x : x + 31] * kernel).sum((1, 2)) for x in range(width)] for y in range(height)]
    return np.array(rows).transpose(2, 0, 1).astype(image.dtype)


def test_the_official_protocol_is_kept_to_the_pixel():
    """Counts 0, s, 2s ... with s = floor(floor(0.9 N) / 128), and floor(0.9 N) last; blur; probability."""
    draw = torch.Generator().manual_seed(4)
    inputs, maps = torch.randn(1, 3, 18, 20, generator=draw), torch.randn(1, 18, 20, generator=draw)
    model = Counting().eval()
    perturbation = protocol("official", 360)
    curve = deletion(model, inputs, maps, torch.tensor([2]), perturbation)
    counts = [round(fraction * 360) for fraction in perturbation.fractions]
    assert counts == [*range(0, 324, 2), 324]
    expected = slow_curve(
        model,
        inputs[0].numpy(),
        maps[0].numpy(),
        2,
        perturbation.fractions,
        most=False,
        fill=slow_blur(inputs[0].numpy()),
        accuracy=False,
    )
    np.testing.assert_allclose(curve[0].numpy(), expected, atol=1e-6)


def test_protocols_at_the_size_of_their_papers():
    official = [round(fraction * 224**2) for fraction in protocol("official", 224**2).fractions]
    assert len(official) == 130
    assert (official[1], official[-2], official[-1]) == (352, 45056, 45158)
    chefer = protocol("chefer", 224**2, black=(-2.0, -2.0, -2.0))
    assert [round(fraction * 224**2) for fraction in chefer.fractions][:3] == [5017, 10035, 15052]
    assert (chefer.order, chefer.baseline, chefer.score) == ("most", "black", "accuracy")
    assert protocol("paper", 9).fractions[-1] == 1.0
    with pytest.raises(OptionError, match="paper, official, chefer"):
        protocol("quantus", 9)


@pytest.mark.parametrize(
    "options",
    [
        {"fractions": (0.5,)},
        {"fractions": (0.5, 0.2)},
        {"fractions": (0.0, 1.1)},
        {"order": "first"},
        {"baseline": "black"},
        {"baseline": "white"},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(OptionError):
        Perturbation(**options)


def test_shapes_that_do_not_fit_are_refused(case):
    model, inputs, maps, target = case
    with pytest.raises(InputError):
        deletion(model, inputs, maps[:2], target)
    with pytest.raises(OptionError, match="one per channel"):
        deletion(model, inputs, maps, target, Perturbation(baseline="black", black=(0.0,)))
