"""Plain gradients: alone, times the input, integrated along a path, or averaged over noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit.errors import InputError, OptionError
from dave_vit.methods.base import METHODS, Explanation, MethodInfo
from dave_vit.methods.chunked import Chunked, OnePass, pairs
from dave_vit.neighborhood.draws import sample_generator
from dave_vit.precision import precise_dtype
from dave_vit.reduce import Accumulator, Mean
from dave_vit.rules import PLAIN
from dave_vit.run.gradient import logits_of
from dave_vit.targets import TargetLike


@METHODS.register("input_x_gradient")
class InputXGradient(OnePass):
    """The gradient times the input."""

    info = MethodInfo(
        "Input times gradient.",
        "Shrikumar et al., 2016",
        "1 forward, 1 backward",
    )
    rules = PLAIN


@METHODS.register("saliency")
class Saliency(OnePass):
    """How much the logit moves with each value of the input.

    Args:
        model: any module that maps inputs to logits.
        absolute: the size of the gradient, as it was published; otherwise the signed gradient.
        chunk: images in one forward pass.
        autocast: run the model under autocast.
    """

    info = MethodInfo(
        "Absolute gradient of the logit.",
        "Simonyan et al., ICLR 2014 workshop",
        "1 forward, 1 backward",
    )
    rules = PLAIN

    def __init__(
        self,
        model: nn.Module,
        *,
        absolute: bool = True,
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, chunk=chunk, autocast=autocast)
        self.absolute = absolute

    def _weigh(self, weight: Tensor, images: Tensor) -> Tensor:
        return weight.abs() if self.absolute else weight


@METHODS.register("integrated_gradients")
class IntegratedGradients(Chunked):
    """Gradients integrated along the straight line from a baseline to the image, times the difference of the two.

    The attribution sums to the logit of the image minus that of the baseline, as far as the steps suffice: see
    ``completeness_gap``.

    Args:
        model: any module that maps inputs to logits.
        steps: points of the line, placed and weighted by the Gauss-Legendre rule.
        baseline: a number, or a tensor that broadcasts to an image ``[C, H, W]``. Zero is the mean colour of
            normalised images.
        chunk: points in one forward pass.
        autocast: run the model under autocast.

    Example:
        >>> method = IntegratedGradients(model, steps=200)
        >>> attribution = method.attribute(images, 207)
        >>> method.completeness_gap(images, attribution, 207)
    """

    info = MethodInfo(
        "Gradients integrated from a baseline to the image, times the difference.",
        "Sundararajan et al., ICML 2017",
        "1 + steps forward, steps backward",
    )

    def __init__(
        self,
        model: nn.Module,
        steps: int = 50,
        baseline: float | Tensor = 0.0,
        *,
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, chunk=chunk, autocast=autocast)
        if steps < 1:
            raise OptionError(f"steps is {steps}; it must be at least 1")
        self.steps, self.baseline = steps, baseline

    def completeness_gap(self, inputs: Tensor, attribution: Tensor, target: TargetLike = None) -> Tensor:
        """What the attribution's sum misses of the rise of the logit: ``[B]``, or ``[B, K]`` for ``[B, K]`` targets.

        Zero for an exact integral; if it is large against the logit, take more steps. Two forward passes.
        """
        indices = self.resolve(inputs, target)
        columns = indices.reshape(len(inputs), -1)
        ends = [self._logits(images).gather(1, columns) for images in (inputs, self._start(inputs))]
        total = attribution.reshape(*columns.shape, -1).sum(-1, dtype=precise_dtype(inputs.device))  # [B, K]
        return (total - (ends[0] - ends[1])).reshape(indices.shape)

    def _logits(self, inputs: Tensor) -> Tensor:
        return torch.cat([logits_of(self.model, part) for part in inputs.split(self._size(inputs))])

    def _start(self, images: Tensor) -> Tensor:
        baseline = torch.as_tensor(self.baseline, dtype=images.dtype, device=images.device)
        try:
            return baseline.expand(images.shape)
        except RuntimeError as error:
            raise InputError(
                f"baseline has shape {tuple(baseline.shape)}; give a number or a tensor that broadcasts to an image "
                f"{tuple(images.shape[1:])}"
            ) from error

    def _maps(self, images: Tensor, target: Tensor) -> Tensor:
        start = self._start(images)
        span = images - start  # [b, C, H, W]
        places, weights = np.polynomial.legendre.leggauss(self.steps)
        at = torch.as_tensor((places + 1) / 2, dtype=images.dtype, device=images.device)
        share = torch.as_tensor(weights / 2, dtype=images.dtype, device=images.device)
        total = images.new_zeros(*target.shape, *images.shape[1:])  # [b, K, C, H, W]
        step = max(1, self._size(images) // len(images))
        for first in range(0, self.steps, step):
            alpha = at[first : first + step]
            points = start + alpha.view(-1, 1, 1, 1, 1) * span  # [s, b, C, H, W]
            found = self._weights(points.flatten(0, 1), target.repeat(len(alpha), 1), PLAIN)
            found = found.reshape(len(alpha), *total.shape)
            total += torch.einsum("s,s...->...", share[first : first + step], found)
        return total * span.unsqueeze(1)


@METHODS.register("smoothgrad")
class SmoothGrad(Chunked):
    """The gradient averaged over noisy copies of the image, times the image.

    The original is the average alone. Here it is multiplied by the image unless told otherwise: every other method of a
    comparison gives contributions, whose sign a gradient alone does not have.

    Args:
        model: any module that maps inputs to logits.
        samples: noisy copies.
        level: standard deviation of the noise, as a fraction of each image's range (maximum minus minimum).
        seed: the same seed gives the same map, whatever the batch and the chunk.
        times_input: multiply the average by the image.
        chunk: noisy copies in one forward pass.
        autocast: run the model under autocast.
    """

    info = MethodInfo(
        "Gradient averaged over noisy copies of the image, times the input.",
        "Smilkov et al., 2017",
        "1 + T forward, T backward",
    )

    def __init__(
        self,
        model: nn.Module,
        samples: int = 50,
        level: float = 0.15,
        seed: int = 0,
        *,
        times_input: bool = True,
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, chunk=chunk, autocast=autocast)
        if samples < 1:
            raise OptionError(f"samples is {samples}; it must be at least 1")
        if not 0 <= level < float("inf"):
            raise OptionError(f"level is {level}; give the noise as a fraction of the input's range, such as 0.15")
        self.samples, self.level, self.seed, self.times_input = samples, level, seed, times_input

    @torch.inference_mode(mode=False)
    def explain(self, inputs: Tensor, target: TargetLike = None) -> Explanation:
        """Attributions with their standard error over the noise."""
        indices = self.resolve(inputs, target)
        columns = indices.reshape(len(inputs), -1)  # [B, K]
        parts = [self._run(*part) for part in pairs(inputs, columns, self._size(inputs))]
        attribution = torch.cat([part.attribution() for part in parts])
        error = torch.cat([part.standard_error() for part in parts])
        attribution = attribution.reshape(*indices.shape, *inputs.shape[1:])
        return Explanation(attribution, indices, error.reshape(*indices.shape, *error.shape[1:]), self.samples)

    def _maps(self, images: Tensor, target: Tensor) -> Tensor:
        return self._run(images, target).attribution().reshape(*target.shape, *images.shape[1:])

    def _run(self, images: Tensor, target: Tensor) -> Accumulator:
        accumulator = Mean().accumulator()
        flat = images.flatten(1)
        spread = self.level * (flat.amax(1) - flat.amin(1))  # [b]
        factor = images if self.times_input else torch.ones_like(images)
        step = max(1, self._size(images) // len(images))
        for first in range(0, self.samples, step):
            count = min(step, self.samples - first)
            noise = self.noise(tuple(images.shape[1:]), first, first + count).to(images.device, images.dtype)
            noisy = images + spread.view(-1, 1, 1, 1) * noise.unsqueeze(1)  # [n, b, C, H, W]
            found = self._weights(noisy.flatten(0, 1), target.repeat(count, 1), PLAIN)  # [n * b, K, C, H, W]
            found = found.reshape(count, *target.shape, *images.shape[1:]) * factor.unsqueeze(1)
            accumulator.update(found.flatten(1, 2))
        return accumulator

    def noise(self, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Standard normal draws ``start`` to ``stop`` of this seed, shared by all images: ``[n, C, H, W]``."""
        draws = [sample_generator(self.seed, index, "noise") for index in range(start, stop)]
        return torch.stack([torch.randn(shape, generator=draw, device="cpu") for draw in draws])
