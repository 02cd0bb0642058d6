"""Attention matrices as they arise inside a model, whatever way the model spells attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.effective.attention import attention_matrix, multi_head_attention
from dave_vit.effective.intercept import Interception
from dave_vit.effective.linear import training_error
from dave_vit.effective.ruleset import Call, Rule, RuleSet
from dave_vit.effective.sets import PLAIN
from dave_vit.effective.transform import check_inputs, check_model, forward, undisturbed


@dataclass(frozen=True)
class Attention:
    """One attention matrix of a forward pass, still part of the graph.

    Attributes:
        matrix: ``[B, heads, L, S]``, rows sum to one; queries by keys.
        tokens: what the linear layer before it took, usually the normed tokens ``[B, N, D]`` of its block.
        module: path of the module it arose in, such as "blocks.11.attn".
    """

    matrix: Tensor
    tokens: Tensor | None
    module: str


@dataclass
class Observation:
    """What was seen in a forward pass.

    Attributes:
        logits: ``[B, classes]``, part of the graph.
        attention: the matrices in the order in which they arose.
        features: the last output of a convolution ``[B, C, h, w]`` with more than one position.
    """

    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    attention: list[Attention] = field(default_factory=list)
    features: Tensor | None = None


def observing(base: RuleSet, seen: Observation, batch: int) -> RuleSet:
    """A rule set with the derivatives of ``base`` that files what it sees in ``seen``."""
    latest: list[Tensor] = []  # input of the last linear layer

    def linear(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        latest[:] = [input]
        return _as_in(base, call, input, *args, **kwargs)

    def convolution(call: Call, *args: Any, **kwargs: Any) -> Any:
        value = _as_in(base, call, *args, **kwargs)
        if value.requires_grad and value.ndim == 4 and value.shape[-2:].numel() > 1:
            seen.features = value
        return value

    def softmax(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        value = _as_in(base, call, input, *args, **kwargs)
        if input.ndim < 3 or _axis(args, kwargs) not in (-1, input.ndim - 1):  # class probabilities, gates
            return value
        if value.ndim == 3:  # [B * heads, L, S]
            value = value.unflatten(0, (batch, -1)) if len(value) % batch == 0 else value.unsqueeze(1)
        seen.attention.append(Attention(value, latest[0] if latest else None, _module(call.mode)))
        return value.reshape(input.shape)

    rules: dict[str, Rule] = {
        "linear": linear,
        "conv2d": convolution,
        "softmax": softmax,
        "_softmax": softmax,
        "scaled_dot_product_attention": spelled_out,
        "multi_head_attention_forward": multi_head_attention,
    }
    return base.extend(f"{base.name}, attention seen", rules)


def _as_in(base: RuleSet, call: Call, *args: Any, **kwargs: Any) -> Any:
    rule = base.lookup(call.func, call.name)
    return call.func(*args, **kwargs) if rule is None else rule(call, *args, **kwargs)


def _axis(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return kwargs["dim"] if "dim" in kwargs else args[0] if args else None


def _module(mode: Interception) -> str:
    return mode.where().removeprefix(" in module ").strip("'")


def spelled_out(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001
    **kwargs: Any,
) -> Tensor:
    """Fused attention as softmax and products, each of which meets its own rule."""
    if dropout_p > 0.0:
        raise training_error("attention dropout" + call.mode.where())
    with call.mode:
        matrix = attention_matrix(query, key, attn_mask, is_causal=is_causal, scale=kwargs.get("scale"))
        if value.ndim > 2 and value.shape[-3] != query.shape[-3]:  # grouped-query attention
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        return matrix @ value


@contextmanager
def observation(
    model: nn.Module, inputs: Tensor, *, rules: RuleSet = PLAIN, autocast: torch.dtype | None = None
) -> Iterator[Observation]:
    """Runs a model and shows its attention; derivatives can be taken as long as the context is open.

    Args:
        model: any module that maps ``inputs`` to logits; it is left exactly as it was.
        inputs: preprocessed images ``[B, C, H, W]``.
        rules: the derivatives in force; ordinary ones by default.
        autocast: run the model under autocast with this type.

    Example:
        >>> with observation(model, images) as seen:
        ...     matrices = [attention.matrix for attention in seen.attention]
        ...     gradients = torch.autograd.grad(seen.logits[:, 207].sum(), matrices)
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile hides the functions from the interception
    check_inputs(inputs)
    check_model(model)
    seen = Observation()
    mode = Interception(observing(rules, seen, len(inputs)), model)
    with undisturbed(inputs):
        entered = inputs.detach().requires_grad_().clone()
        with torch.autocast(inputs.device.type, dtype=autocast, enabled=autocast is not None), mode:
            seen.logits = forward(model, entered, mode)
        yield seen
