"""Out-of-domain check: whether an image resembles those that a model was trained on, judged by its logits."""

from __future__ import annotations

from torch import Tensor, nn

from dave_vit.models.traits import traits_of

PHOTO_MODEL = "timm:deit_tiny_patch16_224"
"""A small, freely downloadable model of photographs."""
_OBJECTS, _COMPARED = 2, 8  # an image shows at most two known objects; logits that are compared


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
