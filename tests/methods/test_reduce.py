"""Reducers against slow numpy versions of their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dave_vit.errors import InputError, OptionError, UnknownName
from dave_vit.reduce import REDUCERS, Mean, Sharpened, Shrinkage, Significant, SoftThreshold, TrimmedMean, uses_clean

ALL = [Mean(), Shrinkage(), SoftThreshold(), SoftThreshold(0.0), TrimmedMean(), TrimmedMean(0.0)]


def samples(n=17, batch=2, channels=3, *, offset=0.3, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return offset + torch.randn(n, batch, channels, 5, 4, generator=generator, dtype=torch.float64).to(dtype)


def run(reducer, *chunks):
    accumulator = reducer.accumulator()
    for chunk in chunks:
        accumulator.update(chunk)
    return accumulator


def slow(reducer, a):
    """The definition, in float64."""
    a = a.double().numpy()
    mean, total = a.mean(0), a.sum(2).mean(0)
    error = a.sum(2).std(0, ddof=1) / np.sqrt(len(a)) if len(a) > 1 else np.zeros_like(total)
    if isinstance(reducer, TrimmedMean):
        lower = np.sort(a, 0)[(len(a) - 1) // 2]
        mad = np.sort(np.abs(a - lower), 0)[(len(a) - 1) // 2]
        keep = np.abs(a - lower) <= reducer.k * (1.4826 * mad + reducer.floor)
        return (a * keep).sum(0) / keep.sum(0), error
    factor = np.ones_like(total)
    if isinstance(reducer, Shrinkage):
        factor = np.maximum(0, 1 - error**2 / total**2)
    if isinstance(reducer, SoftThreshold):
        factor = np.maximum(0, np.abs(total) - reducer.k * error) / np.abs(total)
    return mean * factor[:, None], error


@pytest.mark.parametrize("reducer", ALL, ids=str)
@pytest.mark.parametrize("n", [1, 2, 16, 17])
def test_results_are_the_definition(reducer, n):
    a = samples(n)
    attribution, error = slow(reducer, a)
    accumulator = run(reducer, a)
    assert accumulator.count == n
    np.testing.assert_allclose(accumulator.attribution().numpy(), attribution, atol=1e-6)
    np.testing.assert_allclose(accumulator.standard_error().numpy(), error, atol=1e-6)


@pytest.mark.parametrize("reducer", ALL, ids=str)
@settings(deadline=None, max_examples=15)
@given(cuts=st.sets(st.integers(1, 16)), offset=st.sampled_from([0.0, 1.0, 1000.0]))
def test_chunks_do_not_matter(reducer, cuts, offset):
    a = samples(offset=offset)
    whole = run(reducer, a)
    parts = run(reducer, *a.tensor_split(sorted(cuts)))
    torch.testing.assert_close(parts.attribution(), whole.attribution(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(parts.standard_error(), whole.standard_error(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("reducer", ALL, ids=str)
def test_images_of_a_batch_do_not_meet(reducer):
    a = samples(batch=3)
    together, alone = run(reducer, a), run(reducer, a[:, 1:2])
    torch.testing.assert_close(together.attribution()[1:2], alone.attribution(), rtol=1e-6, atol=0)
    torch.testing.assert_close(together.standard_error()[1:2], alone.standard_error(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("reducer", ALL, ids=str)
@settings(deadline=None, max_examples=40)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.just(1), st.integers(1, 3), st.just(2), st.just(2)),
        elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -3e-42, 1e-30, 7.5, 1e18]),
    )
)
def test_finite_samples_never_give_nan(reducer, a):
    accumulator = run(reducer, torch.from_numpy(a))
    assert accumulator.attribution().isfinite().all()
    assert accumulator.standard_error().isfinite().all()
    assert (accumulator.standard_error() >= 0).all()


@pytest.mark.parametrize("reducer", ALL, ids=str)
def test_constant_samples_come_out_as_they_are(reducer):
    one = samples(1)
    accumulator = run(reducer, one.expand(9, -1, -1, -1, -1))
    torch.testing.assert_close(accumulator.attribution(), one[0], rtol=1e-6, atol=0)
    assert accumulator.standard_error().max() < 1e-7


@pytest.mark.parametrize("reducer", ALL, ids=str)
def test_one_sample_is_left_alone(reducer):
    a = samples(1)
    a[:, :, 1:] = 0
    a[:, :, 1] = -a[:, :, 0]  # the channels cancel: the map is zero, the attribution is not
    accumulator = run(reducer, a)
    assert torch.equal(accumulator.attribution(), a[0])
    assert not accumulator.standard_error().any()


@pytest.mark.parametrize("reducer", [Shrinkage(), SoftThreshold()], ids=str)
def test_the_factor_is_in_0_1_and_the_same_for_all_channels(reducer):
    a = samples(8, offset=0.2)
    ratio = run(reducer, a).attribution() / run(Mean(), a).attribution()
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-5, atol=1e-6)
    assert (ratio >= 0).all()
    assert (ratio <= 1).all()
    assert (ratio == 0).any()
    assert (ratio > 0.1).any()


@pytest.mark.parametrize("reducer", [Shrinkage(), SoftThreshold()], ids=str)
def test_a_map_of_zero_is_shrunk_to_zero(reducer):
    a = samples(4)
    a[:, :, 2] = -a[:, :, 0] - a[:, :, 1]
    a = a.round()
    a[:, :, 2] = -a[:, :, 0] - a[:, :, 1]
    assert not run(reducer, a).attribution().any()


def test_outliers_are_trimmed():
    a = samples(15, offset=1.0)
    spoilt = a.clone()
    spoilt[3] = 1e6
    clean = run(TrimmedMean(), a).attribution()
    assert (run(TrimmedMean(), spoilt).attribution() - clean).abs().max() < 0.6
    assert (run(Mean(), spoilt).attribution() - clean).abs().min() > 1e4


def test_the_standard_error_foretells_the_error_of_the_mean():
    a = samples(4000, batch=1, offset=0.5)
    means = torch.stack([run(Mean(), chunk).attribution().sum(1) for chunk in a.split(20)])
    errors = torch.stack([run(Mean(), chunk).standard_error() for chunk in a.split(20)])
    assert errors.square().mean().sqrt() == pytest.approx(means.std(0).square().mean().sqrt().item(), rel=0.1)


def test_large_offsets_do_not_cancel():
    a = samples(64, offset=0.0, dtype=torch.float64)
    near, far = run(Mean(), *a.split(5)), run(Mean(), *(a + 1e6).split(5))
    torch.testing.assert_close(far.standard_error(), near.standard_error(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("reducer", ALL[:4], ids=str)
def test_streaming_memory_does_not_grow(reducer):
    accumulator = run(reducer, *samples(40, dtype=torch.float64).split(4))
    held = [v for v in vars(accumulator._moments).values() if isinstance(v, torch.Tensor)]
    assert held
    assert all(v.untyped_storage().nbytes() <= 2 * 3 * 5 * 4 * 8 for v in held)


def test_results_between_chunks_leave_the_accumulator_going():
    a = samples(12)
    for reducer in ALL:
        accumulator = reducer.accumulator()
        for i, chunk in enumerate(a.split(3), 1):
            accumulator.update(chunk)
            torch.testing.assert_close(accumulator.attribution(), run(reducer, a[: 3 * i]).attribution())


@pytest.mark.parametrize(
    ("given", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_results_are_at_least_float32(given, expected):
    for reducer in ALL:
        accumulator = run(reducer, samples(dtype=given).requires_grad_())
        assert accumulator.attribution().dtype == accumulator.standard_error().dtype == expected
        assert not accumulator.attribution().requires_grad


def test_reducers_are_found_by_name():
    assert [REDUCERS[name]() for name in REDUCERS] == [
        Mean(),
        Shrinkage(),
        SoftThreshold(2.0),
        TrimmedMean(2.5),
        Significant(2.0, 16.0),
        Sharpened(2.0, 16.0),
    ]
    with pytest.raises(UnknownName, match="shrinkage"):
        REDUCERS["shrinkag"]


def test_misuse_is_refused():
    for reducer in ALL:
        accumulator = reducer.accumulator()
        with pytest.raises(InputError, match="no samples"):
            accumulator.attribution()
        with pytest.raises(InputError, match="no samples"):
            accumulator.standard_error()
        with pytest.raises(InputError, match=r"\[n,B,C,H,W\]"):
            accumulator.update(torch.zeros(3, 5, 5))
        accumulator.update(samples(2))
        with pytest.raises(InputError, match=r"\[n,2,3,5,4\]"):
            accumulator.update(samples(2, batch=1))
    for make in (SoftThreshold, TrimmedMean):
        with pytest.raises(OptionError, match="k is -1"):
            make(-1.0)
    with pytest.raises(OptionError, match="floor is nan"):
        TrimmedMean(floor=float("nan"))


@pytest.mark.realdata
def test_the_official_trimmed_mean_is_reproduced(oracle_dir):
    run_ = np.load(oracle_dir / "dave_pipeline_p0_t991.npz")
    a = run_["grads"] * np.load(oracle_dir / "inputs.npz")["x/p0"]
    out = run(TrimmedMean(), torch.from_numpy(a)[:, None]).attribution()[0].numpy()
    assert np.abs(out - run_["agg"]).max() < 1e-6 * np.abs(run_["agg"]).max()
    mask = np.unpackbits(run_["mask"])[: a.size].reshape(a.shape)
    np.testing.assert_allclose(out, (a * mask).sum(0) / mask.sum(0), atol=1e-9)  # one wrong bit would show as ~1e-5


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reducer", [*ALL, Significant(patch=2.0)], ids=str)
def test_some_images_go_on_alone(reducer, weighted):
    if weighted and isinstance(reducer, TrimmedMean):
        pytest.skip("takes no weights")
    a, weights = samples(batch=3, dtype=torch.float64), torch.rand(17, 3, dtype=torch.float64) + 0.1
    first, alone, some = reducer.accumulator(), reducer.accumulator(), torch.tensor([2, 0])
    first.update(a[:6], *([weights[:6]] if weighted else []))
    part = first.select(some)
    part.update(a[6:, some], *([weights[6:, some]] if weighted else []))
    alone.update(a[:, some], *([weights[:, some]] if weighted else []))
    assert (part.count, first.count) == (17, 6)
    torch.testing.assert_close(part.attribution(), alone.attribution())
    torch.testing.assert_close(part.standard_error(), alone.standard_error())
    torch.testing.assert_close(part.error_share(), alone.error_share())
    assert torch.equal(part.significant(), alone.significant())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_on_a_gpu_are_those_of_the_cpu(name, weighted):
    if weighted and name == "trimmed":
        pytest.skip("takes no weights")
    chunks = samples(n=20).split([8, 7, 5])
    counts = torch.rand(20, 2, generator=torch.Generator().manual_seed(1)).split([8, 7, 5])
    found = {}
    for device in ("cpu", "cuda"):
        reducer = REDUCERS[name]()
        clean = [torch.randn(2, 2, 2, 5, 4, generator=torch.Generator().manual_seed(2)).to(device)]
        accumulator = reducer.accumulator(*clean if uses_clean(reducer) else [])
        for chunk, weights in zip(chunks, counts, strict=True):
            accumulator.update(chunk.to(device), weights.to(device) if weighted else None)
        found[device] = (accumulator.attribution(), accumulator.mean(), accumulator.standard_error())
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=2e-6, atol=1e-9)
