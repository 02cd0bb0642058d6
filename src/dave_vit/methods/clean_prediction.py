"""The prediction on the clean images, with which the predictions on their views are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.targets import Opponents, Target
from dave_vit.models.traits import do_classes_compete


@dataclass(frozen=True)
class CleanPrediction:
    """Prediction on each clean image.

    Attributes:
        predicted: the likeliest class, ``[b]``.
        compete: whether the classes compete, ``[b]``; else each logit stands for itself.
        probability: of the predicted class, ``[b]``.
    """

    predicted: Tensor
    compete: Tensor
    probability: Tensor

    @classmethod
    def of(cls, model: nn.Module, logits: Tensor) -> CleanPrediction:
        """Compute it from the logits of the clean images ``[b, classes]``."""
        predicted, compete = logits.argmax(1), do_classes_compete(model, logits)
        probability = probabilities(logits.unsqueeze(0), predicted.unsqueeze(1), compete)[0, :, 0]
        return cls(predicted, compete, probability)

    def select(self, images: Tensor) -> CleanPrediction:
        """Select images by index."""
        return CleanPrediction(
            *(part[images.to(part.device)] for part in (self.predicted, self.compete, self.probability))
        )

    def contrast(self, target: Target, logits: Tensor) -> Target:
        """Contrast the target with its rivals in those images whose classes compete, and resolve it."""
        against: Opponents = tuple("rivals" if compete else None for compete in self.compete.tolist())
        return replace(target, against=against).resolve(logits)

    def survival(self, logits: Tensor) -> Tensor:
        """Return how much of the predicted class's probability is left on views ``[n, b, classes]``: ``[n, b]``."""
        left = probabilities(logits, self.predicted.unsqueeze(1), self.compete)[..., 0]
        return left / self.probability.clamp(min=torch.finfo(left.dtype).tiny)

    def weights(self, logits: Tensor, target: Target) -> Tensor:
        """Return how much each view counts: the probability of the explained classes on it, ``[n, b * K]``."""
        return probabilities(logits, target.class_indices, self.compete).flatten(1)


def probabilities(logits: Tensor, columns: Tensor, compete: Tensor) -> Tensor:
    """Compute probabilities of classes ``[b, K]`` from logits ``[n, b, classes]``: ``[n, b, K]``.

    Softmax where classes compete, sigmoid where they do not.
    """
    wide = logits.to(precise_dtype(logits.device))
    picked = columns.expand(len(logits), *columns.shape)
    shared, alone = wide.softmax(2).gather(2, picked), wide.gather(2, picked).sigmoid()
    return torch.where(compete[:, None], shared, alone)
