"""Whether a picture is anything like those that a model was made for: seen in its logits."""

from __future__ import annotations

from torch import Tensor, nn

from dave_vit.models.traits import traits_of

PHOTOGRAPHIC = "timm:deit_tiny_patch16_224"
"""A small model of photographs that everybody may download."""
_THINGS, _CROWD = 2, 8  # a picture shows at most two things that the model knows; the likeliest classes compared


def stands_out(logits: Tensor) -> Tensor:
    """How far the two largest logits stand out of the next six, ``[B, classes]`` -> ``[B]``.

    A picture that shows one or two things that a model knows has one or two large logits; any other has a crowd.
    """
    largest = logits.topk(min(_CROWD, logits.shape[-1]), -1).values
    return largest[..., :_THINGS].mean(-1) - largest[..., _THINGS:].mean(-1)


def unfamiliar(model: nn.Module, logits: Tensor) -> Tensor:
    """Whether pictures are unlike those that a model was made for, ``[B]``; never, where that is not known."""
    least = traits_of(model).clear
    return stands_out(logits) < (float("-inf") if least is None else least)


def advice(model: nn.Module, command: str = "") -> str | None:
    """What a model knows, where that is not what most people want, and how `command` takes one for photographs."""
    knows = traits_of(model).knows
    return None if knows is None else f"knows {knows} only; for photographs: {command}--model {PHOTOGRAPHIC}"
