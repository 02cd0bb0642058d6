"""Tests of evidence on the model: the evidence region of an image is moved to other images, and removed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import masks_to_boxes

from dave_vit._internal.precision import precise_dtype
from dave_vit.errors import import_optional
from dave_vit.methods.pass_size import PassSize, clean_logits

Floats = npt.NDArray[np.float64]
Span = tuple[slice, slice]

REGION_SHARE = 0.9  # of the evidence that a region holds before it is widened
_OBJECT_MARGIN = 16  # an object's box is widened by the side over this, so that shadows belong to it
_REGION_MARGIN = 13  # a region likewise, so that a tint or a pattern is moved without gaps
_REPEATS = 4  # images that a region is moved to
_ROWS = 32  # rows of a pass
REFERENCE = 3  # one of so many classes is compared with
_LEAST = 1e-6  # probabilities below count as this one


@dataclass(frozen=True)
class Others:
    """Images that regions are moved to and from, ``[m, C, H, W]``, and their classes, ``[m]``."""

    images: Tensor
    targets: npt.NDArray[np.int64]

    def draw(self, targets: npt.NDArray[np.int64], draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draw two images for each target, which are of other classes: ``[n, C, H, W]`` each."""
        own = [draw.choice(np.flatnonzero(self.targets != target), 2, replace=False) for target in targets]
        first, second = (torch.from_numpy(column) for column in np.stack(own).T)
        return self.images[first], self.images[second]


