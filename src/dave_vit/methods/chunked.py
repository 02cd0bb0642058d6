"""Batches of any size: images go through a method in chunks, and the targets of an image share its forward pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dave_vit.errors import InputError, OptionError, TargetError
from dave_vit.intercept import RuleSet
from dave_vit.methods.base import Explanation, Method
from dave_vit.run import gradient
from dave_vit.run.gradient import check_inputs, logits_of
from dave_vit.targets import TargetLike, resolve_target

_CHUNK = {"cuda": 256, "cpu": 16}  # rows a pass, as DAVE takes them


class Chunked(Method):
    """A method that resolves the target on the clean images first and may then run the model many times.

    Args:
        model: any module that maps inputs to logits.
        chunk: rows (images times samples or steps) in one forward pass; it changes speed and memory, not the maps.
        autocast: run the model under autocast, for example ``torch.bfloat16``.
    """

    def __init__(self, model: nn.Module, *, chunk: int | None = None, autocast: torch.dtype | None = None) -> None:
        super().__init__(model)
        if chunk is not None and chunk < 1:
            raise OptionError(f"chunk is {chunk}; it must be at least 1")
        self.chunk, self.autocast = chunk, autocast

    @torch.inference_mode(mode=False)  # where autograd could not be switched on
    def explain(self, inputs: Tensor, target: TargetLike = None) -> Explanation:
        """Attributions for a batch of any size."""
        indices = self.resolve(inputs, target)
        columns = indices.reshape(len(inputs), -1)  # [B, K]
        parts = [self._maps(*part) for part in pairs(inputs, columns, self._size(inputs))]
        maps = torch.cat(parts)  # [B, K, C, H, W]
        return Explanation(maps if indices.ndim == 2 else maps[:, 0], indices)

    def resolve(self, inputs: Tensor, target: TargetLike) -> Tensor:
        """Class indices of the clean images, chunk by chunk."""
        check_images(inputs)
        logits = [logits_of(self.model, images) for images in inputs.detach().split(self._size(inputs))]
        return resolve_target(torch.cat(logits), target)

    def _size(self, inputs: Tensor) -> int:
        return self.chunk or _CHUNK.get(inputs.device.type, 16)

    @abstractmethod
    def _maps(self, images: Tensor, target: Tensor) -> Tensor:
        """Attributions ``[b, K, C, H, W]`` of some images ``[b, C, H, W]`` for classes ``[b, K]``."""

    def _attribute(self, inputs: Tensor, target: Tensor) -> Tensor:
        return self.explain(inputs, target).attribution

    def _weights(self, rows: Tensor, target: Tensor, rules: RuleSet) -> Tensor:
        """Derivatives ``[n, K, C, H, W]`` under a rule set."""
        return gradient(self.model, rows, target, rules=rules, autocast=self.autocast).weight


class OnePass(Chunked):
    """A method of one forward pass, and one backward pass for each target, under a rule set."""

    rules: RuleSet

    @torch.inference_mode(mode=False)
    def explain(self, inputs: Tensor, target: TargetLike = None) -> Explanation:
        """Attributions for a batch of any size; the pass that explains also finds the predicted class."""
        check_images(inputs)
        parts = [self._part(images, wanted) for images, wanted in split(inputs, target, self._size(inputs))]
        maps, indices = zip(*parts, strict=True)
        return Explanation(torch.cat(maps), torch.cat(indices))

    def _part(self, images: Tensor, target: TargetLike) -> tuple[Tensor, Tensor]:
        """Attribution and class indices of one chunk."""
        found = gradient(self.model, images, target, rules=self.rules, autocast=self.autocast)
        self._check_seen(found.functions)
        indices = resolve_target(found.logits, target)
        return self._weigh(found.weight, images.unsqueeze(1) if indices.ndim == 2 else images), indices

    def _maps(self, images: Tensor, target: Tensor) -> Tensor:
        return self._part(images, target)[0]

    def _weigh(self, weight: Tensor, images: Tensor) -> Tensor:
        """From derivative to attribution: times the input unless a method says otherwise."""
        return weight * images

    def _check_seen(self, seen: dict[str, int]) -> None:
        """Refuse a model that lacks what the rules are about; ``seen`` counts the functions that met the input."""


def split(inputs: Tensor, target: TargetLike, size: int) -> Iterator[tuple[Tensor, TargetLike]]:
    """Chunks of images, each with the target in its own form."""
    batch, chunks = len(inputs), _ordinary(inputs).split(size)
    rows = _ordinary(torch.as_tensor(target)) if isinstance(target, Tensor | list | tuple) else None
    if rows is None or rows.ndim == 0:  # one target for all images
        yield from ((images, target) for images in chunks)
        return
    if len(rows) != batch:
        raise TargetError(
            f"target has shape {tuple(rows.shape)} for a batch of {batch}; give one index, [{batch}] indices, "
            f"or [{batch}, K] indices"
        )
    yield from zip(chunks, rows.split(size), strict=True)


def pairs(inputs: Tensor, target: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of images, each with its rows of resolved targets."""
    return zip(_ordinary(inputs).split(size), _ordinary(target).split(size), strict=True)


def _ordinary(tensor: Tensor) -> Tensor:
    # Tensors made in inference mode cannot take part in autograd; their copies can.
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def check_images(inputs: Tensor) -> None:
    """Refuse what is no batch of images."""
    check_inputs(inputs)
    if inputs.ndim != 4:
        raise InputError(f"inputs have shape {tuple(inputs.shape)}; give a batch of images [B, C, H, W]")
