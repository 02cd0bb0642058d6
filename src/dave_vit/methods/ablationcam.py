"""Ablation-CAM: class activation maps without gradients, each channel weighted by what the score loses without it."""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
from torch import Tensor, nn

from dave_vit.engine.forward import compute_logits
from dave_vit.engine.observation import Observation
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.gradcam import ActivationMap, features
from dave_vit.methods.masking import target_scores
from dave_vit.methods.pass_size import PassSize


@METHODS.register("ablationcam")
class AblationCAM(ActivationMap):
    """The channels of a feature map, weighted by the share of the score that is lost where a channel is set to zero.

    The features are those of ``gradcam``; in a Vision Transformer a channel is set to zero in all tokens.

    Args:
        model: any module that maps inputs to logits, and has a module that returns the features.
        options: ``positive``, ``resolution``, ``chunk`` (ablated copies in one forward pass) and ``autocast``.
    """

    info = MethodInfo(
        "Channels of the last block's tokens, weighted by the fall of the score without them.",
        "Desai and Ramaswamy, WACV 2020",
        "1 + D forward, D being the channels",
        resolution="patch",
    )

    def _subject(self) -> nn.Module:
        return OutputRecorder(getattr(self.model, "_orig_mod", self.model))

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        source, to_grid = features(observed, images)
        values = to_grid(source.detach()).to(images.dtype)  # [b, D, h, w]
        layer = cast(OutputRecorder, observed.model).find(source, values.shape[1])
        scores = target_scores(observed.logits.detach(), target, "logit")  # [b, K]
        ablated = self._score_ablated(images, target, layer, values.shape[1], pass_size)  # [D, b, K]
        weights = (scores - ablated) / torch.where(scores == 0, 1, scores)
        return torch.einsum("dbk,bdhw->bkhw", weights.to(values.dtype), values)

    def _score_ablated(
        self, images: Tensor, target: Target, layer: FeatureLayer, count: int, pass_size: PassSize
    ) -> Tensor:
        """Score the images with each of the channels set to zero: ``[D, b, K]``."""
        channels = torch.arange(count, device=images.device).repeat_interleave(len(images))  # [D * b]
        repeated = target.repeat(count)

        def compute(start: int, stop: int) -> Tensor:
            rows, part = images[torch.arange(start, stop) % len(images)], repeated.part(start, stop)
            with layer.ablate(channels[start:stop]):
                return target_scores(compute_logits(self.model, rows, part.read, self.autocast), part, "logit")

        return torch.cat(pass_size.run_chunks(compute, len(channels))).reshape(count, len(images), -1)


class FeatureLayer:
    """A module that returns the features.

    Args:
        module: the module.
        axes: of the batch and of the channels in its output.
    """

    def __init__(self, module: nn.Module, axes: tuple[int, int]) -> None:
        self.module, self.axes = module, axes

    def ablate(self, channels: Tensor) -> torch.utils.hooks.RemovableHandle:
        """Return a context in which this thread's passes have one channel of each row ``[rows]`` set to zero."""
        thread = threading.get_ident()

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if threading.get_ident() != thread:
                return output
            shape = [1] * output.ndim
            shape[self.axes[0]], shape[self.axes[1]] = len(channels), output.shape[self.axes[1]]
            ablated = nn.functional.one_hot(channels, shape[self.axes[1]]).bool()  # [rows, D]
            return output.masked_fill(ablated.view(shape), 0)

        return self.module.register_forward_hook(hook)


class OutputRecorder(nn.Module):
    """A model that records the tensor that each of its modules returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._outputs: list[tuple[nn.Module, Tensor]] = []
        self._thread = threading.get_ident()

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's own output."""
        self._outputs, self._thread = [], threading.get_ident()
        handles = [module.register_forward_hook(self._record) for module in self.model.modules()]
        try:
            return self.model(inputs)
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and threading.get_ident() == self._thread:
            self._outputs.append((module, output))

    def find(self, source: Tensor, channels: int) -> FeatureLayer:
        """Return the first module that returned this tensor, or a view of it."""
        channel_axis = next(axis for axis in (1, 2) if source.shape[axis] == channels)
        for module, output in self._outputs:
            if output.data_ptr() == source.data_ptr() and output.numel() == source.numel():
                return FeatureLayer(module, (_find_axis(output, source, 0), _find_axis(output, source, channel_axis)))
        raise UnsupportedOperator(
            "ablationcam sets channels of the features to zero, and no module of this model returns the features; use "
            "scorecam, which masks the image instead"
        )


def _find_axis(output: Tensor, source: Tensor, axis: int) -> int:
    """Return the axis of a tensor that is an axis of its view ``source``."""
    same = zip(output.shape, output.stride(), strict=True)
    return list(same).index((source.shape[axis], source.stride(axis)))