def find_boxes(objects: Tensor) -> Tensor:
    """Return the boxes around objects, with a margin: ``[n, H, W]``.

    Boxes and not outlines are left out of tests, because the outline of what is left out would show the object.
    """
    return _widen(objects.any(2)[:, :, None] & objects.any(1)[:, None, :], min(objects.shape[1:]) // _OBJECT_MARGIN)


def find_regions(cells: Tensor, objects: Tensor) -> Tensor:
    """Return regions that hold most of the evidence outside of the boxes around objects: ``[n, H, W]``.

    Args:
        cells: evidence ``[n, h, w]``, 0 or above.
        objects: True at objects, ``[n, H, W]``; all False where they are unknown.
    """
    side, boxes = min(objects.shape[1:]), find_boxes(objects)
    evidence = F.interpolate(cells[:, None], objects.shape[1:], mode="nearest")[:, 0].masked_fill(boxes, 0)
    ordered, places = evidence.flatten(1).sort(1, descending=True)
    reached = ordered.cumsum(1) - ordered  # evidence of all larger pixels
    keep = (reached < REGION_SHARE * ordered.sum(1, keepdim=True)) & (ordered > 0)
    regions = torch.zeros_like(keep).scatter(1, places, keep).view_as(objects)
    return _widen(regions, side // _REGION_MARGIN) & ~boxes


def _widen(masks: Tensor, by: int) -> Tensor:
    """Widen masks ``[n, H, W]`` by some pixels."""
    return F.max_pool2d(masks.float()[:, None], 2 * by + 1, 1, by)[:, 0] > 0


def find_spans(objects: Tensor) -> list[Span]:
    """Return rows and columns of the box around each object ``[n, H, W]``, with a margin."""
    corners = masks_to_boxes(find_boxes(objects)).int().tolist()
    return [(slice(top, bottom + 1), slice(left, right + 1)) for left, top, right, bottom in corners]


def measure_scenes(
    model: nn.Module, objects: Sequence[Tensor], scenes: Tensor, spans: Sequence[Span], target: int
) -> Floats:
    """Measure log odds of a class with objects put into scenes in the place of the scenes' own: ``[objects, n]``.

    Args:
        model: maps inputs to logits.
        objects: pictures of objects of the class, ``[C, h, w]`` each.
        scenes: ``[n, C, H, W]``.
        spans: rows and columns of the scenes' own objects.
        target: the class.
    """
    values = []
    for crop in objects:
        filled = scenes.clone()
        for image, (rows, columns) in zip(filled, spans, strict=True):
            place = image[:, rows, columns]
            place.copy_(F.interpolate(crop[None], place.shape[1:], mode="bilinear", antialias=True)[0])
        values.append(_log_odds(_all_probabilities(model, filled)[:, target]))
    return np.asarray(torch.stack(values).double().numpy())


def choose_reference(values: Sequence[Floats]) -> Floats:
    """Return the values of the third of the classes that has the highest ones.

    A class with a shortcut of its own speaks against every other class, so that a class without one would seem to gain.
    Half of a class's values decides whether the other half is used, so that the choice adds no bias.
    """
    count = -(-len(values) // REFERENCE)
    chosen = []
    for half in (0, 1):
        order = np.argsort([-own[1 - half :: 2].mean() for own in values], kind="stable")[:count]
        chosen += [values[index][half::2] for index in order]
    return np.concatenate(chosen)


def measure_gains(
    model: nn.Module, images: Tensor, regions: Tensor, targets: npt.NDArray[np.int64], others: Others, seed: int
) -> Floats:
    """Measure what regions bring to images of other classes, ``[n]``.

    A gain is the log odds of the class in another image with the region of the image, minus those with the same region
    of an image of yet another class, in the mean over some images.

    Args:
        model: maps inputs to logits.
        images: ``[n, C, H, W]``.
        regions: True at their evidence, ``[n, H, W]``.
        targets: classes whose evidence this is, ``[n]``.
        others: at least two of them are of another class than each target.
        seed: seed of the choice among the others.
    """
    generator, inside = np.random.default_rng(seed), regions[:, None].to(images.device)
    gains = []
    for _ in range(_REPEATS):
        receivers, donors = others.draw(targets, generator)
        filled = (torch.where(inside, part, receivers) for part in (images, donors))
        moved, control = (_probabilities(model, one, targets)[0] for one in filled)
        gains.append(_log_odds(moved) - _log_odds(control))
    return np.asarray(torch.stack(gains).mean(0).double().numpy())


def measure_removal(
    model: nn.Module, images: Tensor, regions: Tensor, targets: npt.NDArray[np.int64], others: Others, seed: int
) -> tuple[Floats, Floats, Floats]:
    """Measure what is lost without the regions; arguments are those of `measure_gains`.

    Returns:
        The probability of the class in each image, the same with the region replaced by that of images of other
        classes, and whether the prediction is then still the class, ``[n]`` each.
    """
    donors, _ = others.draw(targets, np.random.default_rng(seed))
    inside = regions[:, None].to(images.device)
    before, _ = _probabilities(model, images, targets)
    after, kept = _probabilities(model, torch.where(inside, donors, images), targets)
    return before.double().numpy(), after.double().numpy(), kept.double().numpy()


def _probabilities(model: nn.Module, images: Tensor, targets: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return the softmax probability of each image's class, ``[n]``, and whether it is the prediction."""
    every, columns = _all_probabilities(model, images), torch.from_numpy(targets)
    return every.gather(1, columns[:, None])[:, 0], every.argmax(1) == columns


def _all_probabilities(model: nn.Module, images: Tensor) -> Tensor:
    """Return softmax probabilities, ``[n, classes]``, on the CPU."""
    return clean_logits(model, images, PassSize(_ROWS)).to(precise_dtype(images.device)).softmax(1).cpu()


def _log_odds(probability: Tensor) -> Tensor:
    return probability.clamp(_LEAST, 1 - _LEAST).logit()


def compare_gains(own: Floats, controls: Floats) -> tuple[tuple[float, float, float], float]:
    """Compare the gains of images with those of controls by Welch's t test; only more than theirs is an effect.

    Returns:
        The mean gain of images minus that of controls with its 95 % interval, and the p-value of no difference.
    """
    ttest_ind = import_optional("scipy.stats", extra="eval").ttest_ind
    if np.ptp(own) == 0 and np.ptp(controls) == 0:
        difference = float(own[0] - controls[0])
        return (difference, difference, difference), 0.0 if difference > 0 else 1.0
    interval = ttest_ind(own, controls, equal_var=False).confidence_interval()
    p_value = ttest_ind(own, controls, equal_var=False, alternative="greater").pvalue
    return (float(own.mean() - controls.mean()), float(interval.low), float(interval.high)), float(p_value)


def correct_p_values(values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm, 1979)."""
    order = np.argsort(values, kind="stable")
    scaled = np.arange(len(values), 0, -1) * np.asarray(values)[order]
    return np.maximum.accumulate(scaled.clip(max=1.0))[np.argsort(order)].tolist()  # type: ignore[no-any-return]
