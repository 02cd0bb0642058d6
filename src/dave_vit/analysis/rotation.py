"""How far an image may be rotated before the model's prediction changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from dave_vit.analysis.base import analysis, flag
from dave_vit.analysis.sensitivity import SensitivityOptions, SensitivityStudy, run_study
from dave_vit.metrics.stability import small_warp, warp_images
from dave_vit.models import traits_of
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
    """Measure how the probability changes when images are rotated, and the interval in which it hardly does."""
    study = SensitivityStudy(
        "rotation",
        "Rotation sensitivity",
        "rotation in degrees",
        "degrees",
        "Absolute change of the target's probability when the image is rotated about its centre, with grey outside "
        "(the mean colour of the training data, or half of every channel where zero is no colour). Shaded per model: "
        "the widest interval around 0 in which the median stays within {tolerance:g}. Dotted: the paper's choice, "
        "20 degrees.",
        lambda model: partial(rotate_images, fill=traits_of(model).fill),
        table_points=(10.0, 20.0, 90.0, 180.0),
        annotate=_mark_paper_angle,
    )
    right = np.arange(0, 180 + options.step / 2, options.step, dtype=np.float64)
    return run_study(options, study, [*(-right[:0:-1]).tolist(), *right.tolist()])


def rotate_images(inputs: Tensor, angle: float, *, fill: float = 0.0) -> Tensor:
    """Rotate images about their centre by degrees, with a colour outside: [B,C,H,W] -> [B,C,H,W]."""
    warp = small_warp((inputs.shape[2], inputs.shape[3]), rotation=angle, shift=(0.0, 0.0))
    return warp_images(inputs, warp, fill=fill)


def _mark_paper_angle(axes: Any) -> None:
    for angle, label in ((-PAPER_ANGLE, None), (PAPER_ANGLE, "the paper's choice")):
        axes.axvline(angle, color="#555555", linewidth=1.0, linestyle=":", label=label)
    axes.set_xticks(range(-180, 181, 60))
