"""Finer-CAM: class activation maps of what distinguishes a class from the classes most similar to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.observation import Observation
from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError
from dave_vit.methods.base import METHODS, MethodInfo, check_at_least_one
from dave_vit.methods.gradcam import ActivationMap, mean_slope, weigh_features
from dave_vit.methods.pass_size import PassSize


@METHODS.register("finercam")
class FinerCAM(ActivationMap):
    """Grad-CAM of the difference between the logit of the class and those of similar classes.

    Classes are similar if their logits are near to that of the class. As in the authors' code, the differences are
    averaged with the probabilities of the similar classes as weights. Contrasts and score functions say themselves what
    is compared: their maps are those of ``gradcam``.

    Args:
        model: any module that maps inputs to logits.
        references: how many similar classes the class is compared with.
        strength: factor of their logits; 0 is Grad-CAM.
        options: ``positive``, ``resolution``, ``chunk`` and ``autocast``, as for every `ActivationMap`.
    """

    info = MethodInfo(
        "Grad-CAM of the difference between a class and the classes most similar to it.",
        "Zhang et al., CVPR 2025",
        "1 forward, 1 backward",
        resolution="patch",
    )

    def __init__(self, model: nn.Module, *, references: int = 3, strength: float = 1.0, **options: Any) -> None:
        super().__init__(model, **options)
        if not 0 <= strength < float("inf"):
            raise OptionError(f"strength is {strength}; give a factor of at least 0, such as 1")
        self.references, self.strength = check_at_least_one("references", references), strength

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
