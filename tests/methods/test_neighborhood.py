"""Neighborhoods: seeded views, noise schedules, and the way back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dave_vit.errors import InputError, OptionError
from dave_vit.neighborhood import Neighborhood, Noise, Spatial, Views, Warp

STILL = Spatial(flip=0.0, rotation=0.0, translation=0.0)
SILENT = Noise("none")
OFFICIAL = Neighborhood(
    Spatial(scale=(0.9, 1.1), wrap=False),
    Noise("variance_preserving", 0.5, "linspace"),
    noise_first=False,
    pull_back="adjoint",
)

neighborhoods = st.builds(
    Neighborhood,
    st.builds(
        Spatial, flip=st.just(0.5), scale=st.just((0.8, 1.2)), rotation=st.sampled_from([0.0, 30.0]), wrap=st.booleans()
    ),
    st.builds(
        Noise,
        kind=st.sampled_from(["variance_preserving", "additive", "none"]),
        level=st.floats(0, 1),
        schedule=st.sampled_from(["uniform", "linspace"]),
    ),
    noise_first=st.booleans(),
    pull_back=st.sampled_from(["inverse", "adjoint"]),
    antithetic=st.booleans(),
)


def images(batch=2, shape=(3, 8, 10), dtype=torch.float32):
    return torch.randn((batch, *shape), generator=torch.Generator().manual_seed(5), dtype=dtype)


@settings(deadline=None, max_examples=30)
@given(neighborhoods, st.integers(-(2**70), 2**70), st.integers(0, 6), st.integers(1, 7))
def test_draws_do_not_depend_on_the_chunk(neighborhood, seed, start, length):
    whole = neighborhood.views((3, 8, 10), samples=13, seed=seed)
    part = neighborhood.views((3, 8, 10), samples=13, seed=seed, start=start, stop=start + length)
    rows = slice(start, start + length)
    assert torch.equal(part.warp.matrix, whole.warp.matrix[rows])
    assert torch.equal(part.warp.roll, whole.warp.roll[rows])
    assert torch.equal(part.t, whole.t[rows])
    assert (part.eps is None) == (whole.eps is None)
    assert part.eps is None or torch.equal(part.eps, whole.eps[rows])
    x = images()
    assert torch.equal(part.apply(x), whole.apply(x)[rows])
    assert torch.equal(part.pull_back(whole.apply(x)[rows]), whole.pull_back(whole.apply(x))[rows])


@settings(deadline=None, max_examples=20)
@given(neighborhoods)
def test_images_of_a_batch_share_the_draws(neighborhood):
    views = neighborhood.views((3, 8, 10), samples=4)
    x = images(batch=3)
    together = views.apply(x)
    assert together.shape == (4, 3, 3, 8, 10)
    assert torch.equal(together[:, 1:2], views.apply(x[1:2]))


@settings(deadline=None, max_examples=30)
@given(neighborhoods)
def test_adjoint_is_the_gradient_with_respect_to_the_image(neighborhood):
    neighborhood = Neighborhood(**{**vars(neighborhood), "pull_back": "adjoint"})
    views = neighborhood.views((3, 8, 10), samples=3, seed=1, dtype=torch.float64)
    x = images(dtype=torch.float64).requires_grad_()
    w = torch.randn(3, 2, 3, 8, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = views.apply(x)
    for i, back in enumerate(views.pull_back(w)):
        (gradient,) = torch.autograd.grad((out[i] * w[i]).sum(), x, retain_graph=True)
        torch.testing.assert_close(back, gradient, atol=1e-12, rtol=1e-12)


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = Neighborhood().views((3, 8, 8), samples=4, seed=9)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = Neighborhood().views((3, 8, 8), samples=4, seed=9)
    assert torch.equal(first.eps, second.eps)
    assert torch.equal(first.warp.matrix, second.warp.matrix)


def test_seeds_and_samples_differ():
    a = Neighborhood().views((1, 8, 8), samples=40, seed=0)
    b = Neighborhood().views((1, 8, 8), samples=40, seed=1)
    angles = torch.cat([a.warp.matrix, b.warp.matrix])[:, 1, 0]
    assert len(angles.unique()) == 80
    assert len(torch.cat([a.eps, b.eps]).flatten(1).unique(dim=0)) == 80


def test_switching_the_noise_off_keeps_the_warps():
    noisy = Neighborhood().views((3, 8, 8), samples=5)
    clean = Neighborhood(noise=SILENT).views((3, 8, 8), samples=5)
    assert torch.equal(noisy.warp.matrix, clean.warp.matrix)
    assert clean.eps is None


def test_warps_stay_in_their_ranges_and_fill_them():
    spatial = Spatial(flip=0.25, rotation=20.0, scale=(0.9, 1.1), translation=0.1, wrap=True)
    warp = Neighborhood(spatial, SILENT).views((1, 40, 80), samples=2000).warp
    linear = warp.matrix[:, :2, :2]
    scale = linear.det().abs().sqrt()
    angle = torch.rad2deg(torch.atan2(-linear[:, 0, 1], linear[:, 1, 1]))
    assert (linear.det() < 0).double().mean() == pytest.approx(0.25, abs=0.04)
    assert 0.9 <= scale.min() < 0.905
    assert 1.095 < scale.max() <= 1.1
    assert -20 <= angle.min() < -19.5
    assert 19.5 < angle.max() <= 20
    assert warp.roll.amin(0).tolist() == [-4, -8]
    assert warp.roll.amax(0).tolist() == [4, 8]


def test_a_zero_padded_translation_is_fractional_and_does_not_wrap():
    spatial = Spatial(flip=0.0, rotation=0.0, translation=0.1, wrap=False)
    warp = Neighborhood(spatial, SILENT).views((1, 40, 80), samples=500).warp
    assert not warp.roll.any()
    assert warp.matrix[:, :2, 2].abs().amax(0).tolist() == pytest.approx([8, 4], rel=0.03)
    assert (warp.matrix[:, 0, 2] != warp.matrix[:, 0, 2].round()).all()


def test_uniform_times_fill_their_range():
    t = Neighborhood(STILL, Noise(level=0.4)).views((1, 4, 4), samples=1000).t
    assert 0 <= t.min() < 0.004
    assert 0.396 < t.max() < 0.4
    assert t.mean() == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(("samples", "expected"), [(1, [0.0]), (2, [0.0, 0.7]), (4, [0.0, 0.7 / 3, 1.4 / 3, 0.7])])
def test_evenly_spaced_times_reach_both_ends(samples, expected):
    t = Neighborhood(STILL, Noise(level=0.7, schedule="linspace")).views((1, 4, 4), samples=samples).t
    assert t.tolist() == pytest.approx(expected)


def test_noise_is_standard_normal_and_white():
    eps = Neighborhood(STILL).views((3, 64, 64), samples=8).eps
    assert eps.mean().abs() < 0.01
    assert eps.std() == pytest.approx(1, abs=0.01)
    assert eps.pow(4).mean() == pytest.approx(3, abs=0.1)
    flat = eps.flatten(1)
    correlation = flat @ flat.T / flat.shape[1]
    assert (correlation - torch.eye(8)).abs().max() < 0.06
    assert (eps[..., 1:] * eps[..., :-1]).mean().abs() < 0.02


def test_variance_preserving_noise_preserves_the_variance():
    views = Neighborhood(STILL, Noise(level=0.9)).views((3, 64, 64), samples=8)
    x = images(1, (3, 64, 64))
    out = views.apply(x)
    for i in range(8):
        assert out[i].var() == pytest.approx(x.var().item(), rel=0.05)
        torch.testing.assert_close(
            out[i, 0], (1 - views.t[i]) * x[0] + (1 - (1 - views.t[i]) ** 2).sqrt() * views.eps[i]
        )


def test_additive_noise_keeps_the_signal():
    views = Neighborhood(STILL, Noise("additive", 0.2)).views((3, 8, 8), samples=3)
    x = images(2, (3, 8, 8))
    torch.testing.assert_close(views.apply(x), x + 0.2 * views.eps[:, None])


def test_noise_is_warped_only_when_it_comes_first():
    first = Neighborhood(noise=Noise("additive", 1.0)).views((3, 8, 8), samples=3)
    after = Neighborhood(noise=Noise("additive", 1.0), noise_first=False).views((3, 8, 8), samples=3)
    nothing = torch.zeros(1, 3, 8, 8)
    torch.testing.assert_close(first.apply(nothing)[:, 0], first.warp.apply(first.eps))
    torch.testing.assert_close(after.apply(nothing)[:, 0], after.eps)


@pytest.mark.parametrize("schedule", ["uniform", "linspace"])
def test_antithetic_pairs_share_t_and_oppose_eps(schedule):
    views = Neighborhood(noise=Noise(schedule=schedule), antithetic=True).views((3, 8, 8), samples=7)
    assert torch.equal(views.t[0:6:2], views.t[1:6:2])
    assert torch.equal(views.eps[0:6:2], -views.eps[1:6:2])
    assert len(views.warp.matrix[:, 1, 0].unique()) == 7
    if schedule == "linspace":
        assert views.t[[0, -1]].tolist() == [0.0, 0.5]


def test_a_still_and_silent_neighborhood_changes_nothing():
    views = Neighborhood(STILL, SILENT).views((3, 8, 8), samples=3)
    x = images(2, (3, 8, 8))
    assert torch.equal(views.apply(x), x.expand(3, -1, -1, -1, -1))
    w = torch.randn(3, 2, 3, 8, 8)
    assert torch.equal(views.pull_back(w), w)


def test_without_rotation_the_way_back_is_exact():
    views = Neighborhood(Spatial(rotation=0.0), SILENT).views((6, 9, 14), samples=8)
    x = images(2, (6, 9, 14))
    assert not torch.equal(views.apply(x), x.expand(8, -1, -1, -1, -1))
    assert torch.equal(views.pull_back(views.apply(x)), x.expand(8, -1, -1, -1, -1))


def test_an_equivariant_explanation_is_restored():
    """tau^-1 W(tau x) = W(x), eq. (5), for a W that looks at each pixel by itself."""
    y, x = torch.meshgrid(torch.arange(48.0), torch.arange(64.0), indexing="ij")
    image = torch.stack([torch.sin(0.1 * x), torch.cos(0.08 * y), torch.sin(0.05 * (x + y))])[None]
    views = Neighborhood(Spatial(translation=0.0), SILENT).views((3, 48, 64), samples=6)
    back = views.pull_back(views.apply(image).pow(2))
    middle = (..., slice(16, -16), slice(16, -16))
    assert (back - image.pow(2))[middle].abs().max() < 0.01


@pytest.mark.parametrize("channels", [1, 5, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_any_channel_count_and_type(channels, dtype):
    views = OFFICIAL.views((channels, 7, 12), samples=2, dtype=dtype)
    out = views.apply(images(2, (channels, 7, 12)).to(dtype))
    assert out.shape == (2, 2, channels, 7, 12)
    assert out.dtype == views.pull_back(out).dtype == views.eps.dtype == dtype


def test_wider_noise_is_the_same_noise():
    narrow, wide = (OFFICIAL.views((3, 7, 12), samples=2, dtype=d).eps for d in (torch.float32, torch.float64))
    assert torch.equal(narrow.double(), wide)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Spatial(flip=1.5),
        lambda: Spatial(rotation=-1),
        lambda: Spatial(scale=(1.1, 0.9)),
        lambda: Spatial(scale=(0.0, 1.0)),
        lambda: Spatial(translation=1.0),
        lambda: Noise("gaussian"),
        lambda: Noise(schedule="log"),
        lambda: Noise(level=1.5),
        lambda: Noise("additive", math.inf),
        lambda: Noise(level=math.nan),
        lambda: Neighborhood(pull_back="back"),
        lambda: Neighborhood().views((3, 8, 8), samples=4, start=4),
        lambda: Neighborhood().views((3, 8, 8), samples=4, stop=5),
        lambda: Views(Warp(torch.eye(3)[None], torch.zeros(1, 2).long()), torch.zeros(2), None, Neighborhood()),
    ],
)
def test_impossible_options_are_refused(make):
    with pytest.raises(OptionError, match="expected"):
        make()


def test_wrong_shapes_are_refused():
    views = Neighborhood().views((3, 8, 8), samples=2)
    with pytest.raises(InputError, match=r"\[B,3,8,8\]"):
        views.apply(torch.zeros(1, 3, 9, 8))
    with pytest.raises(InputError, match="uint8"):
        views.apply(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(InputError, match=r"\[2,B,C,H,W\]"):
        views.pull_back(torch.zeros(3, 1, 3, 8, 8))


@pytest.mark.realdata
def test_the_official_model_inputs_are_reproduced_from_the_recorded_draws(oracle_dir):
    run = np.load(oracle_dir / "dave_pipeline_p0_t991.npz")
    x = torch.from_numpy(np.load(oracle_dir / "inputs.npz")["x/p0"])[None]
    seeds = run["seeds"][1::2].tolist()
    eps = torch.cat([torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(s)) for s in seeds])
    warp = Warp(torch.from_numpy(run["mats"]), torch.zeros(4, 2, dtype=torch.int64))
    views = Views(warp, torch.from_numpy(run["t"]), eps, OFFICIAL)
    assert np.abs(views.apply(x)[:, 0].numpy() - run["x_t"]).max() < 2e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_views_agree_with_the_cpu():
    x = images(2, (3, 16, 16))
    here = OFFICIAL.views((3, 16, 16), samples=5)
    there = OFFICIAL.views((3, 16, 16), samples=5, device="cuda")
    torch.testing.assert_close(there.apply(x.cuda()).cpu(), here.apply(x), atol=1e-4, rtol=1e-4)
    w = here.apply(x)
    torch.testing.assert_close(there.pull_back(w.cuda()).cpu(), here.pull_back(w), atol=1e-4, rtol=1e-4)


def test_fill_is_what_warps_uncover():
    shifted = Spatial(flip=0.0, rotation=45.0, translation=0.0)
    grey = torch.full((1, 6, 16, 16), 0.5)
    filled = Neighborhood(shifted, Noise("none"), fill=0.5).views((6, 16, 16), samples=4).apply(grey)
    torch.testing.assert_close(filled, grey.expand(4, 1, -1, -1, -1))
    empty = Neighborhood(shifted, Noise("none")).views((6, 16, 16), samples=4).apply(grey)
    assert empty.amin() == 0
