"""How far a picture may be turned before the model changes its mind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit.analysis.base import analysis, flag
from dave_vit.analysis.sensitivity import Change, SensitivityOptions, SensitivityStudy, sensitivity_section
from dave_vit.models import traits_of
from dave_vit.neighborhood import Warp, affine_matrix
from dave_vit.viz.report_section import Section

PAPER_ANGLE = 20.0


@dataclass(frozen=True)
class RotationOptions(SensitivityOptions):
    """Options of the analysis.

    Attributes:
        step: degrees between angles.
    """

    step: float = flag(10.0, "Degrees between angles.", least=1, most=90)


@analysis("rotation")
def analyze_rotation(options: RotationOptions) -> Section:
    """How the probability changes when pictures are turned, and the interval in which it hardly does."""
    right = np.arange(0, 180 + options.step / 2, options.step, dtype=np.float64)
    return sensitivity_section(options, _KIND, [*(-right[:0:-1]).tolist(), *right.tolist()])


def rotate_images(inputs: Tensor, angle: float, *, fill: float = 0.0) -> Tensor:
    """Images turned about their centre by degrees, with a colour outside: [B,C,H,W] -> [B,C,H,W]."""
    one = torch.ones(1, dtype=torch.float64)
    size = (inputs.shape[2], inputs.shape[3])
    matrix = affine_matrix(
        size, flip=one < 0, rotation=one * angle, scale=one, translation=torch.zeros(1, 2, dtype=torch.float64)
    )
    warp = Warp(matrix.expand(len(inputs), 3, 3), torch.zeros(len(inputs), 2, dtype=torch.int64))
    return warp.apply(inputs, fill=fill)


def _turning(model: nn.Module) -> Change:
    return partial(rotate_images, fill=traits_of(model).fill)


def _mark(axes: Any) -> None:
    for end, words in ((-PAPER_ANGLE, None), (PAPER_ANGLE, "the paper's choice")):
        axes.axvline(end, color="#555555", linewidth=1.0, linestyle=":", label=words)
    axes.set_xticks(range(-180, 181, 60))


_KIND = SensitivityStudy(
    "rotation",
    "Rotation sensitivity",
    "rotation in degrees",
    "degrees",
    "Absolute change of the target's probability when the picture is turned about its centre, with grey outside "
    "(the mean colour of the training data, or half of every channel where zero is no colour). Shaded per model: the "
    "widest interval around 0 in which the median stays within {tolerance:g}. Dotted: the paper's choice, 20 degrees.",
    _turning,
    shown=(10.0, 20.0, 90.0, 180.0),
    mark=_mark,
)
