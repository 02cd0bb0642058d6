"""Classifiers made of sentences: the logit of a prompt is its similarity with the picture (CLIP, SigLIP)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.errors import OptionError
from dave_vit.models.classes import Classes, read_classes

Encoder = Callable[[nn.Module, Tensor], Tensor]
"""``encode(model, inputs)``: features ``[B, D]`` of images."""


class ZeroShot(nn.Module):
    """Scaled cosine between a picture and each of some prompts.

    Args:
        model: an image and text model.
        encode: its image half.
        text: features ``[K, D]`` of the prompts.
        scale: the model's factor on the cosine.
        bias: what it adds (SigLIP).

    Attributes:
        compete: whether prompts compete with each other; with a bias, each was trained by itself.
    """

    text: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(
        self, model: nn.Module, encode: Encoder, text: Tensor, *, scale: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self._encode = encode
        self.compete = bias is None
        self.register_buffer("text", F.normalize(text.detach(), dim=-1))
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("bias", torch.zeros_like(scale) if bias is None else bias.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, K]``."""
        features = F.normalize(self._encode(self.model, inputs), dim=-1)  # [B, D]
        return self.scale * features @ self.text.T + self.bias


def wanted_prompts(
    prompts: Sequence[str] | None, classes: Classes | None, spec: str, *, least: int = 2
) -> tuple[list[str], list[str]]:
    """Prompts and the names they are shown under; a file of class names serves as prompts where there are none.

    Args:
        prompts: sentences.
        classes: names of them, or the sentences themselves.
        spec: of the model, for messages.
        least: how many sentences are needed.
    """
    if isinstance(prompts, str):
        raise OptionError(f"prompts is one string, {prompts!r}; give a list of sentences, one for each class")
    given = list(prompts) if prompts is not None else read_classes(classes) if classes is not None else []
    if len(given) < least:
        raise OptionError(
            f'{spec} compares pictures with sentences; give two or more: prompts=["a cat", "a dog"], or --classes FILE '
            "with one a line"
        )
    names = read_classes(classes) if classes is not None else given
    if len(names) != len(given):
        raise OptionError(f"{len(names)} class names for {len(given)} prompts; give one name a prompt")
    return given, names
