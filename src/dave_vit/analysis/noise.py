"""How much noise an image takes before the model's prediction changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dave_vit.analysis.base import analysis, flag
from dave_vit.analysis.sensitivity import SensitivityOptions, SensitivityStudy, run_study
from dave_vit.neighborhood.draws import sample_generator
from dave_vit.viz.report_section import Section


@dataclass(frozen=True)
class NoiseOptions(SensitivityOptions):
    """Options of the analysis.

    Attributes:
        step: distance of levels of noise, which go up to 2.
    """

    step: float = flag(0.1, "Distance of levels of noise.", least=0.01, most=2)


@analysis("noise")
def analyze_noise(options: NoiseOptions) -> Section:
    """Measure how the probability changes under additive noise, and the level up to which it hardly does."""
    study = SensitivityStudy(
        "noise",
        "Noise sensitivity",
        "standard deviation of additive noise (preprocessed input)",
        "sigma",
        "Absolute change of the target's softmax probability under additive Gaussian noise on the preprocessed input. "
        "Shaded per model: the levels at which the median stays within {tolerance:g}; the table gives the t of "
        "variance-preserving noise with the same ratio of noise to signal.",
        lambda model: partial(add_noise, seed=options.seed),
        table_points=(0.2, 0.5, 1.0, 2.0),
        extra_columns={"as t": equivalent_noise_time},
    )
    return run_study(options, study, np.arange(0, 2 + options.step / 2, options.step).round(4).tolist())


def add_noise(inputs: Tensor, sigma: float, seed: int = 0) -> Tensor:
    """Add Gaussian noise to images, the same draw for all images and all levels: [B,C,H,W] -> [B,C,H,W]."""
    noise = torch.randn(inputs.shape[1:], generator=sample_generator(seed, 0, "noise"))
    return inputs + sigma * noise.to(inputs)


def equivalent_noise_time(sigma: float) -> float:
    """Return the t of variance-preserving noise with the same ratio of noise to signal as additive noise."""
    return float(1 - 1 / np.sqrt(1 + sigma**2))
