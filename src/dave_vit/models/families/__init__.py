"""Families of models: one file each, which registers itself here; all files of this folder are found by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dave_vit._internal.registry import Registry, import_all
from dave_vit.models.adapter import Adapter


@dataclass(frozen=True)
class Family:
    """How models of a family are made.

    Attributes:
        load: ``load(name, weights, classes)``: a model; weights are a local file, "random", or None for the published
            ones; classes are names, a file of them, or None.
        zero_shot: whether ``load`` also takes ``prompts=``, sentences that become the classes.
        bare: whether ``load`` also takes ``prepare=``, for models that come without a preprocessing.
        backbone: ``backbone(name, weights, class_names)``: a model with an untrained head for these classes, and the
            path of that head inside of ``.model``; None where the family's models cannot be probed.
    """

    load: Callable[..., Adapter]
    zero_shot: bool = False
    bare: bool = False
    backbone: Callable[[str, str | None, Sequence[str]], tuple[Adapter, str]] | None = None


FAMILIES: Registry[Family] = Registry("model family")

import_all(__name__)  # each file imports its library inside of its functions: most users have only some of them
