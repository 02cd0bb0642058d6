"""Metrics by name: what they ask for, what they call good, and why they leave something out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dave_vit.errors import OptionError, UnknownName
from dave_vit.metrics import METRICS, Case, area, create_metric, deletion, energypg, gridpg, insertion
from dave_vit.metrics.perturbation import protocol


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.stem(x).relu().mean((2, 3)))


def saliency(model, inputs, target):
    """A method of the simplest kind, given to metrics that need more maps."""
    inputs = inputs.detach().requires_grad_()
    model(inputs).gather(1, target[:, None]).sum().backward()
    return inputs.grad.sum(1)


@pytest.fixture
def case():
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(4, 3, 32, 32, generator=draw)
    regions = torch.zeros(4, 32, 32, dtype=torch.bool)
    regions[:, 4:12, 4:20] = True
    model, target = Tiny().eval(), torch.tensor([0, 3, 1, 4])
    return Case(model, inputs, target, saliency(model, inputs, target), regions, saliency, (-2.0, -1.9, -1.8))


@pytest.mark.parametrize("name", [name for name in METRICS if name != "gridpg"])
def test_every_metric_scores_a_batch(case, name):
    metric = create_metric(name)
    scores = metric.score(case)
    assert scores.values.shape == (4,)
    assert scores.values.isfinite().all()
    assert metric.summary
    if metric.axis:
        assert scores.curves.shape == (4, len(scores.at))
    assert metric.higher_is_better is (name not in ("sanity", "random_logit", "infidelity", "complexity"))


def test_classes_give_what_the_functions_give(case):
    assert torch.equal(create_metric("energypg").score(case).values, energypg(case.maps, case.regions))
    grids = Case(case.model, case.inputs, case.target, torch.randn(4, 9, 32, 32), case.regions, saliency)
    assert torch.equal(create_metric("gridpg", cells=3).score(grids).values, gridpg(grids.maps, 3))
    chefer = protocol("chefer", 32 * 32, case.black)
    curve = deletion(case.model, case.inputs, case.maps, case.target, chefer)
    scores = create_metric("deletion", protocol="chefer").score(case)
    assert torch.equal(scores.curves, curve)
    assert torch.equal(scores.values, area(curve, chefer.fractions))
    curve = insertion(case.model, case.inputs, case.maps, case.target)
    torch.testing.assert_close(create_metric("insertion").score(case).curves, curve)


def test_what_is_good_depends_on_the_order():
    assert create_metric("deletion").higher_is_better
    assert not create_metric("deletion", order="most").higher_is_better
    assert not create_metric("deletion", protocol="chefer").higher_is_better
    assert not create_metric("insertion", order="least").higher_is_better


def test_single_points_of_a_protocol_can_be_changed():
    perturbation = create_metric("deletion", protocol="official", baseline="mean", steps=4).perturbation(400, None)
    assert (perturbation.baseline, perturbation.order, perturbation.fractions) == (
        "mean",
        "least",
        (0.0, 0.25, 0.5, 0.75, 1.0),
    )


def test_reasons_for_leaving_out(case):
    case.maps[0], case.maps[1, 0, 0] = -1, torch.nan
    case.regions[2] = False
    case.regions[3] = True
    metric = create_metric("energypg", largest=0.5)
    values = metric.score(case).values
    assert values.isnan().all()
    reasons = ["no positive mass", "map is not finite", "no box or mask in the crop", "region above 0.5 of the crop"]
    assert [metric.reason(case, i) for i in range(4)] == reasons
    assert create_metric("energypg").score(case).values[3].item() == 1.0
    assert create_metric("consistency").reason(case, 0) == "map is constant"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("energypg", {"largest": 0}),
        ("deletion", {"protocol": "theirs"}),
        ("deletion", {"steps": 0}),
        ("deletion", {"order": "first"}),
        ("insertion", {"baseline": "white"}),
        ("sanity", {"stages": 0}),
        ("sanity", {"layers": "some"}),
        ("random_logit", {"images": 0}),
        ("infidelity", {"samples": 1}),
        ("infidelity", {"of": "score"}),
        ("sensitivity_n", {"sizes": 0}),
        ("road", {"noise": -1.0}),
        ("road", {"score": "logit"}),
        ("irof", {"regions": 0}),
        ("irof", {"steps": 0}),
        ("srg", {"steps": 2}),
        ("srg", {"regions": 0}),
        ("srg", {"regions": "patches"}),
        ("srg", {"baseline": []}),
        ("srg", {"baseline": ["zero", "noise"]}),
        ("r_oms", {"images": 0}),
        ("saco", {"groups": 1}),
        ("saco", {"baseline": "noise"}),
        ("single_deletion", {"patches": 1}),
        ("single_deletion", {"of": "loss"}),
        ("gridpg", {"cells": 1}),
        ("gridpg", {"size": 3}),
    ],
)
def test_impossible_options_are_refused_at_once(name, options):
    with pytest.raises(OptionError):
        create_metric(name, **options)


def test_an_unknown_metric_is_named_with_the_nearest():
    with pytest.raises(UnknownName, match="did you mean energypg"):
        create_metric("energpg")
