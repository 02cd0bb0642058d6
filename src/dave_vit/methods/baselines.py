"""What every comparison needs beside it: maps that know nothing of the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError
from dave_vit.methods.base import METHODS, Explanation, Method, MethodInfo
from dave_vit.methods.bias_placement import per_channel
from dave_vit.methods.pass_size import PassSize, clean_logits
from dave_vit.neighborhood.draws import sample_generator


@METHODS.register("random")
class Random(Method):
    """Independent normal values, the same for every image and every class of a seed.

    Args:
        model: used for the predicted class only.
        seed: another seed gives another map.
        chunk: images in one forward pass.
        autocast: has no effect here.
    """

    info = MethodInfo(
        "Random values: the floor of every score.",
        "baseline",
        "1 forward, for the predicted class",
        class_specific=False,
    )

    def __init__(
        self, model: nn.Module, seed: int = 0, *, chunk: int | None = None, autocast: torch.dtype | None = None
    ) -> None:
        super().__init__(model, chunk=chunk, autocast=autocast)
        self.seed = seed

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        generator = sample_generator(self.seed, 0, "noise")
        drawn = torch.randn(images.shape[1:], generator=generator, device="cpu")
        return _alike(drawn, images, target, clean_logits(self.model, images, pass_size, target.read))


@METHODS.register("center")
class Center(Method):
    """A Gaussian in the middle of the image: what photographers' habits alone are worth.

    Args:
        model: used for the predicted class only.
        width: standard deviation, as a fraction of each side.
        chunk: images in one forward pass.
        autocast: has no effect here.
    """

    info = MethodInfo(
        "A Gaussian in the middle of the image.",
        "baseline",
        "1 forward, for the predicted class",
        class_specific=False,
    )

    def __init__(
        self, model: nn.Module, width: float = 0.25, *, chunk: int | None = None, autocast: torch.dtype | None = None
    ) -> None:
        super().__init__(model, chunk=chunk, autocast=autocast)
        if not 0 < width < float("inf"):
            raise OptionError(f"width is {width}; give a fraction of the image's side above 0, such as 0.25")
        self.width = width

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        row, column = (self._profile(extent).to(images.dtype) for extent in images.shape[-2:])
        drawn = per_channel(row[:, None] * column, images.shape[-3]).expand(images.shape[1:])  # [C, H, W]
        return _alike(drawn, images, target, clean_logits(self.model, images, pass_size, target.read))

    def _profile(self, extent: int) -> Tensor:
        at = (torch.arange(extent, dtype=torch.float64) + 0.5) / extent - 0.5
        return torch.exp(-at.square() / (2 * self.width**2))


def _alike(drawn: Tensor, images: Tensor, target: Target, logits: Tensor) -> Explanation:
    """The same values ``[C, H, W]`` for every image and whatever is explained of it, which is checked all the same."""
    target = target.resolve(logits)
    attribution = drawn.to(images.device, images.dtype).expand(len(images), target.count, *drawn.shape).clone()
    return Explanation(attribution, target.indices)
