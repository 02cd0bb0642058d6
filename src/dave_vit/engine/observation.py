"""Record the attention matrices of a forward pass, however the model implements attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import Call, Rule, RuleSet
from dave_vit.engine.fast import substitute_rules
from dave_vit.engine.forward import Read, check_inputs, forward, isolate_pass, prepare_model
from dave_vit.engine.interception import Interception
from dave_vit.engine.rule_sets.plain import PLAIN
from dave_vit.engine.rules.attention import attention_in_parts, is_attention, multi_head_attention
from dave_vit.engine.targets import class_logits


@dataclass(frozen=True, eq=False)
class AttentionMatrix:
    """One attention matrix of a forward pass, still part of the graph.

    Attributes:
        matrix: ``[B, heads, L, S]``, queries by keys; each row sums to one.
        tokens: the tokens ``[B, N, D]`` that queries and keys are made of, taken as the input of the last linear layer.
        module: path of the module it arose in, such as "blocks.11.attn".
    """

    matrix: Tensor
    tokens: Tensor | None
    module: str


@dataclass(frozen=True)
class TextDecoder:
    """The part of a model that writes text: its attention is not among the patches of the image.

    Attributes:
        path: of the module in the model, such as "model.model.language_model".
        image_tokens: positions of the image's patches in its sequence, row by row; empty where it attends to the image
            from outside, or where its image tokens are no patches.
    """

    path: str
    image_tokens: tuple[int, ...] = ()


@dataclass
class Observation:
    """Record of a forward pass.

    Attributes:
        model: what was run.
        attention: the matrices, in the order in which they arose, without those of `decoder`.
        decoder: the part that writes text, if any.
        text: the matrices of `decoder`.
        maps: rows and columns of every feature map that a convolution made before the first of them.
        pooled: the last feature map ``[B, C, h, w]``, or tokens ``[B, C, N]``, that were averaged over all positions.
        logits: ``[B, classes]``, or what else was read, part of the graph.
    """

    model: nn.Module
    attention: list[AttentionMatrix] = field(default_factory=list)
    decoder: TextDecoder | None = None
    text: list[AttentionMatrix] = field(default_factory=list)
    maps: list[tuple[int, int]] = field(default_factory=list)
    pooled: Tensor | None = None
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    def matrices_of(self, module: str) -> list[AttentionMatrix]:
        """Return the list that holds the attention of a module."""
        is_text = self.decoder is not None and f"{module}.".startswith(f"{self.decoder.path}.")
        return self.text if is_text else self.attention


@contextmanager
def observe(
    model: nn.Module,
    inputs: Tensor,
    *,
    rules: RuleSet = PLAIN,
    autocast: torch.dtype | None = None,
    read: Read = class_logits,
) -> Iterator[Observation]:
    """Run a model and record its attention; derivatives can be taken as long as the context is open.

    Args:
        model: any module that maps ``inputs`` to logits; it is left exactly as it was.
        inputs: preprocessed images ``[B, C, H, W]``.
        rules: the derivatives in force; ordinary ones by default.
        autocast: run the model under autocast with this type.
        read: what is read out of the model's output.

    Example:
        >>> with observe(model, images) as observed:
        ...     matrices = [attention.matrix for attention in observed.attention]
        ...     gradients = torch.autograd.grad(observed.logits[:, 207].sum(), matrices)
    """
    check_inputs(inputs)
    observed = Observation(prepare_model(model), decoder=find_text_decoder(model))
    mode = Interception(_Observer(substitute_rules(rules), observed, len(inputs)).rules(), observed.model)
    with isolate_pass(inputs):
        _, observed.logits = forward(observed.model, inputs, mode, autocast, read)
        yield observed


def find_text_decoder(model: nn.Module) -> TextDecoder | None:
    """Return the ``text_decoder`` of a model, or of the model inside of it, with its path from the outermost."""
    for name, module in model.named_modules():
        decoder = vars(module).get("text_decoder")
        if isinstance(decoder, TextDecoder):
            return replace(decoder, path=f"{name}.{decoder.path}".lstrip("."))
    return None


class _Observer:
    """Rules with the derivatives of a rule set that also record attention and feature maps.

    Args:
        base: gives the derivatives.
        observed: the record.
        batch: number of images.
    """

    def __init__(self, base: RuleSet, observed: Observation, batch: int) -> None:
        self.base, self.observed, self.batch = base, observed, batch
        self.latest: Tensor | None = None  # the input of the last linear layer

    def rules(self) -> RuleSet:
        """The rule set to run the model under."""
        rules: dict[str, Rule] = {
            "linear": self._linear,
            "conv2d": self._convolution,
            **dict.fromkeys(["softmax", "_softmax"], self._softmax),
            **dict.fromkeys(["mean", "flatten", "adaptive_avg_pool2d"], self._pooling),
            "scaled_dot_product_attention": attention_in_parts,
            "multi_head_attention_forward": self._packed,
        }
        return self.base.extend(f"{self.base.name}, attention observed", rules)

    def _linear(self, call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.ndim == 3:
            self.latest = input
        return _apply_base_rule(self.base, call, input, *args, **kwargs)

    def _convolution(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        value = _apply_base_rule(self.base, call, *args, **kwargs)
        if not self.observed.attention:
            self.observed.maps.append((value.shape[-2], value.shape[-1]))
        return value

    def _softmax(self, call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        value = _apply_base_rule(self.base, call, input, *args, **kwargs)
        if not is_attention(input, *args, **kwargs):
            return value
        if value.ndim == 3:  # [B * heads, L, S]
            value = value.unflatten(0, (self.batch if len(value) % self.batch == 0 else len(value), -1))
        module = call.mode.current_module()
        self.observed.matrices_of(module).append(AttentionMatrix(value, self.latest, module))
        return value.reshape(input.shape)

    def _packed(self, call: Call, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = query.transpose(0, 1) if query is key is value and query.ndim == 3 else None  # [L, N, E] there
        if tokens is not None:
            query = key = value = tokens.transpose(0, 1)
        result = multi_head_attention(call, query, key, value, *args, **kwargs)
        matrices = self.observed.matrices_of(call.mode.current_module())
        matrices[-1] = replace(matrices[-1], tokens=tokens)
        return result

    def _pooling(self, call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        observed, axes = self.observed, _pooled_axes(call.name, input, args, kwargs)
        if axes is not None and len(input) == self.batch and input.shape[axes[0] : axes[-1] + 1].numel() > 1:
            observed.pooled = input if axes[-1] == input.ndim - 1 else input.movedim(-1, 1)
            input = observed.pooled if input is observed.pooled else observed.pooled.movedim(1, -1)
        return _apply_base_rule(self.base, call, input, *args, **kwargs)


def _apply_base_rule(base: RuleSet, call: Call, *args: Any, **kwargs: Any) -> Any:
    rule = base.lookup(call.func, call.name)
    return call.func(*args, **kwargs) if rule is None else rule(call, *args, **kwargs)


def _pooled_axes(name: str, input: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the axes of positions if a call pools over all of them; channels come first or last."""
    if name == "adaptive_avg_pool2d":
        return (2, 3) if input.ndim == 4 else None
    dims = kwargs.get("dim" if name == "mean" else "start_dim", args[0] if args else None)
    if name == "flatten":
        return (2, 3) if input.ndim == 4 and dims == 1 else None
    if dims is None:
        return None
    axes = tuple(sorted(axis % input.ndim for axis in ([dims] if isinstance(dims, int) else dims)))
    return axes if (input.ndim, axes) in ((3, (1,)), (4, (1, 2)), (4, (2, 3))) else None
