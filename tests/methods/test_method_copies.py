"""Methods and explanations as values: pickled and copied, and refused where no finite map exists."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from test_method_contract import ON_A_VIT, X, method, usual

import tiny_models
from dave_vit import DAVE
from dave_vit.errors import InputError, MissingExtra, OptionError


@pytest.mark.parametrize("name", ON_A_VIT)
class TestEveryMethod:
    def test_pickled_and_copied_methods_give_the_same_map(self, name):
        tested = method(name)
        tested.attribute(X[:1], 0)  # nothing that was recorded or drawn stands in the way
        for other in (pickle.loads(pickle.dumps(tested)), copy.deepcopy(tested), copy.copy(tested)):
            assert type(other) is type(tested)
            torch.testing.assert_close(other.attribute(X[:1], 0), usual(name).attribution[:1], rtol=1e-4, atol=1e-6)
        assert copy.copy(tested).model is tested.model
        assert copy.deepcopy(tested).model is not tested.model

    @pytest.mark.parametrize("scale", [1e20, 1e30, float("inf"), float("nan")])
    def test_inputs_whose_squares_overflow_are_refused(self, name, scale):
        with pytest.raises(InputError, match=r"hold NaN, infinite values or values above 1.8e\+19"):
            method(name).explain(X[:1] * scale, 0)


def test_a_pickled_explanation_does_not_hold_the_model():
    model = tiny_models.vit()
    explanation = DAVE(model, samples=3).explain(X, 0)
    data = pickle.dumps(explanation)
    restored = pickle.loads(data)
    tensors = [value for value in vars(explanation).values() if isinstance(value, torch.Tensor)]
    assert len(data) < 1.2 * (sum(each.nbytes for each in tensors) + X.nbytes) + 4096
    assert b"blocks.0" not in data
    assert torch.equal(restored.map, explanation.map)
    assert torch.equal(restored.subject.pictures, explanation.subject.pictures)


def test_a_reducer_without_weights_is_refused_before_the_first_pass():
    with pytest.raises(OptionError, match="TrimmedMean takes no weights; add weighted=False"):
        DAVE(tiny_models.vit(), reducer="trimmed")
    assert DAVE(tiny_models.vit(), reducer="trimmed", weighted=False, samples=4).attribute(X, 0).isfinite().all()


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.cluster.hierarchy", None)
    with pytest.raises(MissingExtra, match=r"scipy is not installed; run: pip install 'dave-vit\[eval\]'"):
        method("vit_cx").attribute(X[:1], 0)
