"""Class activation maps by gradients or scores: Grad-CAM and its kin, Eigen-CAM, Finer-CAM, Score-CAM, Ablation-CAM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, field
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype, working_dtype
from dave_vit._internal.schema import Count, NonNegative
from dave_vit.engine import Target
from dave_vit.engine.forward import compute_logits
from dave_vit.engine.gradient import derivatives
from dave_vit.engine.observation import Observation, guess_token_layout, observe
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import METHODS, Method, MethodInfo
from dave_vit.methods.constants import scale_to_unit, upsample
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.masking import MaskedImages, target_scores
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import Recorded, Resolution, TokenMethod, explain_grids, hook_outputs, record_outputs
from dave_vit.methods.words import tokens_to_grid, vision_features

Weigh = Callable[[Tensor, Tensor], Tensor]
"""Function from slopes and features, both ``[b, D, h, w]``, to weights of the features."""


def mean_slope(slope: Tensor, values: Tensor) -> Tensor:
    """Return one weight per channel, eq. (1) of Grad-CAM."""
    return slope.mean((2, 3), keepdim=True)  # [b, D, 1, 1]


def _plus_plus_slope(slope: Tensor, values: Tensor) -> Tensor:
    """Eq. (19): the derivatives of exp(S) are exp(S) times powers of the slope, so that exp(S) cancels in alpha."""
    below = 2 + values.sum((2, 3), keepdim=True) * slope  # both sides of the fraction without the slope's square
    alpha = torch.where((slope != 0) & (below != 0), 1 / below, 0)
    return (alpha * slope.clamp(min=0)).sum((2, 3), keepdim=True)  # [b, D, 1, 1]


def _positive_slope(slope: Tensor, values: Tensor) -> Tensor:
    return slope.clamp(min=0)


def _place_slope(slope: Tensor, values: Tensor) -> Tensor:
    return slope


class ActivationMap(Method):
    """Base of methods that add up the channels of a feature map, each with its weights.

    Args:
        model: any module that maps inputs to logits.
        positive: keep the positive part of the map only; otherwise the signed sum.
        resolution: "input" for attributions in the shape of the inputs, "patch" for the bare grid ``[B, 1, h, w]``.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    _why_no_clips = TokenMethod._why_no_clips
    _rows, _kept, _resolution = TokenMethod._rows, TokenMethod._kept, TokenMethod._resolution
    _weigh: ClassVar[Weigh]
    _: KW_ONLY
    positive: bool = True
    resolution: Resolution = "input"

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        subject = self._subject()
        with observe(subject, images, rules=self.rules, autocast=self.autocast, read=target.read) as observed:
            target = target.resolve(observed.logits)
            grids = self._grids(observed, images, target, pass_size)
            return explain_grids(grids.clamp(min=0) if self.positive else grids, images, target, self.resolution)

    def _subject(self) -> nn.Module:
        return self.model

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        """Compute the signed sums ``[b, K, h, w]`` from an observed forward pass, for a resolved target."""
        return weigh_features(observed, images, target.scores(observed.logits), type(self)._weigh)


@METHODS.register("gradcam")
class GradCAM(ActivationMap):
    """Channels of the last block's tokens, weighted by their mean gradient.

    The channels of a feature map, weighted by the mean of their gradient over all places, and added up. In a Vision
    Transformer these are the normed tokens that enter the last attention, without class and register tokens. In a model
    without attention among all tokens (a CNN, a mixer) they are what is averaged for the head.

    Args:
        model: any module that maps inputs to logits.
        positive: keep the positive part of the map only, as published; otherwise the signed sum.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(paper="Selvaraju et al., ICCV 2017", passes="1 forward, 1 backward")
    _weigh = mean_slope


@METHODS.register("gradcam_plus_plus")
class GradCAMPlusPlus(ActivationMap):
    """Channels of the last block's tokens, weighted by positive gradients of places that count most.

    As ``gradcam``, with positive gradients weighted by second and third derivatives: those of the exponential of the
    logit, as published, in closed form. Its value, one positive factor of the whole map, is left out.

    Args:
        model: any module that maps inputs to logits.
        positive: keep the positive part of the map only, as published; otherwise the signed sum.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(paper="Chattopadhyay et al., WACV 2018", passes="1 forward, 1 backward")
    _weigh = _plus_plus_slope


