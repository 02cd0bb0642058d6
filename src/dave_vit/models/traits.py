"""Facts about a model that methods and metrics need, in one typed object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dave_vit.neighborhood import Noise

# Threshold on the mean sigmoid of the logits: 0.42 to 0.49 in four models trained with softmax, 0.02 in one trained
# with sigmoids.
_SOFTMAX_MEAN = 0.1
PHOTO_MODEL = "timm:deit_tiny_patch16_224"
"""A small, freely downloadable model of photographs."""
_OBJECTS, _COMPARED = 2, 8  # an image shows at most two known objects; logits that are compared


@dataclass(frozen=True)
class Traits:
    """Facts about a model; the defaults hold for a module of which nothing is known.

    Attributes:
        noise: the noise that the model's authors recommend for DAVE, where it is not the default.
        fill: value of neutral grey in the model's input, used by warps to fill uncovered pixels.
        patch: side of the square patches that become tokens, in pixels; None where unknown or not applicable.
        compete: whether classes compete (softmax training) or each logit stands alone (sigmoid training); None where
            unknown.
        domain: the images that the model was trained on, in words, where these are not photographs.
        domain_margin: smallest logit margin of images of that domain; see `top_logit_margin`.
    """

    noise: Noise | None = None
    fill: float = 0.0
    patch: int | None = None
    compete: bool | None = None
    domain: str | None = None
    domain_margin: float | None = None


def traits_of(model: nn.Module) -> Traits:
    """Return the ``traits`` attribute of a model, or the defaults.

    No other attribute is read: what a model's author calls ``fill`` or ``noise`` may mean anything.
    """
    traits = getattr(model, "traits", None)
    return traits if isinstance(traits, Traits) else Traits()


def do_classes_compete(model: nn.Module, logits: Tensor) -> Tensor:
    """Return whether classes compete, for each image of logits ``[B, classes]``.

    Where the model's traits do not say, the logits do: after softmax training only their differences have a meaning,
    and about half are positive; after sigmoid training nearly all are far below zero. A single output has no rivals.
    """
    compete = traits_of(model).compete
    if logits.shape[1] < 2 or compete is not None:
        return torch.full_like(logits[:, 0], bool(compete) and logits.shape[1] > 1, dtype=torch.bool)
    return logits.detach().float().sigmoid().mean(1) > _SOFTMAX_MEAN


def square_side(patch: int | Sequence[int] | None) -> int | None:
    """Return the side of a patch given as an integer or a pair; None where it is not square."""
    if isinstance(patch, int) or patch is None:
        return patch
    return int(patch[0]) if len(set(patch)) == 1 else None


def top_logit_margin(logits: Tensor) -> Tensor:
    """Return the mean of the two largest logits minus the mean of the next six, ``[B, classes]`` -> ``[B]``.

    An image of one or two known objects has one or two large logits; any other has many of similar size.
    """
    largest = logits.topk(min(_COMPARED, logits.shape[-1]), -1).values
    return largest[..., :_OBJECTS].mean(-1) - largest[..., _OBJECTS:].mean(-1)


def is_out_of_domain(model: nn.Module, logits: Tensor) -> Tensor:
    """Return whether each image is out of the model's domain, ``[B]``; always False where the domain is unknown."""
    margin = traits_of(model).domain_margin
    return top_logit_margin(logits) < (float("-inf") if margin is None else margin)


def domain_advice(model: nn.Module, command: str = "") -> str | None:
    """Return the domain of a model that is not for photographs, and the option of `command` that selects one."""
    domain = traits_of(model).domain
    return None if domain is None else f"knows {domain} only; for photographs: {command}--model {PHOTO_MODEL}"
