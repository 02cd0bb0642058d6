"""Targets: names, and classes against others, in every method."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

import tiny_models
from dave_vit import METHODS, Contrast, conservation_gap, create_method, effective_transformation
from dave_vit.engine.targets import Target
from dave_vit.errors import TargetError

FEW = {
    "dave": {"samples": 3, "preset": "paper"},
    "equivariant": {"samples": 3},
    "integrated_gradients": {"steps": 4},
    "smoothgrad": {"samples": 3},
    "iia": {"steps": 2},
    **tiny_models.HIDING,
}
NAMES = [name for name in METHODS if name not in ("bcos", "tam")]
X = tiny_models.images(2)


@functools.cache
@torch.inference_mode(mode=False)
def model() -> nn.Module:
    return tiny_models.vit()


def method(name: str, **options):
    return create_method(name, model(), **FEW.get(name, {}) | options)


def rivals(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The weights of all other classes, one class after another."""
    weights = torch.zeros_like(logits)
    for row, own in enumerate(classes.tolist()):
        others = [index for index in range(logits.shape[1]) if index != own]
        weights[row, others] = logits[row, others].exp() / logits[row, others].exp().sum()
    return weights


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max().clamp_min(1e-12)
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
class TestEveryMethod:
    def test_against_rivals_is_the_score_with_weights_of_the_clean_image(self, name):
        classes = torch.tensor([1, 4])
        with torch.no_grad():
            weights = rivals(model()(X), classes)

        only = None  # the one image that is explained

        def score(logits):
            # Passes over copies of the batch come one copy after the other.
            at = torch.arange(len(logits)) % 2 if only is None else torch.full((len(logits),), only)
            return logits.gather(1, classes[at, None])[:, 0] - (weights[at] * logits).sum(1)

        actual = method(name, chunk=100).explain(X, Contrast(classes, "rivals"))
        assert actual.target.tolist() == [1, 4]
        if name == "chefer_lrp":  # its relevance is that of the class by itself, which no score function says
            assert actual.attribution.amax() > 1e-3 * method(name).attribute(X, classes).amax()
        elif name in ("omenn", "fullgrad", "libragrad", "vit_cx", "tis", "mda"):  # these go image by image
            for only in range(2):
                expected = method(name).attribute(X[only : only + 1], score)
                close(actual.attribution[only : only + 1], expected)
        else:
            close(actual.attribution, method(name, chunk=100).attribute(X, score))

    def test_against_one_class(self, name):
        actual = method(name).attribute(X, Contrast([1, 4], 2))
        close(actual, method(name).attribute(X, Contrast([1, 4], torch.tensor([2, 2]))))
        alone = method(name).attribute(X, [1, 4])
        close(method(name).attribute(X, Contrast([1, 4])), alone)
        assert METHODS[name].info.class_specific != torch.equal(actual, alone)

    def test_batches_chunks_and_several_classes(self, name):
        together = method(name).attribute(X, Contrast([[1, 0], [4, 3]], "rivals"))
        assert together.shape == (2, 2, *X.shape[1:])
        for column, classes in enumerate(([1, 4], [0, 3])):
            close(together[:, column], method(name, chunk=1).attribute(X, Contrast(classes, "rivals")))

    def test_refusals_are_one_line(self, name):
        single = nn.Sequential(model(), nn.Linear(tiny_models.CLASSES, 1)).eval()
        for subject, target, message in [
            (single, Contrast(0, "rivals"), "one output"),
            (model(), Contrast(1, 1), "both class"),
            (model(), Contrast(1, 9), "against 9 is out of range"),
            (model(), Contrast(1, [1, 2, 3]), "batch of 2"),
            (model(), Contrast(lambda logits: logits[:, 0], "rivals"), "score function"),
            (model(), "tabby", "no class_names"),
        ]:
            with pytest.raises(TargetError, match=message) as caught:
                create_method(name, subject, **FEW.get(name, {})).attribute(X, target)
            assert "\n" not in str(caught.value)


class Named(nn.Module):
    """A model with names, as ``load_model`` gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.class_names = model(), ["zebra", "tabby cat", "wine glass", "beer glass", "dog"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)


class TestNames:
    @pytest.mark.parametrize("target", ["tabby", ["tabby", "tabby cat"], np.array(["tabby cat", "1"])])
    def test_are_targets_everywhere(self, target):
        named = Named().eval()
        expected = effective_transformation(named, X, 1)
        assert torch.equal(effective_transformation(named, X, target), expected)
        assert torch.equal(create_method("effective", named).attribute(X, target), expected * X)
        assert conservation_gap(named, X, target) < 1e-4

    def test_rows_of_names_and_against_a_name(self):
        actual = create_method("effective", Named().eval()).explain(X, Contrast([["zebra", "dog"]] * 2, "beer"))
        assert actual.target.tolist() == [[0, 4], [0, 4]]
        expected = effective_transformation(model(), X, Contrast([[0, 4]] * 2, 3))
        assert torch.equal(actual.attribution, expected * X[:, None])

    def test_unknown_ones_are_refused_with_the_nearest(self):
        for target in ("zebre", Contrast(0, "zebre")):
            with pytest.raises(TargetError, match="did you mean 0 zebra"):
                create_method("effective", Named().eval()).attribute(X, target)
        with pytest.raises(TargetError, match="fits 2 classes"):
            create_method("effective", Named().eval()).attribute(X, "glass")


class TestTarget:
    def test_weights_are_taken_once(self):
        clean, later = torch.randn(2, 5), torch.randn(2, 5)
        resolved = Target.of(Contrast([1, 2], "rivals"), 2).resolve(clean)
        weights = rivals(clean, torch.tensor([1, 2]))
        expected = later[[0, 1], [1, 2]] - (weights * later).sum(1)
        torch.testing.assert_close(resolved.resolve(later).scores(later)[:, 0], expected)
        torch.testing.assert_close(resolved.repeat(2).scores(later.repeat(2, 1))[:, 0], expected.repeat(2))
        torch.testing.assert_close(resolved.part(1, 2).scores(later[1:])[:, 0], expected[1:])
        torch.testing.assert_close(resolved.select(torch.tensor([1])).scores(later[1:])[:, 0], expected[1:])

    def test_known_means_that_no_clean_pass_is_needed(self):
        assert Target.of(1, 2).is_resolved
        assert Target.of(Contrast(1, 2), 2).is_resolved
        assert Target.of(Contrast(1), 2).is_resolved
        assert not Target.of(Contrast(1, "rivals"), 2).is_resolved
        assert not Target.of(Contrast(None, 2), 2).is_resolved
        assert Target.of(Contrast(1, "rivals"), 2).resolve(torch.randn(2, 5)).is_resolved

    @pytest.mark.parametrize("against", ["rivals", 2])
    def test_conservation(self, against):
        double = tiny_models.vit().double()
        assert conservation_gap(double, X.double(), Contrast([1, 4], against)) < 1e-10
        assert conservation_gap(double, X.double(), Contrast([[1, 0], [4, 3]], against)) < 1e-10

    def test_rivals_of_half_precision_are_weighed_in_single(self):
        logits = torch.randn(2, 5).bfloat16()
        assert Target.of(Contrast(1, "rivals"), 2).resolve(logits).weights.dtype == torch.float32
