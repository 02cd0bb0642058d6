"""Plain gradients: alone, times the input, integrated along a path, or averaged over noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.rule_sets import PLAIN
from dave_vit.engine.targets import Target, TargetLike
from dave_vit.errors import InputError, OptionError
from dave_vit.methods.base import METHODS, Method, MethodInfo, check_at_least_one, multiply_by_input
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize, clean_logits
from dave_vit.methods.sampling import SampleEstimate
from dave_vit.neighborhood.draws import normal_samples
from dave_vit.reduce import Mean


@METHODS.register("input_x_gradient")
class InputXGradient(Method):
    """The gradient times the input."""

    info = MethodInfo("Input times gradient.", "Shrikumar et al., 2016", "1 forward, 1 backward", unit="logit")

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        return multiply_by_input(self._gradient(images, target, PLAIN), images, target)


@METHODS.register("saliency")
class Saliency(Method):
    """Absolute gradient of the logit with respect to each value of the input.

    Args:
        model: any module that maps inputs to logits.
        absolute: take absolute values, as published; otherwise the gradient keeps its sign.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo("Absolute gradient of the logit.", "Simonyan et al., ICLR 2014 workshop", "1 forward, 1 backward")

    def __init__(self, model: nn.Module, *, absolute: bool = True, **options: Any) -> None:
        super().__init__(model, **options)
        self.absolute = absolute

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        passed = self._gradient(images, target, PLAIN)
        weight = passed.weight.abs() if self.absolute else passed.weight
        return Explanation(weight, target.resolve(passed.logits).indices)


@METHODS.register("integrated_gradients")
class IntegratedGradients(Method):
    """Gradients integrated along the straight line from a baseline to the image, times the difference of the two.

    The attribution sums to the logit of the image minus that of the baseline, as far as the steps suffice: see
    ``completeness_gap``.

    Args:
        model: any module that maps inputs to logits.
        steps: points of the line, placed and weighted by the Gauss-Legendre rule.
        baseline: a number, or a tensor that broadcasts to an image ``[C, H, W]``. Zero is the mean colour of
            normalised images.
        options: ``chunk`` (points in one forward pass) and ``autocast``.

    Example:
        >>> method = IntegratedGradients(model, steps=200)
        >>> attribution = method.attribute(images, 207)
        >>> method.completeness_gap(images, attribution, 207)
    """

    info = MethodInfo(
        "Gradients integrated from a baseline to the image, times the difference.",
        "Sundararajan et al., ICML 2017",
        "1 + steps forward, steps backward",
        unit="logit",
    )
    _budget_option = ("steps", 0)

    def __init__(self, model: nn.Module, steps: int = 50, baseline: float | Tensor = 0.0, **options: Any) -> None:
        super().__init__(model, **options)
        self.steps, self.baseline = check_at_least_one("steps", steps), baseline

    def completeness_gap(self, inputs: Tensor, attribution: Tensor, target: TargetLike = None) -> Tensor:
        """Return the attribution's sum minus the rise of the logit: ``[B]``, or ``[B, K]`` for ``[B, K]`` targets.

        It is zero for an exact integral; if it is large compared with the logit, take more steps. Costs two forward
        passes.
        """
        images, normalised, pass_size = self._prepare(inputs, target)
        logits = clean_logits(self.model, images, pass_size, normalised.read, self.autocast)
        normalised = normalised.resolve(logits)
        start = clean_logits(self.model, self._start(images), pass_size, normalised.read, self.autocast)
        rise = normalised.scores(logits) - normalised.scores(start)  # [B, K]
        total = attribution.reshape(*rise.shape, -1).sum(-1, dtype=precise_dtype(images.device))
        return total - rise if normalised.has_class_axis else (total - rise)[:, 0]

    def _start(self, images: Tensor) -> Tensor:
        baseline = torch.as_tensor(self.baseline, dtype=images.dtype, device=images.device)
        try:
            return baseline.expand(images.shape)
        except RuntimeError as error:
            raise InputError(
                f"baseline has shape {tuple(baseline.shape)}; give a number or a tensor that broadcasts to an image "
                f"{tuple(images.shape[1:])}"
            ) from error

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        target = self._resolve_target(images, target, pass_size)
        start = self._start(images)
        span = images - start  # [b, C, H, W]
        places, weights = (torch.as_tensor(part) for part in np.polynomial.legendre.leggauss(self.steps))
        at, share = (part.to(images.dtype).to(images.device) for part in ((places + 1) / 2, weights / 2))
        total = images.new_zeros(())
        at_once = pass_size.samples_per_pass(images)
        for alpha, part in zip(at.split(at_once), share.split(at_once), strict=True):
            points = start + alpha.view(-1, *[1] * images.ndim) * span  # [s, b, C, H, W]
            slopes = slopes_of(self, points, target, pass_size)
            total = total + torch.einsum("s,s...->...", part, slopes)
        return Explanation(total * span.unsqueeze(1), target.indices)


