"""Significance at every scale, and weights of samples, against slow numpy versions of their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dave_vit.errors import InputError, OptionError
from dave_vit.reduce import REDUCERS, Mean, Significant, SoftThreshold, TrimmedMean

SIZE = (11, 9)


def samples(n=12, batch=2, *, seed=0, dtype=torch.float64):
    """Noise around an image whose left half speaks for the class."""
    generator = torch.Generator().manual_seed(seed)
    signal = torch.zeros(SIZE, dtype=torch.float64)
    signal[:, :4] = 1.5
    return (signal + torch.randn(n, batch, 3, *SIZE, generator=generator, dtype=torch.float64)).to(dtype)


def weights(n=12, batch=2, seed=1):
    return torch.rand(n, batch, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(reducer, *chunks):
    accumulator = reducer.accumulator()
    for chunk in chunks:
        accumulator.update(*chunk)
    return accumulator


def moments(values, w):
    """Weighted mean and its standard error, [n, ...] -> [...]."""
    w = w.reshape(-1, *[1] * (values.ndim - 1)) / w.sum()
    mean = (w * values).sum(0)
    return mean, np.sqrt((w**2 * (values - mean) ** 2).sum(0) / (1 - (w**2).sum()))


def gaussian(picture, sigma):
    """The average with all pixels up to three standard deviations away, pixel by pixel."""
    reach, out = int(3 * sigma), np.zeros_like(picture)
    for row, column in np.ndindex(picture.shape):
        total = weight = 0.0
        for y in range(max(0, row - reach), min(picture.shape[0], row + reach + 1)):
            for x in range(max(0, column - reach), min(picture.shape[1], column + reach + 1)):
                share = np.exp(-((y - row) ** 2 + (x - column) ** 2) / (2 * sigma**2))
                total, weight = total + share * picture[y, x], weight + share
        out[row, column] = total / weight
    return out


def slow(a, w, *, k, patch):
    """The definition for one image: samples [n, C, H, W], weights [n] -> map [H, W]."""
    sums = a.sum(1)
    scales = [sums, *(np.stack([gaussian(s, patch * f) for s in sums]) for f in (3 / 16, 1 / 2))]
    means, errors = zip(*(moments(s, w) for s in scales), strict=True)
    over = [np.maximum(0, m - k * e) for m, e in zip(means, errors, strict=True)]
    gate = [p / np.abs(m) for p, m in zip(over, means, strict=True)]
    terms = [over[0] * gate[1] * gate[2], over[1] * gate[2], means[2] - errors[2]]
    unit = [t / np.maximum(0, t).sum() for t in terms]
    drawn = unit[0] + unit[1] / 2 + unit[2] / 2
    return drawn * np.maximum(0, means[2]).sum() / np.maximum(0, drawn).sum()


@pytest.mark.parametrize("patch", [8.0, 16.0])
def test_the_map_is_the_definition(patch):
    a, w = samples(), weights()
    accumulator = run(Significant(k=1.0, patch=patch), (a, w))
    for image in range(2):
        expected = slow(a[:, image].numpy(), w[:, image].numpy(), k=1.0, patch=patch)
        np.testing.assert_allclose(accumulator.attribution()[image].sum(0).numpy(), expected, atol=1e-9)
        error = moments(a[:, image].sum(1).numpy(), w[:, image].numpy())[1]
        np.testing.assert_allclose(accumulator.standard_error()[image].numpy(), error, atol=1e-9)
    assert accumulator.significant().all()


@pytest.mark.parametrize("reducer", [Mean(), SoftThreshold(), Significant(patch=8)], ids=str)
@settings(deadline=None, max_examples=15)
@given(cuts=st.sets(st.integers(1, 11)))
def test_chunks_do_not_matter(reducer, cuts):
    a, w = samples(), weights()
    whole = run(reducer, (a, w))
    parts = run(reducer, *zip(a.tensor_split(sorted(cuts)), w.tensor_split(sorted(cuts)), strict=True))
    for name in ("attribution", "standard_error", "error_share"):
        torch.testing.assert_close(getattr(parts, name)(), getattr(whole, name)(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reducer", [Mean(), SoftThreshold(), Significant(patch=8)], ids=str)
def test_equal_weights_are_no_weights(reducer):
    a = samples()
    plain, equal = run(reducer, (a,)), run(reducer, (a, torch.full((12, 2), 0.3)))
    for name in ("attribution", "standard_error", "error_share", "significant"):
        torch.testing.assert_close(getattr(equal, name)(), getattr(plain, name)(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reducer", [Mean(), Significant(patch=8)], ids=str)
def test_a_sample_without_weight_does_not_count(reducer):
    a, w = samples(), weights()
    w[5] = 0
    rest = [index for index in range(12) if index != 5]
    torch.testing.assert_close(run(reducer, (a, w)).attribution(), run(reducer, (a[rest], w[rest])).attribution())


@pytest.mark.parametrize("reducer", [Mean(), Significant(patch=8)], ids=str)
def test_weights_that_are_all_zero_count_alike(reducer):
    a = samples()
    torch.testing.assert_close(run(reducer, (a, torch.zeros(12, 2))).attribution(), run(reducer, (a,)).attribution())


def test_where_nothing_is_significant_it_is_the_mean():
    a = samples(6)
    a = torch.cat([a, -a])  # every mean is zero, but for rounding
    a += 1e-6
    accumulator = run(Significant(patch=8), (a,))
    assert not accumulator.significant().any()
    torch.testing.assert_close(accumulator.attribution(), a.mean(0), rtol=1e-6, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 4),
    values=st.lists(st.sampled_from([0.0, 1.0, -1.0, 1e-30, -1e-30, 1e30]), min_size=6, max_size=6),
    weight=st.sampled_from([0.0, 1e-20, 1.0]),
)
def test_no_map_is_ever_empty_or_not_finite(n, values, weight):
    a = torch.tensor(values, dtype=torch.float64).reshape(1, 1, 1, 2, 3).repeat(n, 1, 1, 1, 1)
    accumulator = run(Significant(patch=4), (a, torch.full((n, 1), weight)))
    found = accumulator.attribution()
    assert found.isfinite().all()
    assert accumulator.standard_error().isfinite().all()
    assert bool(found.any()) == bool(a.any())


def test_what_stands_out_only_by_chance_is_left_out():
    a = torch.randn(16, 1, 3, 24, 24, generator=torch.Generator().manual_seed(3))
    a[..., :8] += 1.5
    shown = run(Significant(patch=4), (a,)).attribution()[0].sum(0).clamp(min=0)
    mean = a.mean(0)[0].sum(0).clamp(min=0)
    far = [(found[:, 14:].sum() / found.sum()).item() for found in (shown, mean)]
    assert far[0] < far[1] / 5


def test_the_share_of_sampling_error_falls_as_one_over_the_samples():
    few, many = (run(Significant(patch=8), (samples(n, seed=5),)).error_share() for n in (8, 512))
    assert ((few / many) > 20).all()


def test_memory_does_not_grow_with_the_samples():
    accumulator = Significant(patch=8).accumulator()

    def held():
        moments = (accumulator._moments, *accumulator._coarser)
        return sum(v.numel() for m in moments for v in vars(m).values() if v is not None)

    accumulator.update(samples(2))
    before = held()
    for _ in range(5):
        accumulator.update(samples(2))
    assert held() == before


def test_half_precision_and_other_sizes():
    a = samples(dtype=torch.float16)
    assert run(Significant(patch=14), (a,)).attribution().dtype == torch.float32
    assert run(Significant(patch=0), (a,)).attribution().shape == a.shape[1:]


@pytest.mark.parametrize(("options", "match"), [({"k": -1}, "k is -1"), ({"patch": float("nan")}, "patch is nan")])
def test_options_out_of_range(options, match):
    with pytest.raises(OptionError, match=match):
        REDUCERS["significant"](**options)


def test_weights_are_checked():
    with pytest.raises(InputError, match="one per sample"):
        run(Mean(), (samples(), weights(11)))
    with pytest.raises(InputError, match="to all of them or to none"):
        run(Mean(), (samples(), weights()), (samples(),))
    with pytest.raises(InputError, match="takes no weights"):
        run(TrimmedMean(), (samples(), weights()))
