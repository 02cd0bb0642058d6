"""Each analysis against a slower way to the same numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dave_vit.analysis import (
    MapAnalysisOptions,
    convergence,
    cost,
    map_sheets,
    sensitivity,
    toy,
)
from dave_vit.analysis.inputs import method_entry
from dave_vit.analysis.map_sheets import compare_warped_maps
from dave_vit.analysis.paper import suites
from dave_vit.errors import OptionError, UnknownName
from dave_vit.maps import collapse
from dave_vit.methods import DAVE, METHODS
from dave_vit.metrics import create_metric
from dave_vit.metrics.base import Case
from dave_vit.viz.plots import STYLES, Band, compute_quartiles
from tiny_models import SIZE, vit


@pytest.fixture(scope="module")
def pair() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    inputs = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    return vit(), inputs, torch.tensor([1, 3])


# convergence


def test_steps_and_errors_are_those_of_separate_runs(pair):
    model, inputs, target = pair
    options = convergence.ConvergenceOptions(samples=6, reference=5, seed=3)
    curves = convergence.convergence(model, inputs, target, options)

    def run(samples: int, reducer: str = "mean", seed: int = 3) -> torch.Tensor:
        return DAVE(model, samples, seed, "paper", reducer=reducer).attribute(inputs, target)

    averages = [run(count) for count in range(1, 7)]
    steps = [(b - a).abs().flatten(1).sum(1) for a, b in itertools.pairwise(averages)]
    np.testing.assert_allclose(curves.steps, torch.stack(steps, 1), rtol=2e-3)
    assert curves.at == (2, 4, 6)
    reference = collapse(run(5, seed=4))
    for name, reducer in (("mean", "mean"), ("shrinkage", "shrinkage"), ("soft threshold, 2 e", "soft")):
        for column, count in enumerate(curves.at):
            missed = (collapse(run(count, reducer)) - reference).square().flatten(1).sum(1)
            expected = missed / reference.square().flatten(1).sum(1)
            np.testing.assert_allclose(curves.errors[name][:, column], expected, rtol=2e-3)


def test_the_band_of_steps_starts_at_two_samples():
    curves = convergence.Convergence(np.array([[4.0, 1.0], [2.0, 3.0]]), (2,), {})
    assert curves.band().at.tolist() == [2, 3]
    assert curves.band().median.tolist() == [3.0, 2.0]


@pytest.mark.parametrize(("samples", "expected"), [(2, (2,)), (8, (2, 4, 8)), (50, (2, 4, 8, 16, 32, 50))])
def test_estimators_are_compared_at_powers_of_two_and_at_the_end(samples, expected):
    assert convergence.checkpoints(samples) == expected


# rotation and noise


def test_nothing_changes_at_zero_and_something_elsewhere(pair):
    for change, points in ((sensitivity.rotate_images, [0.0, 40.0]), (sensitivity.add_noise, [0.0, 1.0])):
        changes = sensitivity.sensitivity(*pair, points, change)
        assert (changes[:, 0] == 0).all()
        assert (changes[:, 1] > 0).all()


def test_four_right_turns_are_none(pair):
    _, inputs, _ = pair
    turned = inputs
    for _ in range(4):
        turned = sensitivity.rotate_images(turned, 90.0)
    torch.testing.assert_close(turned, inputs)
    torch.testing.assert_close(sensitivity.rotate_images(inputs, 90.0), inputs.rot90(-1, (2, 3)))


def test_noise_grows_in_proportion_and_is_seeded(pair):
    _, inputs, _ = pair
    once, twice = (sensitivity.add_noise(inputs, sigma) - inputs for sigma in (1.0, 2.0))
    torch.testing.assert_close(twice, 2 * once)
    assert not torch.equal(sensitivity.add_noise(inputs, 1.0, seed=1), sensitivity.add_noise(inputs, 1.0, seed=2))


@pytest.mark.parametrize(
    ("median", "expected"),
    [([0.9, 0.05, 0.0, 0.05, 0.9], 10.0), ([0.0, 0.3, 0.0, 0.0, 0.0], 0.0), ([0.1, 0.0, 0.0, 0.0, 0.1], 20.0)],
)
def test_the_stable_range_needs_both_sides(median, expected):
    values = np.array(median)
    assert sensitivity.stable_range(Band(np.array([-20.0, -10, 0, 10, 20]), values, values, values), 0.1) == expected


def test_equal_ratios_of_noise_to_signal_give_equal_times():
    sigma = 0.75
    t = sensitivity.equivalent_noise_time(sigma)
    assert np.isclose(np.sqrt(1 - (1 - t) ** 2) / (1 - t), sigma)


def test_quartiles_leave_out_what_is_not_finite():
    band = compute_quartiles([1.0], np.array([[1.0], [2.0], [3.0], [np.nan]]))
    assert (band.low[0], band.median[0], band.high[0]) == (1.5, 2.0, 2.5)


# the toy layer


def test_derivative_is_effective_plus_variation():
    layer, x = toy.ToyAttention().eval(), toy.signal()
    operators = toy.operators(layer, x)
    torch.testing.assert_close(operators.derivative, operators.effective + operators.variation, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x[None])[0], operators.effective @ x, rtol=0, atol=1e-12)  # eq. (4), no biases
    by_hand = torch.kron(layer.mixing(x), torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(operators.effective, by_hand, rtol=0, atol=1e-12)


def test_variation_dominates_the_toy_layer():
    rows = {row["operator"]: row for row in toy.analyze_toy_layer(toy.ToyOptions()).rows}
    assert rows["operator variation"]["norm"] > 2 * rows["effective transformation"]["norm"]
    assert rows["operator variation"]["change"] > 3 * rows["effective transformation"]["change"]


# cost


def test_growth_finds_the_law_behind_the_numbers():
    at = [2.0, 4.0, 8.0, 16.0]
    straight = cost.growth(at, [3 + 0.5 * x for x in at])
    assert np.isclose(straight.start, 3)
    assert np.isclose(straight.slope, 0.5)
    assert np.isclose(straight.fit, 1)
    assert np.isclose(cost.growth(at, [7 * x**0.5 for x in at]).power, 0.5)
    flat = cost.growth(at, [5.0] * 4)
    assert abs(flat.power) < 1e-9
    assert flat.fit == 1.0
    with pytest.raises(OptionError, match="two or more"):
        cost.growth([1.0], [1.0])


def test_the_meter_sees_what_is_alive_at_once():
    def work() -> None:
        kept = torch.ones(1000)
        for _ in range(5):
            torch.ones(3000)  # gone again at once
        kept.view(10, 100).add_(1)  # neither a view nor a change in place takes memory

    spent = cost.measure(work, torch.device("cpu"), repeats=1)
    assert spent.peak_bytes == 4 * 4000
    assert spent.seconds > 0


def test_the_meter_sees_what_a_backward_pass_keeps(pair):
    model, inputs, target = pair
    forward = cost.forward_cost(model, inputs[:1])
    backward = cost.attribution_cost(model, inputs[:1], target[:1], "input_x_gradient", 1)
    assert backward.peak_bytes > 2 * forward.peak_bytes


# pictures


def test_the_last_steps_of_the_construction_are_dave(pair):
    model, inputs, target = pair
    maps = map_sheets.construction(model, inputs, target, samples=3, seed=5)
    assert list(maps) == list(map_sheets.STEPS)
    expected = collapse(DAVE(model, 3, 5, "paper").attribute(inputs, target))
    torch.testing.assert_close(maps["DAVE, as in the paper"], expected)


def test_consistency_is_that_of_the_metric(pair):
    model, inputs, target = pair
    warped = compare_warped_maps(model, inputs, target, MapAnalysisOptions(samples=2, seed=0).maker("attn_lrp"))

    def explain(model: torch.nn.Module, images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return collapse(METHODS["attn_lrp"](model).attribute(images, target))

    regions = torch.zeros(2, SIZE, SIZE, dtype=torch.bool)
    case = Case(model, inputs, target, explain(model, inputs, target), regions, explain)
    torch.testing.assert_close(warped.correlation, create_metric("consistency").score(case).values)
    assert (warped.smoothed != warped.correlation).all()


# suites


def test_all_numbers_of_the_paper_are_there():
    numbers = suites._read_toml("published.toml")
    assert sum(len(methods) for metric in numbers.values() for methods in metric.values()) == 2 * (7 * 4 + 5 * 2)
    assert suites.find_published_mean("gridpg", "DeiT-III-B", "dave-paper") == 65.76
    assert suites.find_published_mean("energypg", "B-cos-ViT-C", "bcos") == 75.61
    assert suites.find_published_mean("energypg", "builtin", "dave") is None


@pytest.mark.parametrize("name", suites.SUITES)
@pytest.mark.parametrize("quick", [True, False])
def test_suites_name_known_methods_and_have_styles(name, quick):
    suite = suites.read_suite(name, quick=quick)
    for group in suite.groups:
        assert set(group.methods) <= set(STYLES)
        entries = [method_entry(label, suite.counts.samples) for label in group.methods]
        assert all(entry.method in METHODS for entry in entries)
        assert dict(entries[1].options) == {"steps": suite.counts.samples}  # integrated gradients
    models = [entry.label for entry in suite.models]
    known = suites._read_toml("published.toml")["gridpg"]
    assert name == "builtin" or models == list(known)


def test_a_probed_model_is_left_out_unless_it_is_given():
    suite = suites.read_suite("paper")
    without_weights, with_weights = suites.with_probe(suite, None), suites.with_probe(suite, "dino.safetensors")
    assert "DINO-B" not in [entry.label for entry in without_weights.models]
    assert "dave probe" in without_weights.notes[0]
    assert next(entry for entry in with_weights.models if entry.label == "DINO-B").weights == "dino.safetensors"


def test_unknown_suites_and_counts_are_refused():
    with pytest.raises(UnknownName, match="builtin, paper"):
        suites.read_suite("papers")
    with pytest.raises(OptionError, match="samples is 0"):
        suites.with_counts(suites.read_suite("builtin"), {"samples": 0, "grids": None})
