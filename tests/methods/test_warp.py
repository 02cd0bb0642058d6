"""Warps: one resampling, its inverse and its adjoint."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dave_vit.errors import InputError, OptionError
from dave_vit.neighborhood import Warp, affine_matrix

NO_ROLL = torch.zeros(1, 2, dtype=torch.int64)

sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))


@st.composite
def warps(draw):
    size = draw(sizes)
    matrix = affine_matrix(
        size,
        flip=torch.tensor([draw(st.booleans())]),
        rotation=torch.tensor([draw(st.floats(-180, 180))]),
        scale=torch.tensor([draw(st.floats(0.5, 2))], dtype=torch.float64),
        translation=torch.tensor([draw(st.tuples(st.floats(-3, 3), st.floats(-3, 3)))], dtype=torch.float64),
    )
    roll = torch.tensor([draw(st.tuples(st.integers(-12, 12), st.integers(-12, 12)))])
    return size, Warp(matrix, roll)


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def smooth_image(height, width, channels=3):
    y, x = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    return torch.stack([torch.sin(0.11 * x + 0.07 * y + c) for c in range(channels)])[None]


def rotation_about_centre(size, degrees, scale=1.0, shift=(0.0, 0.0), *, flip=False):
    return affine_matrix(
        size,
        flip=torch.tensor([flip]),
        rotation=torch.tensor([degrees], dtype=torch.float64),
        scale=torch.tensor([scale], dtype=torch.float64),
        translation=torch.tensor([shift], dtype=torch.float64),
    )


def slow_apply(image, matrix, roll):
    """Pixel by pixel, in numpy, from the definition."""
    _, height, width = image.shape
    back, out = np.linalg.inv(matrix), np.zeros_like(image)
    for py in range(height):
        for px in range(width):
            x, y, _ = back @ [(px - roll[1]) % width, (py - roll[0]) % height, 1]
            for i in (math.floor(y), math.floor(y) + 1):
                for j in (math.floor(x), math.floor(x) + 1):
                    if 0 <= i < height and 0 <= j < width:
                        out[:, py, px] += (1 - abs(x - j)) * (1 - abs(y - i)) * image[:, i, j]
    return out


@settings(deadline=None, max_examples=40)
@given(warps())
def test_apply_is_the_definition_pixel_by_pixel(case):
    (height, width), warp = case
    x = random(1, 2, height, width)
    slow = slow_apply(x[0].numpy(), warp.matrix[0].numpy(), warp.roll[0].tolist())
    np.testing.assert_allclose(warp.apply(x)[0].numpy(), slow, atol=1e-10)


@settings(deadline=None, max_examples=40)
@given(warps())
def test_adjoint_is_the_transpose_of_apply(case):
    (height, width), warp = case
    x, y = random(1, 2, height, width), random(1, 2, height, width, seed=1)
    assert (warp.apply(x) * y).sum().item() == pytest.approx((x * warp.adjoint(y)).sum().item(), abs=1e-10)


@settings(deadline=None, max_examples=40)
@given(warps())
def test_inverse_unrolls_and_reads_at_the_forward_matrix(case):
    (height, width), warp = case
    y = random(1, 2, height, width)
    unrolled = torch.roll(y, (-warp.roll[0]).tolist(), dims=(2, 3))
    slow = slow_apply(unrolled[0].numpy(), np.linalg.inv(warp.matrix[0].numpy()), (0, 0))
    np.testing.assert_allclose(warp.inverse(y)[0].numpy(), slow, atol=1e-9)


@pytest.mark.parametrize("size", [(40, 40), (32, 56)])
def test_inverse_restores_a_smooth_image_in_the_interior(size):
    warp = Warp(rotation_about_centre(size, 17.0, scale=1.05, flip=True), torch.tensor([[3, -4]]))
    x = smooth_image(*size)
    back = warp.inverse(warp.apply(x))
    middle = (..., slice(11, -11), slice(11, -11))
    assert (back - x)[middle].abs().max() < 6e-3
    assert (warp.apply(x) - x)[middle].abs().max() > 0.3


def test_wrapped_shift_alone_is_an_exact_permutation():
    roll = torch.tensor([[2, -3], [-30, 40]])
    warp = Warp(torch.eye(3).repeat(2, 1, 1), roll)
    x = random(2, 3, 7, 11, dtype=torch.float32)
    moved = warp.apply(x)
    for i in range(2):
        assert torch.equal(moved[i], torch.roll(x[i], roll[i].tolist(), dims=(1, 2)))
    assert torch.equal(warp.inverse(moved), x)
    assert torch.equal(warp.adjoint(moved), x)


def test_flip_is_exact_and_comes_before_the_rotation():
    x = random(1, 3, 6, 9, dtype=torch.float32)
    flip = Warp(rotation_about_centre((6, 9), 0.0, flip=True), NO_ROLL)
    assert torch.equal(flip.apply(x), x.flip(3))
    turn = Warp(rotation_about_centre((6, 9), 25.0), NO_ROLL)
    both = Warp(rotation_about_centre((6, 9), 25.0, flip=True), NO_ROLL)
    torch.testing.assert_close(both.apply(x), turn.apply(x.flip(3)), atol=1e-5, rtol=0)


def test_positive_rotation_turns_right_towards_down():
    x = torch.zeros(1, 1, 9, 9)
    x[..., 4, 8] = 1  # right of the centre
    assert Warp(rotation_about_centre((9, 9), 90.0), NO_ROLL).apply(x)[0, 0, 8, 4] > 0.99


def test_whole_pixel_zero_padded_shift_moves_right_and_down():
    x = random(1, 2, 5, 8)
    out = Warp(rotation_about_centre((5, 8), 0.0, shift=(2.0, 1.0)), NO_ROLL).apply(x)
    assert torch.equal(out[..., 1:, 2:], x[..., :-1, :-2])
    assert not out[..., :1, :].any()
    assert not out[..., :2].any()


def test_identity_hands_back_the_very_tensor():
    x = random(2, 3, 5, 6, dtype=torch.float32)
    warp = Warp(torch.eye(3).repeat(2, 1, 1), torch.zeros(2, 2, dtype=torch.int64))
    assert warp.apply(x) is x
    assert warp.inverse(x) is x
    assert warp.adjoint(x) is x


@pytest.mark.parametrize("name", ["apply", "inverse", "adjoint"])
def test_a_sample_does_not_depend_on_its_batch(name):
    size = (9, 12)
    kinds = [
        rotation_about_centre(size, 0.0),
        rotation_about_centre(size, 12.0),
        rotation_about_centre(size, 0.0, flip=True),
    ]
    matrix, roll = torch.cat(kinds), torch.tensor([[0, 0], [1, 2], [3, 0]])
    x = random(3, 5, *size, dtype=torch.float32)
    together = getattr(Warp(matrix, roll), name)(x)
    for i in range(3):
        alone = getattr(Warp(matrix[i : i + 1], roll[i : i + 1]), name)(x[i : i + 1])
        assert torch.equal(together[i : i + 1], alone)


def test_adjoint_and_inverse_differ_by_the_square_of_the_scale():
    warp = Warp(rotation_about_centre((30, 30), 0.0, scale=1.5), NO_ROLL)
    ones = torch.ones(1, 1, 30, 30, dtype=torch.float64)
    assert warp.inverse(ones)[0, 0, 15, 15] == pytest.approx(1)
    assert warp.adjoint(ones)[0, 0, 10:20, 10:20].mean() == pytest.approx(1.5**2, rel=0.02)


def test_adjoint_works_without_gradients_and_in_inference_mode():
    warp = Warp(rotation_about_centre((8, 8), 12.0), NO_ROLL)
    y = random(1, 3, 8, 8)
    expected = warp.adjoint(y)
    with torch.no_grad():
        assert torch.equal(warp.adjoint(y), expected)
    with torch.inference_mode():
        assert torch.equal(warp.adjoint(y), expected)


def test_half_types_and_autocast_compute_in_float32():
    warp = Warp(rotation_about_centre((16, 16), 12.0), NO_ROLL)
    x = random(1, 3, 16, 16, dtype=torch.float32)
    expected = warp.apply(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(warp.apply(x), expected)
    half = warp.apply(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, warp.apply(x.bfloat16().float()).bfloat16(), atol=0, rtol=0)


def test_errors_say_what_was_expected():
    warp = Warp(torch.eye(3)[None], NO_ROLL)
    with pytest.raises(InputError, match=r"\[1,C,H,W\]"):
        warp.apply(torch.zeros(2, 3, 4, 4))
    with pytest.raises(InputError, match="int64"):
        warp.apply(torch.zeros(1, 3, 4, 4, dtype=torch.int64))
    with pytest.raises(OptionError, match="whole pixels"):
        Warp(torch.eye(3)[None], torch.zeros(1, 2))
    with pytest.raises(OptionError, match=r"\[n,3,3\]"):
        Warp(torch.eye(3), NO_ROLL)
    for bad in (torch.zeros(1, 3, 3), torch.full((1, 3, 3), math.nan), torch.ones(1, 3, 3)):
        with pytest.raises(OptionError, match="inverted"):
            Warp(bad, NO_ROLL)


@pytest.mark.realdata
def test_the_official_warp_is_reproduced(oracle_dir):
    run = np.load(oracle_dir / "dave_pipeline_p0_t991.npz")
    matrix = affine_matrix(
        (224, 224),
        flip=torch.from_numpy(run["flip"]),
        rotation=torch.from_numpy(run["angle"]),
        scale=torch.from_numpy(run["scale"][:, 0]),
        translation=torch.from_numpy(run["translations"]),
    )
    assert np.abs(matrix.numpy() - run["mats"]).max() < 1e-4
    x = torch.from_numpy(np.load(oracle_dir / "inputs.npz")["x/p0"])[None]
    out = Warp(torch.from_numpy(run["mats"][:1]), NO_ROLL).apply(x)
    assert np.abs(out[0].numpy() - run["x_t"][0]).max() < 2e-4


@pytest.mark.parametrize("name", ["apply", "inverse", "adjoint"])
@pytest.mark.parametrize("angles", [(0.0, 9.0, 0.0, 0.0, -14.0, 3.0), (0.0,) * 6, (5.0,) * 6])
def test_some_of_the_warps_are_those_warps(name, angles):
    size = (6, 9)
    matrix = torch.cat([rotation_about_centre(size, a, flip=a > 4) for a in angles])
    roll = torch.tensor([[1, -2], [0, 5], [0, 0], [3, 0], [-1, 1], [2, 2]])
    whole, values = Warp(matrix, roll), random(6, 2, *size)
    for start in range(6):
        for stop in range(start + 1, 7):
            some, alone = whole.part(start, stop), Warp(matrix[start:stop], roll[start:stop])
            assert torch.equal(getattr(some, name)(values[start:stop]), getattr(alone, name)(values[start:stop]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["apply", "inverse", "adjoint"])
def test_cuda_agrees_with_the_cpu(name):
    size = (20, 30)
    matrix = torch.cat([rotation_about_centre(size, a, flip=a > 5) for a in (0.0, 9.0, -14.0)])
    warp = Warp(matrix, torch.tensor([[1, -2], [0, 5], [0, 0]]))
    x = random(3, 4, *size, dtype=torch.float32)
    torch.testing.assert_close(getattr(warp, name)(x.cuda()).cpu(), getattr(warp, name)(x), atol=1e-4, rtol=1e-4)
