"""ViT-CX: masks from clusters of the model's own features, weighted by their causal effect on the score."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn

from dave_vit._internal.schema import check_choice
from dave_vit.engine.observation import observe
from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError, require_extra
from dave_vit.methods.base import METHODS, Method, MethodInfo
from dave_vit.methods.bias_placement import scale_to_unit, upsample
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.gradcam import features
from dave_vit.methods.masking import Score, score_rows, target_scores, to_explanation
from dave_vit.methods.pass_size import PassSize
from dave_vit.neighborhood.draws import normal_samples


@METHODS.register("vit_cx")
class ViTCX(Method):
    """Clusters of feature maps used as masks, weighted by the score under them and divided by coverage.

    The features are those of ``gradcam``. Each channel, enlarged to the image and scaled from 0 to 1, is a mask; masks
    that point in nearly the same direction are added up. Hidden pixels get noise, and the effect of the noise alone is
    subtracted from the score.

    Args:
        model: any module that maps inputs to logits.
        seed: of the noise: the same for every image, batch and chunk.
        distance: masks are joined as long as no two of a cluster are farther apart than this in cosine distance.
        noise: standard deviation, in units of the preprocessed image.
        score: the class's "probability", as published, or its "logit"; other targets are their own number.
        options: ``chunk`` (masked images in one forward pass) and ``autocast``.
    """

    info = MethodInfo(
        "Clusters of the last block's feature maps, weighted by the class's probability under them.",
        "Xie et al., IJCAI 2023",
        "1 + 2 N forward, N being the clusters",
        resolution="patch",
    )
    _why_no_clips = "hides places of one image"
    _kept = "attention"

    def __init__(
        self,
        model: nn.Module,
        seed: int = 0,
        distance: float = 0.1,
        noise: float = 0.1,
        *,
        score: Score = "probability",
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        if distance < 0 or noise < 0:
            raise OptionError(f"distance is {distance} and noise is {noise}; give numbers of at least 0")
        self.seed, self.distance, self.noise = seed, distance, noise
        self.score: Score = check_choice("score", score, get_args(Score))

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
        parts = []
        start = 0
        while start < len(masks):
            some = masks[start : start + max(1, pass_size.rows // 2)][:, None, None]  # [n, 1, 1, H, W]
            noise = self._noise(image, start, len(some)) * (1 - some)
            rows = torch.cat([image * some + noise, image + noise])  # [2 n, 1, C, H, W]
            masked, noisy = score_rows(self, rows, target, pass_size, self.score)[:, 0].chunk(2)
            parts.append(masked - noisy)
            start += len(some)
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
