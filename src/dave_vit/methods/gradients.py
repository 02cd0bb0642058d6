"""Plain gradients (alone, times the input, integrated, averaged, with other rules for rectifiers), and baselines.

A rectifier is f(x) = x * phi(x) with a gate phi. For ReLU the gate is 1 or 0 and both rules are the published ones. For
GELU, SiLU and their kin the same rules act on the gate phi(x) = f(x) / x: guided backpropagation passes positive
gradients through the gate, deconvolution passes positive gradients and ignores the gate. All other functions
keep their ordinary derivative.
"""

from abc import abstractmethod
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit._internal.schema import Count, NonNegative, Positive
from dave_vit.engine import PLAIN, Call, Target, carry
from dave_vit.engine.targets import TargetLike
from dave_vit.errors import InputError, UnsupportedOperator
from dave_vit.methods.base import METHODS, Method, MethodInfo, multiply_by_input
from dave_vit.methods.constants import per_channel
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.sampling import SampleEstimate
from dave_vit.neighborhood.draws import normal_samples, sample_generator
from dave_vit.reduce import Mean


@METHODS.register("input_x_gradient")
class InputXGradient(Method):
    """Input times gradient."""

    info = MethodInfo(paper="Shrikumar et al., 2016", passes="1 forward, 1 backward", unit="logit")

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        return multiply_by_input(self._gradient(images, target, self.rules), images, target)


@METHODS.register("saliency")
class Saliency(Method):
    """Absolute gradient of the logit.

    Args:
        model: any module that maps inputs to logits.
        absolute: take absolute values, as published; otherwise the gradient keeps its sign.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(paper="Simonyan et al., ICLR 2014 workshop", passes="1 forward, 1 backward")

    absolute: bool = True

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        passed = self._gradient(images, target, PLAIN)
        weight = passed.weight.abs() if self.absolute else passed.weight
        return Explanation(weight, target.resolve(passed.logits).indices)


@METHODS.register("integrated_gradients")
class IntegratedGradients(Method):
    """Gradients integrated from a baseline to the image, times the difference.

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

    info = MethodInfo(paper="Sundararajan et al., ICML 2017", passes="1 + steps forward, steps backward", unit="logit")
    _budget_option = ("steps", 0)
    steps: Count = 50
    baseline: float | Tensor = 0.0

    def completeness_gap(self, inputs: Tensor, attribution: Tensor, target: TargetLike = None) -> Tensor:
        """Return the attribution's sum minus the rise of the logit: ``[B]``, or ``[B, K]`` for ``[B, K]`` targets.

        It is zero for an exact integral; if it is large compared with the logit, take more steps. Costs two forward
        passes.
        """
        images, normalised, pass_size = self._prepare(inputs, target)
        logits = self._logits(images, normalised, pass_size)
        normalised = normalised.resolve(logits)
        start = self._logits(self._start(images), normalised, pass_size)
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
    return pass_size.run_rows(lambda rows, target: method._gradient(rows, target, PLAIN).weight, rows, target)


