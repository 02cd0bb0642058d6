"""What methods on tokens share: from attention matrices and token scores to maps of the image."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.errors import OptionError, UnsupportedOperator
from dave_vit.methods.base import Explanation
from dave_vit.methods.chunked import Chunked, check_images, split
from dave_vit.methods.located import per_channel
from dave_vit.precision import working_dtype
from dave_vit.run.layout import TokenLayout, find_layout
from dave_vit.run.observe import Attention, Observation, observation
from dave_vit.targets import TargetLike, resolve_target

Resolution = Literal["input", "patch"]

_CHUNK = {"cuda": 32, "cpu": 8}  # images a pass; their attention matrices are held with the graph


@dataclass(frozen=True)
class TokenGraph:
    """How tokens of a model look at each other, from the first block to the read-out.

    Attributes:
        layout: the place of tokens in the image.
        layers: self-attention ``[b, heads, N, N]`` of each block.
        pooling: attention ``[b, heads, L, N]`` by which learned queries gather the tokens at the end, if any.
        logits: ``[b, classes]``.
    """

    layout: TokenLayout
    layers: tuple[Attention, ...]
    pooling: Attention | None
    logits: Tensor

    @property
    def all(self) -> tuple[Attention, ...]:
        """All matrices in their order."""
        return self.layers if self.pooling is None else (*self.layers, self.pooling)

    def readout(self) -> Tensor:
        """The weight ``[b, 1, N]`` of each token in what the head sees, as far as attention tells.

        With attention pooling it is that attention. Otherwise all tokens count alike that the logits depend on after
        the last attention: the class token, or all tokens of a model that averages them. The logits' derivative with
        respect to the last attention shows which.
        """
        if self.pooling is not None:
            return wide(self.pooling).mean((1, 2)).unsqueeze(1)
        last = self.layers[-1].matrix
        (grad,) = torch.autograd.grad(self.logits.square().sum(), last, retain_graph=True)
        read = (grad != 0).any(-1).any(1)  # [b, N]
        weight = (read | ~read.any(1, keepdim=True)).to(working_dtype(last.dtype))
        return (weight / weight.sum(1, keepdim=True)).unsqueeze(1)


def wide(attention: Attention) -> Tensor:
    """The matrix without its graph, in float32 at least: ``[b, heads, L, S]``."""
    matrix = attention.matrix.detach()
    return matrix.to(working_dtype(matrix.dtype))


def token_graph(seen: Observation, images: Tensor) -> TokenGraph:
    """The attention of a plain Vision Transformer; other models are refused, with the reason."""
    if not seen.attention:
        raise _refused("it has no softmax attention")
    sizes = [tuple(found.matrix.shape[-2:]) for found in seen.attention]
    square = {keys for queries, keys in sizes if queries == keys}
    if len(square) != 1 or any(len(found.matrix) != len(images) for found in seen.attention):
        raise _refused(f"it attends within windows or stages (matrices of {_listed(sizes)})")
    tokens = square.pop()
    depth = sizes.count((tokens, tokens))
    rest = sizes[depth:]
    if sizes[:depth] != [(tokens, tokens)] * depth or len(rest) > 1 or any(keys != tokens for _, keys in rest):
        raise _refused(f"beside its {tokens} tokens' attention it has other attention (matrices of {_listed(sizes)})")
    layers = tuple(seen.attention[:depth])
    if any(layer.tokens is not None and tokens not in layer.tokens.shape[:2] for layer in layers):
        raise _refused(f"its attention mixes {tokens} channels instead of tokens")
    pooling = seen.attention[depth] if rest else None
    return TokenGraph(find_layout(seen, tokens, images), layers, pooling, seen.logits)


def _listed(sizes: list[tuple[int, ...]]) -> str:
    return ", ".join(f"{queries}x{keys}" for queries, keys in sorted(set(sizes)))


def _refused(why: str) -> UnsupportedOperator:
    return UnsupportedOperator(
        f"this method needs a model whose blocks attend among all tokens, and {why}; use dave or input_x_gradient, "
        "which work on any model"
    )


class TokenMethod(Chunked):
    """A method that scores tokens: its maps are brought to the size of the image bilinearly.

    Args:
        model: any module that maps inputs to logits.
        resolution: "input" for attributions in the shape of the inputs, the map spread evenly over the channels, so
            that the channel sum is the map; "patch" for the bare token grid ``[B, 1, h, w]``.
        chunk: images in one forward pass.
        autocast: run the model under autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        resolution: Resolution = "input",
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, chunk=chunk, autocast=autocast)
        if resolution not in get_args(Resolution):
            raise OptionError(f"resolution {resolution!r}; expected one of {', '.join(get_args(Resolution))}")
        self.resolution = resolution

    def explain(self, inputs: Tensor, target: TargetLike = None) -> Explanation:
        """Attributions for a batch of any size; the pass that explains also finds the predicted class."""
        check_images(inputs)
        parts = [self._part(images, wanted) for images, wanted in split(inputs.detach(), target, self._size(inputs))]
        maps, indices = zip(*parts, strict=True)
        return Explanation(torch.cat(maps), torch.cat(indices))

    def _size(self, inputs: Tensor) -> int:
        return self.chunk or _CHUNK.get(inputs.device.type, 8)

    def _maps(self, images: Tensor, target: Tensor) -> Tensor:
        return self._part(images, target)[0]

    def _part(self, images: Tensor, target: TargetLike) -> tuple[Tensor, Tensor]:
        """Attribution and class indices of one chunk."""
        grids, indices = self._grids(images, target)  # [b, K, h, w]
        grids = grids.detach().to(images.dtype)
        maps = grids.unsqueeze(2) if self.resolution == "patch" else upsampled(grids, images)
        return maps if indices.ndim == 2 else maps[:, 0], indices

    def _grids(self, images: Tensor, target: TargetLike) -> tuple[Tensor, Tensor]:
        """Token grids ``[b, K, h, w]`` and class indices of some images."""
        with observation(self._subject(), images, autocast=self.autocast) as seen:
            indices = resolve_target(seen.logits, target)
            columns = indices.reshape(len(images), -1)  # [b, K]
            return self._seen(seen, images, columns), indices

    def _subject(self) -> nn.Module:
        """What is run."""
        return self.model

    @abstractmethod
    def _seen(self, seen: Observation, images: Tensor, target: Tensor) -> Tensor:
        """Token grids ``[b, K, h, w]`` for classes ``[b, K]``, out of what a forward pass showed."""


def upsampled(grids: Tensor, images: Tensor) -> Tensor:
    """Grids ``[b, K, h, w]`` as attributions ``[b, K, C, H, W]``."""
    wide_enough = grids.to(working_dtype(grids.dtype))
    maps = F.interpolate(wide_enough, images.shape[-2:], mode="bilinear", align_corners=False)
    return per_channel(maps, images.shape[1]).to(grids.dtype).contiguous()


def gradients(seen: Observation, target: Tensor, sources: list[Tensor]) -> list[list[Tensor]]:
    """Derivatives of the logits of classes ``[b, K]`` with respect to ``sources``: one list for each of the K."""
    rows = seen.logits.gather(1, target).sum(0)  # [K]
    return [list(torch.autograd.grad(row, sources, retain_graph=True)) for row in rows.unbind()]
