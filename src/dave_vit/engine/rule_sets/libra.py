"""LibraGrad: paths pruned or scaled back so that every layer is complete (value times derivative is kept)."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from dave_vit.engine.calls import Call, RuleSet
from dave_vit.engine.function_names import PRODUCTS, SCALINGS
from dave_vit.engine.rule_sets.effective import EFFECTIVE
from dave_vit.engine.rule_sets.lrp import uniform_product
from dave_vit.engine.rules.products import product
from dave_vit.engine.states import State, map_tensors, state_of, tensors
from dave_vit.engine.surrogate import carry
from dave_vit.errors import UnsupportedOperator


def halved_product(call: Call, *args: Any, **kwargs: Any) -> Any:
    """A stream times an activation of another one (SwiGLU): both carry on, with half of the derivative each."""
    states = [state_of(factor) for factor in tensors((args, kwargs))]
    gated = states.count(State.CARRIER) == states.count(State.GATE) == 1
    return (uniform_product if gated else product)(call, *args, **kwargs)


def seen_scores(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Scores of attention carry on until the softmax that holds them, so that it can be observed."""
    carriers = [factor for factor in tensors((args, kwargs)) if state_of(factor) is State.CARRIER]
    if len(carriers) < 2:
        return halved_product(call, *args, **kwargs)
    held_args, held = map_tensors(Tensor.detach, (args, kwargs))
    return carry(lambda: call.func(*held_args, **held), _no_softmax, *carriers)


def _no_softmax(grad: Tensor) -> NoReturn:
    raise UnsupportedOperator(
        "the model multiplies two streams without a softmax after it, which libragrad cannot hold here; use another "
        "base, such as input_x_gradient, or the method effective"
    )


LIBRA: RuleSet = EFFECTIVE.extend("LibraGrad", dict.fromkeys(PRODUCTS, halved_product))
"""Attention, the scales of norms and the gates of activations held, gated products halved."""

LIBRA_SEEN: RuleSet = LIBRA.extend("LibraGrad, attention in sight", dict.fromkeys(PRODUCTS - SCALINGS, seen_scores))
"""The same where attention is observed."""
