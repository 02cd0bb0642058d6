"""LeGrad: how the class score of each layer's tokens reacts to that layer's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import working_dtype
from dave_vit._internal.schema import check_choice
from dave_vit.engine.calls import carry
from dave_vit.engine.forward import Read
from dave_vit.engine.observation import AttentionMatrix, Observation, find_text_decoder
from dave_vit.engine.targets import Target, class_logits
from dave_vit.errors import OptionError, UnsupportedOperator, first_line
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.block_hooks import tap_blocks
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import TokenMethod, gradients, refuse_words, token_graph

Readout = Literal["model", "cls", "mean"]

_READOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "model": lambda tokens: tokens,
    "cls": lambda tokens: tokens[:, :1].expand_as(tokens),
    "mean": lambda tokens: tokens.mean(1, keepdim=True).expand_as(tokens),
}


@METHODS.register("legrad")
class LeGrad(TokenMethod):
    """The positive gradient of each layer's own class score with respect to its attention, averaged over all layers.

    The tokens after each block go through the model's final norm and head, which gives a class score for every layer.
    Its gradient with respect to the attention of this block alone is clamped at zero and averaged over heads and
    queries.

    Args:
        model: a model with softmax attention among all tokens, whose blocks are modules in a list.
        layers: indices of the blocks that count; all by default. The authors' CLIP code takes the last two.
        readout: which tokens the head sees: "model" leaves it to the model; "cls" replaces each token by the first one,
            "mean" by the mean of all tokens. The authors' CLIP code takes the mean.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(
        "Positive gradient of every layer's class score with respect to its attention.",
        "Bousselham et al., ICCV 2025",
        "1 forward, 1 backward",
        resolution="patch",
    )

    def __init__(
        self, model: nn.Module, *, layers: Sequence[int] | None = None, readout: Readout = "model", **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.layers = None if layers is None else tuple(layers)
        self.readout = check_choice("readout", readout, _READOUTS)

    def _subject(self, target: Target) -> nn.Module:
        if find_text_decoder(self.model) is not None:
            raise refuse_words()
        return Layered(getattr(self.model, "_orig_mod", self.model), _READOUTS[self.readout], target.read)

    def _read(self, target: Target) -> Read:
        return class_logits  # read already, of all layers together

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        layered = cast(Layered, observed.model)
        matrices = [attention.matrix for attention in _block_attention(observed, layered)]
        slopes = gradients(layered.logits.flatten(0, 1), target.repeat(len(matrices)), matrices)  # K lists
        chosen = self._layer_indices(len(matrices))
        maps = [torch.stack([_positive(column[index]) for index in chosen]).mean(0) for column in slopes]  # [b, N]
        return token_graph(observed, images).layout.to_grid(torch.stack(maps, 1))

    def _layer_indices(self, depth: int) -> Sequence[int]:
        if self.layers is None:
            return range(depth)
        if not self.layers or not all(-depth <= index < depth for index in self.layers):
            raise OptionError(f"layers {list(self.layers)}; the model has layers 0 to {depth - 1}")
        return self.layers


def _positive(grad: Tensor) -> Tensor:
    """Average the positive part over heads and queries: ``[b, heads, N, N]`` -> ``[b, N]``, one value per key."""
    return grad.to(working_dtype(grad.dtype)).clamp(min=0).mean((1, 2))


class Layered(nn.Module):
    """A model whose head also sees the tokens of every block, in the same forward pass.

    Blocks are cut from each other, so that the score of a layer depends on the attention of its own block only.

    Attributes:
        blocks: paths of the blocks, known after a pass.
        logits: of the tokens of each layer, ``[layers, b, classes]``.
    """

    def __init__(self, model: nn.Module, readout: Callable[[Tensor], Tensor], read: Read = class_logits) -> None:
        super().__init__()
        self.model, self._readout, self._read = model, readout, read
        self.blocks: list[str] = []
        self.logits = torch.empty(0)

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's own logits."""
        with tap_blocks(self, len(inputs), self._tap):
            output = self._run(inputs)
            logits = self._read(output, len(inputs) * (1 + len(self.blocks)))
        if not self.blocks:
            return logits
        self.logits = logits[len(inputs) :].unflatten(0, (len(self.blocks), -1))
        return logits[: len(inputs)]

    def _run(self, inputs: Tensor) -> Any:
        try:
            return self.model(inputs)
        except RuntimeError as error:
            if not self.blocks or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            why = first_line(error)
            raise _refusal(f"what follows the blocks does not take the tokens of several layers ({why})") from error

    def _tap(self, paths: list[str], states: list[Tensor]) -> Tensor:
        """Cut a block from the next one; after the last block, append the tokens of all layers to the batch."""
        tokens = states[-1]
        if len(states) < len(paths):
            return carry(tokens.clone, lambda grad: (None,), tokens)  # hands nothing back
        self.blocks = paths
        return torch.cat([tokens, *map(self._readout, states)])  # [(1 + layers) * b, N, D]


def _block_attention(observed: Observation, layered: Layered) -> list[AttentionMatrix]:
    """Return the one attention matrix of each block; attention pooling after the blocks is left out."""
    observed.attention = [each for each in observed.attention if each.matrix.shape[-2] == each.matrix.shape[-1]]
    within = [
        [each for each in observed.attention if f"{each.module}.".startswith(f"{path}.")] for path in layered.blocks
    ]
    if not within or any(len(block) != 1 for block in within) or len(within) != len(observed.attention):
        raise _refusal("its blocks are no list of modules that each hold one attention among all tokens")
    return [block[0] for block in within]


def _refusal(why: str) -> UnsupportedOperator:
    return UnsupportedOperator(
        f"legrad reads the tokens out after every block, and in this model {why}; use chefer_generic, or dave, which "
        "works on any model"
    )
