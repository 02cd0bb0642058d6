"""Feature maps weighted by scores instead of gradients: Score-CAM, Ablation-CAM, ViT-CX."""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
from torch import Tensor, nn

from dave_vit._internal.schema import NonNegative
from dave_vit.engine.forward import compute_logits
from dave_vit.engine.observation import Observation, observe
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator, require_extra
from dave_vit.methods.base import METHODS, Method, MethodInfo
from dave_vit.methods.cams import ActivationMap, features
from dave_vit.methods.constants import scale_to_unit, upsample
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.masking import Score, score_rows, score_under_masks, target_scores, to_explanation
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import Recorded, record_outputs
from dave_vit.neighborhood.draws import normal_samples


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

    def _sums(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        source, to_grid = features(observed, images)
        values = to_grid(source.detach()).to(images.dtype)  # [b, D, h, w]

        def masks(start: int, stop: int) -> Tensor:
            return scale_to_unit(upsample(values[:, start:stop], images.shape[-2:])).transpose(0, 1)  # [n, b, H, W]

        parts = score_under_masks(self, images, target, pass_size, masks, values.shape[1])
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

    def _subject(self, target: Target) -> nn.Module:
        return Recorded(self.model, record_outputs)

    def _sums(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
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


def ablate(layer: FeatureLayer, channels: Tensor) -> torch.utils.hooks.RemovableHandle:
    """Return a context in which this thread's passes have one channel of each row ``[rows]`` set to zero."""
    (module, (batch_axis, channel_axis)), thread = layer, threading.get_ident()

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if threading.get_ident() != thread:
            return output
        shape = [1] * output.ndim
        shape[batch_axis], shape[channel_axis] = len(channels), output.shape[channel_axis]
        ablated = nn.functional.one_hot(channels, shape[channel_axis]).bool()  # [rows, D]
        return output.masked_fill(ablated.view(shape), 0)

    return module.register_forward_hook(hook)


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


@METHODS.register("vit_cx")
class ViTCX(Method):
    """Clusters of the last block's feature maps, weighted by the class's probability under them.

    Clusters of feature maps used as masks, weighted by the score under them and divided by coverage. The features are
    those of ``gradcam``. Each channel, enlarged to the image and scaled from 0 to 1, is a mask; masks that point in
    nearly the same direction are added up. Hidden pixels get noise, and the effect of the noise alone is subtracted
    from the score.

    Args:
        model: any module that maps inputs to logits.
        seed: of the noise: the same for every image, batch and chunk.
        distance: masks are joined as long as no two of a cluster are farther apart than this in cosine distance.
        noise: standard deviation, in units of the preprocessed image.
        score: the class's "probability", as published, or its "logit"; other targets are their own number.
        options: ``chunk`` (masked images in one forward pass) and ``autocast``.
    """

    info = MethodInfo(paper="Xie et al., IJCAI 2023", passes="1 + 2 N forward, N being the clusters")
    _why_no_clips = "hides places of one image"
    _kept, _resolution = "attention", "patch"
    seed: int = 0
    distance: NonNegative = 0.1
    noise: NonNegative = 0.1
    score: Score = "probability"

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        with observe(self.model, images, autocast=self.autocast, read=target.read) as observed:
            target = target.resolve(observed.logits)
            clean = target_scores(observed.logits.detach(), target, self.score)  # [b, K]
            source, to_grid = features(observed, images)
            values = to_grid(source.detach()).to(images.dtype)  # [b, D, h, w]
        maps = []
        for index, channels in enumerate(values):
            image = images[index : index + 1]
            channel_masks = scale_to_unit(upsample(channels[None], images.shape[-2:]))[0]  # [D, H, W]
            masks = cluster_masks(channel_masks, self.distance)  # [N, H, W]
            effects = clean[index] + self._effects(image, target.part(index, index + 1), masks, pass_size)  # [N, K]
            # Divided by the coverage, so that pixels under many masks count no more.
            shares = masks / masks.sum(0).clamp(min=torch.finfo(masks.dtype).tiny)
            maps.append(torch.einsum("nk,nhw->khw", effects.to(shares.dtype), shares) / len(masks))
        return to_explanation(torch.stack(maps), images, target)

    def _effects(self, image: Tensor, target: Target, masks: Tensor, pass_size: PassSize) -> Tensor:
        """Return how much each mask ``[N, H, W]`` changes the score beyond the effect of its noise: ``[N, K]``."""
        parts, size = [], max(1, pass_size.rows // 2)
        for start in range(0, len(masks), size):
            some = masks[start : start + size][:, None, None]  # [n, 1, 1, H, W]
            noise = self._noise(image, start, len(some)) * (1 - some)
            rows = torch.cat([image * some + noise, image + noise])  # [2 n, 1, C, H, W]
            masked, noisy = score_rows(self, rows, target, pass_size, self.score)[:, 0].chunk(2)
            parts.append(masked - noisy)
        return torch.cat(parts)

    def _noise(self, image: Tensor, start: int, count: int) -> Tensor:
        eps = normal_samples(self.seed, image.shape, start, start + count)
        return self.noise * eps.to(image.device, image.dtype)  # [n, 1, C, H, W]


def cluster_masks(masks: Tensor, distance: float) -> Tensor:
    """Merge masks ``[D, H, W]`` by complete linkage, scaled from 0 to 1: ``[N, H, W]``, by their first member."""
    flat = torch.nn.functional.normalize(masks.flatten(1), dim=1)
    apart = (1 - flat @ flat.T).cpu().double()
    labels = torch.tensor(_cluster_labels(apart, distance))
    first = sorted(set(labels.tolist()), key=labels.tolist().index)
    members = (labels == torch.tensor(first)[:, None]).to(masks.device, masks.dtype)  # [N, D]
    return scale_to_unit(torch.einsum("nd,dhw->nhw", members, masks))


def _cluster_labels(apart: Tensor, distance: float) -> Any:
    """Return the cluster of each point from their distances ``[D, D]``."""
    with require_extra("scipy", "eval"):
        from scipy.cluster.hierarchy import fcluster, linkage  # type: ignore[import-untyped]
    if len(apart) < 2:
        return [1] * len(apart)
    above = apart[*torch.triu_indices(len(apart), len(apart), 1)].clamp(min=0)
    return fcluster(linkage(above.numpy(), "complete"), distance, "distance")