def slopes_of(method: Method, rows: Tensor, target: Target, pass_size: PassSize) -> Tensor:
    """Compute plain gradients at rows ``[n, b, C, H, W]``, n for each image: ``[n, b, K, C, H, W]``."""
    flat, repeated = rows.flatten(0, 1), target.repeat(len(rows))

    def compute(start: int, stop: int) -> Tensor:
        return method._gradient(flat[start:stop], repeated.part(start, stop), PLAIN).weight

    slopes = torch.cat(pass_size.run_chunks(compute, len(flat)))
    return slopes.reshape(*rows.shape[:2], *slopes.shape[1:])


@METHODS.register("smoothgrad")
class SmoothGrad(Method):
    """The gradient averaged over noisy copies of the image, times the image.

    The original method is the average alone. Here it is multiplied by the image by default, since the other methods of
    a comparison return contributions, whose sign a gradient alone does not have.

    Args:
        model: any module that maps inputs to logits.
        samples: noisy copies.
        level: standard deviation of the noise, as a fraction of each image's range (maximum minus minimum).
        seed: the same seed gives the same map, whatever the batch and the chunk.
        times_input: multiply the average by the image.
        options: ``chunk`` (noisy copies in one forward pass) and ``autocast``.
    """

    info = MethodInfo(
        "Gradient averaged over noisy copies of the image, times the input.",
        "Smilkov et al., 2017",
        "1 + T forward, T backward",
        unit="logit",
    )
    _budget_option = ("samples", 0)

    def __init__(
        self,
        model: nn.Module,
        samples: int = 50,
        level: float = 0.15,
        seed: int = 0,
        *,
        times_input: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        if not 0 <= level < float("inf"):
            raise OptionError(f"level is {level}; give the noise as a fraction of the input's range, such as 0.15")
        self.samples, self.level = check_at_least_one("samples", samples), level
        self.seed, self.times_input = seed, times_input

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        target = self._resolve_target(images, target, pass_size)
        estimate = SampleEstimate.start(Mean(), target, frames=tuple(images.shape[1:-3]))
        flat = images.flatten(1)
        spread = self.level * (flat.amax(1) - flat.amin(1)).view(-1, *[1] * (images.ndim - 1))  # [b, 1, 1, 1]
        factor = images if self.times_input else torch.ones_like(images)
        at_once = pass_size.samples_per_pass(images)
        for first in range(0, self.samples, at_once):
            noise = self.noise(tuple(images.shape[1:]), first, min(first + at_once, self.samples))
            noise = noise.to(images.device, images.dtype).unsqueeze(1)  # [n, 1, C, H, W]
            slopes = slopes_of(self, images + spread * noise, target, pass_size)
            estimate.add(slopes * factor.unsqueeze(1))
        return estimate.explanation()

    def noise(self, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Return standard normal draws ``start`` to ``stop`` of this seed, shared by all images: ``[n, C, H, W]``."""
        return normal_samples(self.seed, shape, start, stop)
