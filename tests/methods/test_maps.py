"""Maps: collapse, smoothing, official post-processing, scaling for display."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dave_vit.errors import InputError, OptionError
from dave_vit.maps import collapse, normalize, official_postprocess, positive, smooth, to_patches

maps = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 2), st.integers(1, 7), st.integers(1, 7)),
    elements=st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e-45, 1e-30, 3e4]),
).map(torch.from_numpy)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def window(image, y, x, reach):
    """Values and offsets of the pixels around one, inside the image."""
    for i in range(max(0, y - reach), min(image.shape[0], y + reach + 1)):
        for j in range(max(0, x - reach), min(image.shape[1], x + reach + 1)):
            yield image[i, j].item(), i - y, j - x


def slow_smooth(image, reach, weight):
    out = torch.zeros_like(image)
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            terms = [(weight(dy, dx) * v, weight(dy, dx)) for v, dy, dx in window(image, y, x, reach)]
            out[y, x] = sum(t for t, _ in terms) / sum(w for _, w in terms)
    return out


def test_collapse_sums_channels():
    a = random(2, 5, 3, 4)
    torch.testing.assert_close(collapse(a), a[:, 0] + a[:, 1] + a[:, 2] + a[:, 3] + a[:, 4])
    assert collapse(a.bfloat16()).dtype == torch.float32


def test_positive_cuts_at_zero():
    assert positive(torch.tensor([[[-1.0, 0.0, 2.0]]])).tolist() == [[[0.0, 0.0, 2.0]]]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_mean_filter_is_the_definition(size):
    m = random(2, 6, 9)
    slow = torch.stack([slow_smooth(image, size // 2, lambda dy, dx: 1.0) for image in m])
    torch.testing.assert_close(smooth(m, "mean", size), slow)


@pytest.mark.parametrize(("sigma", "used"), [(1.3, 1.3), (None, 5 / 6)])
def test_gaussian_filter_is_the_definition(sigma, used):
    m = random(2, 6, 9)
    slow = torch.stack([slow_smooth(i, 2, lambda y, x: np.exp(-(y * y + x * x) / (2 * used**2))) for i in m])
    torch.testing.assert_close(smooth(m, "gaussian", 5, sigma), slow)


@pytest.mark.parametrize("kind", ["none", "mean", "gaussian"])
def test_a_constant_map_stays_constant(kind):
    m = torch.full((1, 10, 20), -3.0)
    torch.testing.assert_close(smooth(m, kind), m)


def test_no_smoothing_is_the_default():
    m = random(1, 4, 4)
    assert torch.equal(smooth(m), m)


def test_smoothing_refuses_what_it_cannot_do():
    m = random(1, 4, 4)
    with pytest.raises(OptionError, match="median"):
        smooth(m, "median")
    with pytest.raises(OptionError, match="odd"):
        smooth(m, "mean", 4)
    with pytest.raises(OptionError, match="sigma"):
        smooth(m, "gaussian", 5, 0.0)
    with pytest.raises(InputError, match=r"\[B,H,W\]"):
        smooth(m[0], "mean")
    with pytest.raises(InputError, match=r"\[B,C,H,W\]"):
        collapse(m)


@settings(deadline=None, max_examples=40)
@given(maps)
def test_finite_maps_never_give_nan(m):
    post = official_postprocess(m)
    assert post.isfinite().all()
    assert ((post >= 0) & (post <= 1)).all()
    shown, scale = normalize(m)
    assert ((shown >= 0) & (shown <= 1)).all()
    assert (scale > 0).all()
    for kind in ("mean", "gaussian"):
        assert smooth(m, kind, 5).isfinite().all()


def test_postprocessing_treats_each_map_alone_and_tops_at_one():
    m = random(3, 20, 30) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
    out = official_postprocess(m)
    torch.testing.assert_close(out[1:2], official_postprocess(m[1:2]))
    assert out.amax((1, 2)).tolist() == [1, 1, 1]
    assert not official_postprocess(-m.abs()).any()


def test_normalize_gives_back_the_map_below_its_quantile():
    m = random(2, 30, 40)
    shown, scale = normalize(m, 0.9)
    assert (shown == 1).double().mean() == pytest.approx(0.1, abs=0.005)
    below = (shown < 1) & (m > 0)
    torch.testing.assert_close((shown * scale[:, None, None])[below], m[below])


def test_normalize_falls_back_to_the_maximum():
    m = torch.zeros(2, 20, 20)
    m[0, 3, 4] = 5
    shown, scale = normalize(m)
    assert scale.tolist() == [5, 1]
    assert shown[0, 3, 4] == 1
    assert not shown[1].any()
    with pytest.raises(OptionError, match="quantile"):
        normalize(m, 1.5)


@pytest.mark.realdata
@pytest.mark.parametrize("pair", ["p0_t991", "p6_t19"])
def test_the_official_postprocessing_is_reproduced(oracle_dir, pair):
    run = np.load(oracle_dir / f"dave_pipeline_{pair}.npz")
    out = official_postprocess(collapse(torch.from_numpy(run["agg"])[None]))
    assert np.abs(out.numpy() - run["out"]).max() < 1e-5


def test_patches_are_means_brought_back_to_the_size_of_the_map():
    draw = torch.rand(2, 10, 12, generator=torch.Generator().manual_seed(0))
    means = torch.stack([draw[:, i : i + 4, j : j + 4].mean((1, 2)) for i in (0, 4, 8) for j in (0, 4, 8)], 1)
    expected = torch.nn.functional.interpolate(means.view(2, 1, 3, 3), (10, 12), mode="bilinear")[:, 0]
    torch.testing.assert_close(to_patches(draw, 4), expected)
    torch.testing.assert_close(to_patches(torch.ones(1, 9, 9), 4), torch.ones(1, 9, 9))
    with pytest.raises(OptionError, match="patches of 0 pixels"):
        to_patches(draw, 0)