@METHODS.register("layercam")
class LayerCAM(ActivationMap):
    """The last block's tokens, weighted by their positive gradient place by place.

    Args:
        model: any module that maps inputs to logits.
        positive: keep the positive part of the map only, as published; otherwise the signed sum.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(paper="Jiang et al., TIP 2021", passes="1 forward, 1 backward")
    _weigh = _positive_slope


@METHODS.register("hirescam")
class HiResCAM(ActivationMap):
    """The last block's tokens, weighted by their gradient place by place.

    Features times their gradient at each place, added up over the channels. Where the head is linear in the features,
    the map sums to the logit, up to the head's bias.

    Args:
        model: any module that maps inputs to logits.
        positive: keep the positive part of the map only; as published, the map is signed.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(paper="Draelos and Carin, 2020", passes="1 forward, 1 backward")
    _weigh = _place_slope
    positive: bool = field(default=False, kw_only=True)


def weigh_features(observed: Observation, images: Tensor, scores: Tensor, weigh: Weigh) -> Tensor:
    """Multiply features by their weights for each score ``[b, K]``, and sum over the channels: ``[b, K, h, w]``."""
    source, to_grid = features(observed, images)
    values = to_grid(source.detach())  # [b, D, h, w]
    slopes = (to_grid(slope) for (slope,) in derivatives(scores, [source], retain_graph=True))
    return torch.stack([(weigh(slope, values) * values).sum(1) for slope in slopes], 1)  # [b, K, h, w]


