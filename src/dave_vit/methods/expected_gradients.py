"""Expected gradients: integrated gradients averaged over many baselines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.targets import Target
from dave_vit.errors import InputError
from dave_vit.methods.base import METHODS, Method, MethodInfo, check_at_least_one
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.gradients import slopes_of
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.sampling import SampleEstimate
from dave_vit.neighborhood.draws import normal_samples, sample_generator
from dave_vit.reduce import Mean


@METHODS.register("expected_gradients")
class ExpectedGradients(Method):
    """The gradient at random points between reference images and the image, times the difference of the two.

    Each sample takes one reference x' and one point x' + a (x - x'), a from U(0, 1). In expectation the attribution
    sums to the logit of the image minus the mean logit of the references.

    Args:
        model: any module that maps inputs to logits.
        samples: pairs of a reference and a point.
        seed: the same seed draws the same pairs, whatever the batch and the chunk.
        references: preprocessed images ``[R, C, H, W]``, of the data as published; standard normal noise by default,
            which has the mean and the spread of normalised images and nothing else of them.
        options: ``chunk`` (points in one forward pass) and ``autocast``.
    """

    info = MethodInfo(
        "Integrated gradients, averaged over many baselines.",
        "Erion et al., Nature Machine Intelligence 2021",
        "1 + T forward, T backward",
        unit="logit",
    )
    _budget_option = ("samples", 0)

    def __init__(
        self, model: nn.Module, samples: int = 50, seed: int = 0, references: Tensor | None = None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.samples, self.seed, self.references = check_at_least_one("samples", samples), seed, references

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        target = self._resolve_target(images, target, pass_size)
        estimate = SampleEstimate.start(Mean(), target, frames=tuple(images.shape[1:-3]))
        at_once = pass_size.samples_per_pass(images)
        for first in range(0, self.samples, at_once):
            references, places = self.draw(tuple(images.shape[1:]), first, min(first + at_once, self.samples))
            start = references.to(images.device, images.dtype).unsqueeze(1)  # [n, 1, C, H, W]
            span = images - start  # [n, b, C, H, W]
            at = places.to(images.device, images.dtype).view(-1, *[1] * images.ndim)
            slopes = slopes_of(self, start + at * span, target, pass_size)  # [n, b, K, C, H, W]
            estimate.add(slopes * span.unsqueeze(2))
        return estimate.explanation()

    def draw(self, shape: tuple[int, ...], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return references ``[n, C, H, W]`` and places ``[n]`` from 0 to 1 of the samples ``start`` to ``stop``."""
        if self.references is not None and self.references.shape[1:] != shape:
            raise InputError(
                f"references have shape {tuple(self.references.shape)}; give images [R, {', '.join(map(str, shape))}], "
                "preprocessed as the inputs are"
            )
        uniform = torch.stack(
            [torch.rand(2, generator=sample_generator(self.seed, i, "spatial")) for i in range(start, stop)]
        )
        if self.references is None:
            return normal_samples(self.seed, shape, start, stop), uniform[:, 0]
        chosen = (uniform[:, 1] * len(self.references)).long()
        return self.references[chosen.to(self.references.device)], uniform[:, 0]