class _SampledGradients(Method):
    """Base of methods that average gradients at random points, times the input or a difference."""

    _budget_option = ("samples", 0)
    samples: Count = 50

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        target = self._resolve_target(images, target, pass_size)
        estimate = SampleEstimate(Mean(), target, frames=tuple(images.shape[1:-3]))
        at_once = pass_size.samples_per_pass(images)
        for first in range(0, self.samples, at_once):
            points, factor = self._points(images, first, min(first + at_once, self.samples))
            slopes = slopes_of(self, points, target, pass_size)  # [n, b, K, C, H, W]
            estimate.add(slopes * factor.unsqueeze(-images.ndim))
        return estimate.explanation()

    @abstractmethod
    def _points(self, images: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return points ``[n, b, C, H, W]`` of the samples, and what their gradients are multiplied by."""


@METHODS.register("smoothgrad")
class SmoothGrad(_SampledGradients):
    """Gradient averaged over noisy copies of the image, times the input.

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

    info = MethodInfo(paper="Smilkov et al., 2017", passes="1 + T forward, T backward", unit="logit")
    level: NonNegative = 0.15
    seed: int = 0
    times_input: bool = True

    def _points(self, images: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        flat = images.flatten(1)
        spread = self.level * (flat.amax(1) - flat.amin(1)).view(-1, *[1] * (images.ndim - 1))  # [b, 1, 1, 1]
        noise = self.noise(tuple(images.shape[1:]), start, stop).to(images.device, images.dtype).unsqueeze(1)
        return images + spread * noise, images if self.times_input else torch.ones_like(images)

    def noise(self, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Return standard normal draws ``start`` to ``stop`` of this seed, shared by all images: ``[n, C, H, W]``."""
        return normal_samples(self.seed, shape, start, stop)


@METHODS.register("expected_gradients")
class ExpectedGradients(_SampledGradients):
    """Integrated gradients, averaged over many baselines.

    The gradient at random points between reference images and the image, times the difference of the two. Each sample
    takes one reference x' and one point x' + a (x - x'), a from U(0, 1). In expectation the attribution sums to the
    logit of the image minus the mean logit of the references.

    Args:
        model: any module that maps inputs to logits.
        samples: pairs of a reference and a point.
        seed: the same seed draws the same pairs, whatever the batch and the chunk.
        references: preprocessed images ``[R, C, H, W]``, of the data as published; standard normal noise by default,
            which has the mean and the spread of normalised images and nothing else of them.
        options: ``chunk`` (points in one forward pass) and ``autocast``.
    """

    info = MethodInfo(
        paper="Erion et al., Nature Machine Intelligence 2021", passes="1 + T forward, T backward", unit="logit"
    )
    seed: int = 0
    references: Tensor | None = None

    def _points(self, images: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        references, places = self.draw(tuple(images.shape[1:]), start, stop)
        origin = references.to(images.device, images.dtype).unsqueeze(1)  # [n, 1, C, H, W]
        span = images - origin  # [n, b, C, H, W]
        return origin + places.to(images.device, images.dtype).view(-1, *[1] * images.ndim) * span, span

    def draw(self, shape: tuple[int, ...], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return references ``[n, C, H, W]`` and places ``[n]`` from 0 to 1 of the samples ``start`` to ``stop``."""
        if self.references is not None and self.references.shape[1:] != shape:
            raise InputError(
                f"references have shape {tuple(self.references.shape)}; give images [R, {', '.join(map(str, shape))}], "
                "preprocessed as the inputs are"
            )
        generators = (sample_generator(self.seed, index, "spatial") for index in range(start, stop))
        uniform = torch.stack([torch.rand(2, generator=one) for one in generators])
        if self.references is None:
            return normal_samples(self.seed, shape, start, stop), uniform[:, 0]
        chosen = (uniform[:, 1] * len(self.references)).long()
        return self.references[chosen.to(self.references.device)], uniform[:, 0]


RECTIFIERS = frozenset("relu relu6 leaky_relu gelu silu hardswish mish elu celu selu".split())
_NEAR_ZERO = 1e-6


def guided_gate(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Pass positive gradients through the gate (guided backpropagation)."""
    x = torch.where(input == 0, -_NEAR_ZERO, input).detach()  # f(x) / x has its limit there, which for ReLU is 0
    gate = call.func(x, *args, **kwargs) / x  # phi(x)
    compute = partial(call.func, input.detach(), *args, **kwargs)
    return carry(compute, lambda grad, gate: grad.clamp(min=0) * gate, input, saved=(gate,))


def positive_gradient(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Pass positive gradients whatever the input was (deconvolution)."""
    return carry(lambda: call.func(input.detach(), *args, **kwargs), lambda grad: grad.clamp(min=0), input)


class _Rectified(Method):
    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        passed = self._gradient(images, target, self.rules)
        if not RECTIFIERS & passed.functions.keys():
            raise UnsupportedOperator(
                f"the model has no rectifier for {self.rules.name} to act on, so the map would be the plain gradient; "
                f"use the method saliency, or a model with one of {', '.join(sorted(RECTIFIERS))}"
            )
        return Explanation(passed.weight, target.resolve(passed.logits).indices)


@METHODS.register("guided_backprop")
class GuidedBackprop(_Rectified):
    """Gradient whose rectifiers pass positive gradients through their gate only.

    For ReLU this is the published method; for GELU and its kin the gate is f(x) / x.
    """

    info = MethodInfo(paper="Springenberg et al., ICLR 2015 workshop", passes="1 forward, 1 backward")
    rules = PLAIN.extend("guided backpropagation", dict.fromkeys(RECTIFIERS, guided_gate))


@METHODS.register("deconvolution")
class Deconvolution(_Rectified):
    """Gradient whose rectifiers pass all positive gradients.

    For ReLU this is the published method; GELU and its kin are treated alike.
    """

    info = MethodInfo(paper="Zeiler and Fergus, ECCV 2014", passes="1 forward, 1 backward")
    rules = PLAIN.extend("deconvolution", dict.fromkeys(RECTIFIERS, positive_gradient))


@METHODS.register("random")
class Random(Method):
    """Random values: the floor of every score.

    Independent normal values, the same for every image and every class of a seed.

    Args:
        model: used for the predicted class only.
        seed: another seed gives another map.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(paper="baseline", passes="1 forward, for the predicted class", class_specific=False)
    _kept = "nothing"
    seed: int = 0

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        values = normal_samples(self.seed, images.shape[1:], 0, 1)[0]
        return _repeat_map(self, values, images, target, pass_size)


@METHODS.register("center")
class Center(Method):
    """A Gaussian in the middle of the image, where photographers put their subjects.

    Args:
        model: used for the predicted class only.
        width: standard deviation, as a fraction of each side.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(paper="baseline", passes="1 forward, for the predicted class", class_specific=False)
    _kept = "nothing"
    width: Positive = 0.25

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        row, column = (self._profile(extent).to(images.dtype) for extent in images.shape[-2:])
        values = per_channel(row[:, None] * column, images.shape[-3]).expand(images.shape[1:])  # [C, H, W]
        return _repeat_map(self, values, images, target, pass_size)

    def _profile(self, extent: int) -> Tensor:
        at = (torch.arange(extent, dtype=torch.float64) + 0.5) / extent - 0.5
        return torch.exp(-at.square() / (2 * self.width**2))


def _repeat_map(method: Method, values: Tensor, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
    """Return the same values ``[C, H, W]`` for every image and target; the target is checked all the same."""
    target = target.resolve(method._logits(images, target, pass_size))
    attribution = values.to(images.device, images.dtype).expand(len(images), target.count, *values.shape).clone()
    return Explanation(attribution, target.indices)