def features(observed: Observation, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return a tensor of the graph, and a function that turns it or its gradient into a grid ``[b, D, h, w]``."""
    if observed.decoder is not None:
        return vision_features(observed, images)
    for attention in reversed(observed.attention):
        tokens, shape = attention.tokens, attention.matrix.shape
        if tokens is not None and tokens.shape[:2] == (len(images), shape[-1]) and shape[-2] == shape[-1]:
            return tokens, partial(tokens_to_grid, guess_token_layout(observed, shape[-1], images))
    if observed.pooled is None:
        raise UnsupportedOperator(
            "class activation maps need attention among all tokens or features that are averaged for the head, and the "
            "model has neither; use dave or input_x_gradient, which work on any model"
        )
    if observed.pooled.ndim == 4:
        return observed.pooled, lambda grid: grid
    return observed.pooled, guess_token_layout(observed, observed.pooled.shape[-1], images).to_grid


@METHODS.register("eigencam")
class EigenCAM(ActivationMap):
    """First principal component of the last block's tokens.

    The projection of the features at each place onto their first right singular vector. The features are those of
    ``gradcam``. A singular vector has no sign of its own: the place farthest from zero is made positive.

    Args:
        model: any module that maps inputs to logits.
        centred: subtract the mean over all places from each channel first, as the grad-cam package does.
        options: ``positive``, ``resolution``, ``chunk`` and ``autocast``, as for every `ActivationMap`.
    """

    info = MethodInfo(paper="Muhammad and Yeasin, IJCNN 2020", passes="1 forward", class_specific=False)

    centred: bool = False

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        source, to_grid = features(observed, images)
        values = to_grid(source.detach()).to(precise_dtype(images.device))  # [b, D, h, w]
        scores = principal_component(values.flatten(2).mT, centred=self.centred)
        return scores.reshape(len(images), 1, *values.shape[2:]).expand(-1, target.count, -1, -1)


def principal_component(places: Tensor, *, centred: bool) -> Tensor:
    """Project features ``[b, P, D]`` onto their first right singular vector: ``[b, P]``, the largest value positive."""
    values = places - places.mean(1, keepdim=True) if centred else places
    direction = torch.linalg.svd(values, full_matrices=False).Vh[:, 0]  # [b, D]
    projection = torch.einsum("bpd,bd->bp", values, direction)
    farthest = projection.gather(1, projection.abs().argmax(1, keepdim=True))
    return projection * farthest.sign()


@METHODS.register("finercam")
class FinerCAM(ActivationMap):
    """Grad-CAM of the difference between a class and the classes most similar to it.

    Grad-CAM of the difference between the logit of the class and those of similar classes. Classes are similar if their
    logits are near to that of the class. As in the authors' code, the differences are averaged with the probabilities
    of the similar classes as weights. Contrasts and score functions say themselves what is compared: their maps are
    those of ``gradcam``.

    Args:
        model: any module that maps inputs to logits.
        references: how many similar classes the class is compared with.
        strength: factor of their logits; 0 is Grad-CAM.
        options: ``positive``, ``resolution``, ``chunk`` and ``autocast``, as for every `ActivationMap`.
    """

    info = MethodInfo(paper="Zhang et al., CVPR 2025", passes="1 forward, 1 backward")

    references: Count = 3
    strength: NonNegative = 1.0

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        return weigh_features(observed, images, self._compare(observed.logits, target), mean_slope)

    def _compare(self, logits: Tensor, target: Target) -> Tensor:
        """Return the score that is explained, ``[b, K]``, from logits ``[b, classes]``."""
        count = min(self.references, logits.shape[1] - 1)
        if target.score is not None or target.has_contrast or count == 0:
            return target.scores(logits)
        wide, classes = logits.to(working_dtype(logits.dtype)), target.class_indices.clone()  # [b, K]
        own = wide.gather(1, classes).unsqueeze(2)  # [b, K, 1]
        apart = (wide.unsqueeze(1) - own).abs().scatter(2, classes.unsqueeze(2), float("inf"))
        similar = apart.topk(count, dim=2, largest=False).indices  # [b, K, R]
        others, weights = (part.gather(1, similar.flatten(1)).view_as(similar) for part in (wide, wide.softmax(1)))
        return (weights * (own - self.strength * others)).sum(2) / weights.sum(2)


@METHODS.register("scorecam")
class ScoreCAM(ActivationMap):
    """Channels of the last block's tokens, weighted by the score of the image seen through them.

    The channels of a feature map, weighted by the score of the image masked with each of them. The features are those
    of ``gradcam``. Each channel, enlarged to the image and scaled from 0 to 1, is a mask; the softmax of the scores
    over the channels weighs them.

    Args:
        model: any module that maps inputs to logits.
        positive: keep the positive part of the map only, as published; otherwise the signed sum.
        options: ``resolution``, ``chunk`` (masked images in one forward pass) and ``autocast``.
    """

    info = MethodInfo(paper="Wang et al., CVPR 2020 workshop", passes="1 + D forward, D being the channels")

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        source, to_grid = features(observed, images)
        values = to_grid(source.detach()).to(images.dtype)  # [b, D, h, w]

        def masks(start: int, stop: int) -> Tensor:
            return scale_to_unit(upsample(values[:, start:stop], images.shape[-2:])).transpose(0, 1)  # [n, b, H, W]

        parts = MaskedImages(self, images, target, pass_size).score_masks(masks, values.shape[1])
        weights = torch.cat([scores for _, scores in parts]).softmax(0)  # [D, b, K]
        return torch.einsum("dbk,bdhw->bkhw", weights.to(values.dtype), values)


@METHODS.register("ablationcam")
class AblationCAM(ActivationMap):
    """Channels of the last block's tokens, weighted by the fall of the score without them.

    The channels of a feature map, weighted by the share of the score that is lost where a channel is set to zero. The
    features are those of ``gradcam``; in a Vision Transformer a channel is set to zero in all tokens.

    Args:
        model: any module that maps inputs to logits, and has a module that returns the features.
        options: ``positive``, ``resolution``, ``chunk`` (ablated copies in one forward pass) and ``autocast``.
    """

    info = MethodInfo(paper="Desai and Ramaswamy, WACV 2020", passes="1 + D forward, D being the channels")

    def _subject(self) -> nn.Module:
        return Recorded(self.model, record_outputs)

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        source, to_grid = features(observed, images)
        values = to_grid(source.detach()).to(images.dtype)  # [b, D, h, w]
        layer = find_feature_layer(cast(Recorded, observed.model).record, source, values.shape[1])
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
            with ablate(layer, channels[start:stop]):
                return target_scores(compute_logits(self.model, rows, part.read, self.autocast), part, "logit")

        return torch.cat(pass_size.run_chunks(compute, len(channels))).reshape(count, len(images), -1)


FeatureLayer = tuple[nn.Module, tuple[int, int]]
"""A module that returns the features, and the axes of the batch and of the channels in its output."""


def ablate(layer: FeatureLayer, channels: Tensor) -> AbstractContextManager[None]:
    """Return a context in which this thread's passes have one channel of each row ``[rows]`` set to zero."""
    module, (batch_axis, channel_axis) = layer

    def hook(module: nn.Module, output: Tensor) -> Tensor:
        shape = [1] * output.ndim
        shape[batch_axis], shape[channel_axis] = len(channels), output.shape[channel_axis]
        ablated = nn.functional.one_hot(channels, shape[channel_axis]).bool()  # [rows, D]
        return output.masked_fill(ablated.view(shape), 0)

    return hook_outputs([module], hook)


def find_feature_layer(outputs: list[tuple[nn.Module, Tensor]], source: Tensor, channels: int) -> FeatureLayer:
    """Return the last module that returned this tensor, or a view of it; outputs of others may be changed in place."""
    channel_axis = next(axis for axis in (1, 2) if source.shape[axis] == channels)
    sides = [(source.shape[axis], source.stride(axis)) for axis in (0, channel_axis)]
    for module, output in reversed(outputs):
        axes = list(zip(output.shape, output.stride(), strict=True))
        if output.data_ptr() == source.data_ptr() and output.numel() == source.numel() and set(sides) <= set(axes):
            return module, (axes.index(sides[0]), axes.index(sides[1]))
    raise UnsupportedOperator(
        "no module of this model returns the features, so their channels cannot be set to zero; use scorecam, which "
        "masks the image instead"
    )
