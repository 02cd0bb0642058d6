"""Record the attention of a forward pass, however the model implements it, and where its tokens lie in the image."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import Call, Rule, RuleSet
from dave_vit.engine.fast import substitute_rules
from dave_vit.engine.forward import Read, check_inputs, forward, isolate_pass, prepare_model
from dave_vit.engine.interception import Interception
from dave_vit.engine.rule_sets import PLAIN
from dave_vit.engine.rules.attention import attention_in_parts, is_attention, multi_head_attention
from dave_vit.engine.targets import class_logits
from dave_vit.errors import InputError, OutputError, UnsupportedOperator


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

    def layout(self, images: Tensor) -> TokenLayout:
        """Return the grid of the image's tokens; raise UnsupportedOperator where these are no grid of patches."""
        count = len(self.image_tokens)
        grid = find_token_grid(count, images.shape[-2:])
        if grid is None or math.prod(grid) != count:
            raise self.refusal()
        return TokenLayout(grid, 0)

    def refusal(self) -> UnsupportedOperator:
        """Return the error for a language model that reads the image as something else than a grid of patches."""
        return UnsupportedOperator(
            f"the language model has {len(self.image_tokens)} image tokens, which are not a grid of patches; use dave "
            "or attn_lrp, which follow the pixels"
        )


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

    @property
    def image_tokens(self) -> list[int]:
        """Positions of the image's patches in the sequence of `decoder`; empty where it has none."""
        return list(self.writer.image_tokens)

    @property
    def writer(self) -> TextDecoder:
        """The part that writes text; one without tokens where there is none."""
        return self.decoder or TextDecoder("")

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
        if mode.draws.generators:  # as of ViLT
            raise UnsupportedOperator(
                "the model draws random numbers, by which it may shuffle its patches, so that the places of its tokens "
                "are not known; use dave or attn_lrp, which follow the pixels, or load ViLT by name"
            )
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


@dataclass(frozen=True)
class TokenLayout:
    """Tokens of a model for inputs of one size.

    Attributes:
        grid: rows and columns of patches.
        prefix: tokens before them: class, distillation, registers.
    """

    grid: tuple[int, int]
    prefix: int

    @property
    def tokens(self) -> int:
        """How many tokens attention sees."""
        return self.prefix + self.grid[0] * self.grid[1]

    def to_grid(self, values: Tensor) -> Tensor:
        """Arrange one value a token ``[..., tokens]`` in the grid of patches ``[..., rows, columns]``."""
        if values.shape[-1] != self.tokens:
            raise InputError(f"{values.shape[-1]} values for {self.tokens} tokens; give one value per token")
        return values[..., self.prefix :].reshape(*values.shape[:-1], *self.grid)


def find_token_layout(model: nn.Module, inputs: Tensor, read: Read = class_logits) -> TokenLayout:
    """Find grid and prefix tokens of a Vision Transformer, for inputs of this size.

    Args:
        model: any module that maps inputs to logits; nothing of it is changed.
        inputs: preprocessed images ``[B, C, H, W]``; only their size counts.
        read: what is read out of the model's output, where it is no logits.
    """
    with observe(model, inputs[:1], read=read) as observed:
        sizes = [attention.matrix.shape[-2:] for attention in observed.attention]
        maps = observed.maps
    if observed.image_tokens:  # where tiles follow one after the other
        return observed.writer.layout(inputs)
    counts = sorted({keys for queries, keys in sizes if queries == keys})  # pooling has other queries
    if not counts:
        raise OutputError("the model has no self-attention, so it has no token grid; use a method that needs none")
    grid = find_token_grid(counts[0], inputs.shape[-2:], maps)
    if len(counts) > 1 or grid is None:
        raise OutputError(
            f"the model has no single token grid (attention over {', '.join(map(str, counts[:4]))} tokens, as in "
            "windows or stages); use a method that needs no attention maps, such as dave"
        )
    others = [keys for queries, keys in sizes if queries != keys]
    if len(others) > 1 or others not in ([], counts):
        raise OutputError(
            f"beside its {counts[0]} tokens' attention the model has other attention (class attention over "
            f"{others[0]} tokens); use a method that needs no attention maps, such as dave"
        )
    if observed.decoder is not None and (not maps or counts[0] >= 2 * math.prod(grid)):  # of tiles, as in Llama 3.2
        raise observed.writer.refusal()
    return TokenLayout(grid, counts[0] - math.prod(grid))


def guess_token_layout(observed: Observation, tokens: int, images: Tensor) -> TokenLayout:
    """Guess the layout of that many tokens; those before the grid are class and register tokens."""
    size = images.shape[-2:]
    grid = find_token_grid(tokens, size, observed.maps) or find_token_grid(tokens, size) or (1, 1)
    return TokenLayout(grid, tokens - math.prod(grid))


def find_token_grid(tokens: int, size: Sequence[int], maps: Sequence[tuple[int, int]] = ()) -> tuple[int, int] | None:
    """Return rows and columns of patches, the largest grid that the tokens can hold.

    Args:
        tokens: how many there are, with class and register tokens.
        size: height and width of the image.
        maps: feature maps that the model made before its first attention, of which one must be the grid; without any,
            patches are square and tile the image.
    """
    largest = math.gcd(*size)
    sides = [side for side in range(1, largest + 1) if largest % side == 0]
    candidates = maps or [(size[0] // side, size[1] // side) for side in sides]
    return max((grid for grid in candidates if math.prod(grid) <= tokens), key=math.prod, default=None)


def find_patch_side(model: nn.Module) -> int | None:
    """Return the side of the patches in pixels, if the model cuts them out by a convolution."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            sides = {*module.kernel_size, *module.stride}
            return sides.pop() if len(sides) == 1 and sides != {1} else None
    return None
