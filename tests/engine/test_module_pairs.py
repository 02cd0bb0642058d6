"""Random models are explained as their reference with ``.detach()`` says, or refused.

``python tests/support/module_pairs --count 10000`` runs many more and prints their seeds.
"""

from __future__ import annotations

import copy

import pytest
import torch

from dave_vit import effective_transformation
from dave_vit.engine.fast.compiled import CompiledGradient
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator
from module_pairs.base import BLOCKS, Forms
from module_pairs.programs import Program, judge

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:enable_nested_tensor")
FIRST, CHUNK = 20_000, 20
KINDS = [kind for kinds in BLOCKS.values() for kind in kinds if issubclass(kind, Forms)]
REFUSED = {"activation", "threshold", "native", "merge_by_one_hot"}
REFUSED |= {name for kind in KINDS for name in kind.forms if name.startswith("silu by hand,")}
"""Forms that have a map and are refused all the same."""


@pytest.mark.parametrize("start", range(FIRST, FIRST + 200, CHUNK))
def test_random_models(start):
    programs = [Program.draw(seed) for seed in range(start, start + CHUNK)]
    faults = [
        f"seed {program.seed}: {program.name}: {verdict.kind}: {verdict.detail}"
        for program in programs
        if (verdict := judge(program)).kind not in ("exact", "refused")
    ]
    assert faults == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_form_alone(kind):
    """Each is exact where a map exists and else refused, whatever programs are drawn."""
    verdicts = {name: judge(Program.of_form(kind, name)) for name in kind.forms}
    expected = {name: "exact" if kind.has_map and name not in REFUSED else "refused" for name in kind.forms}
    assert {name: verdict.kind for name, verdict in verdicts.items()} == expected, verdicts


@pytest.mark.filterwarnings("ignore:the model could not be compiled")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in BLOCKS["caches"]], ids=lambda kind: kind.__name__)
def test_caches_in_a_traced_graph(kind, monkeypatch):
    """The graph, run by its interpreter in place of the compiler, gives the map again and again, or there is none."""
    monkeypatch.setattr("dave_vit.engine.fast.compiled.compile_graph", lambda graph, given: graph)
    for name in kind.forms:
        model, images = (program := Program.of_form(kind, name)).model, program.images
        compiled, target = CompiledGradient(model, EFFECTIVE), Target.of(1, len(images))
        if not kind.has_map:
            with pytest.raises(UnsupportedOperator):
                compiled(images, target)
            continue
        expected = effective_transformation(copy.deepcopy(model), images, 1)
        for _ in range(2):
            torch.testing.assert_close(compiled(images, target)[0][:, 0], expected, rtol=1e-9, atol=1e-9)


def test_equal_values_share_the_derivative_of_amax():
    """In half precision, two of the values among which this program takes the larger are equal."""
    assert judge(Program.draw(8_001_951)).kind == "exact"
