"""Greedy order of patches by the score itself: an upper reference for deletion and insertion."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dave_vit._internal.schema import check_choice
from dave_vit.engine.targets import Target
from dave_vit.methods.base import METHODS, MethodInfo, check_at_least_one
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.masking import MaskingMethod, Squares, to_explanation
from dave_vit.methods.pass_size import PassSize

Goal = Literal["deletion", "insertion"]


@METHODS.register("greedy")
class Greedy(MaskingMethod):
    """The order in which patches are hidden if every round hides those that lower the score least.

    It optimises what the metric measures, so it shows how high deletion or insertion can get and explains nothing
    beyond that. Values are positions in the order, from 0 to 1; the patch that is hidden last has the highest.

    Args:
        model: any module that maps inputs to logits.
        rounds: each round tries every remaining patch alone, and hides an equal share of all patches.
        goal: "deletion" hides patches of the whole image; "insertion" shows patches, the best first.
        patch: side of the squares in pixels; the model's own patches, or a 14th of the image where these are tiny.
        options: ``baseline``, ``score``, ``chunk`` and ``autocast``, as for every `MaskingMethod`.
    """

    info = MethodInfo(
        "Order in which patches can go at the least cost of probability: an upper reference of deletion.",
        "reference",
        "1 + P (R + 1) / 2 forward, of P patches in R rounds",
        resolution="patch",
    )

    def __init__(
        self, model: nn.Module, rounds: int = 14, goal: Goal = "deletion", patch: int | None = None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.rounds = check_at_least_one("rounds", rounds)
        self.patch = check_at_least_one("patch", patch)
        self.goal: Goal = check_choice("goal", goal, get_args(Goal))

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        squares = Squares.of(self.model, images, self.patch)
        target = self._resolve_target(images, target, pass_size)
        places = [self._places(images, single, pass_size, squares) for single in target.split_classes()]  # K of [b, P]
        return to_explanation(squares.masks(torch.stack(places, 1)), images, target)

    def _places(self, images: Tensor, target: Target, pass_size: PassSize, squares: Squares) -> Tensor:
        """Return how late each square is hidden, or how early it is shown: ``[b, P]``, up to 1."""
        count, deleting = squares.count, self.goal == "deletion"
        left = torch.arange(count, device=images.device).expand(len(images), count)  # of each image, [b, left]
        shown = images.new_full((len(images), count), float(deleting))
        places = torch.zeros_like(shown)
        for part in torch.arange(count).tensor_split(min(self.rounds, count)):
            scores = self._score_flips(images, target, pass_size, squares, shown, left)  # [b, left]
            order = left.gather(1, scores.sort(dim=1, descending=True, stable=True).indices)
            chosen, left = order[:, : len(part)], order[:, len(part) :].sort(1).values
            shown = shown.scatter(1, chosen, float(not deleting))
            value = (part + 1) / count if deleting else 1 - part / count
            places = places.scatter(1, chosen, value.to(places).expand_as(chosen))
        return places

    def _score_flips(
        self, images: Tensor, target: Target, pass_size: PassSize, squares: Squares, shown: Tensor, left: Tensor
    ) -> Tensor:
        """Return the score with each of the remaining squares flipped alone: ``[b, left]``."""

        def masks(start: int, stop: int) -> Tensor:
            turned = shown.expand(stop - start, *shown.shape)  # [n, b, P]
            each = left[:, start:stop].T.unsqueeze(2)  # [n, b, 1]
            return squares.masks(turned.scatter(2, each, 1 - turned.gather(2, each)))

        parts = self._score_under_masks(images, target, pass_size, masks, left.shape[1])
        return torch.cat([scores[..., 0] for _, scores in parts]).T
