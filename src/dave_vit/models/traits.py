"""What is known of a model beside its function: facts that methods and metrics ask for, all in one typed place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dave_vit.neighborhood import Noise

# Of the mean sigmoid of a model's logits: 0.42 to 0.49 in four models trained with softmax, 0.02 in one with sigmoids.
_COMPETING = 0.1


@dataclass(frozen=True)
class Traits:
    """Facts of a model; the defaults are those of a module of which nothing is known.

    Attributes:
        noise: what the model's authors recommend for DAVE, where it is not the usual one.
        fill: the value of a neutral grey in the model's input, with which warps fill what they uncover.
        patch: side of the square patches that become tokens, in pixels; None where there are none or it is not known.
        compete: whether classes compete, as after training with softmax, or each logit stands for itself, as after
            training with sigmoids; None where it is not known.
        knows: what kind of pictures the model was made for, in words, where it is not photographs.
        clear: how far the largest logits of such pictures stand out, at least; see `dave_vit.models.domain`.
    """

    noise: Noise | None = None
    fill: float = 0.0
    patch: int | None = None
    compete: bool | None = None
    knows: str | None = None
    clear: float | None = None


def traits_of(model: nn.Module) -> Traits:
    """The traits of a model: those under its attribute ``traits``, or the defaults.

    Nothing else on the model is looked at: what its author calls ``fill`` or ``noise`` may mean anything.
    """
    traits = getattr(model, "traits", None)
    return traits if isinstance(traits, Traits) else Traits()


def competing(model: nn.Module, logits: Tensor) -> Tensor:
    """Whether classes compete, for each image of logits ``[B, classes]``.

    Where nothing is known of the model it shows in the logits: after training with softmax only their differences mean
    anything, and about half are positive; after training with sigmoids nearly all are far below zero. A single output
    has no rivals.
    """
    known = traits_of(model).compete
    if logits.shape[1] < 2 or known is not None:
        return torch.full_like(logits[:, 0], bool(known) and logits.shape[1] > 1, dtype=torch.bool)
    return logits.detach().float().sigmoid().mean(1) > _COMPETING


def square(patch: int | Sequence[int] | None) -> int | None:
    """The side of a patch as libraries write it, an integer or a pair; None where it is no square."""
    if isinstance(patch, int) or patch is None:
        return patch
    return int(patch[0]) if len(set(patch)) == 1 else None
