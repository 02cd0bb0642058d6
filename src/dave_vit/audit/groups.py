"""Groups of images that are tested together, and the images that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dave_vit.audit.clusters import cluster_images
from dave_vit.audit.findings import AuditOptions
from dave_vit.errors import DataError
from dave_vit.evaluate.evidence import ImageEvidence

POOLED = -1
"""The class index of images whose classes have too few images to be audited on their own."""
_MAX_MEMBERS = 100  # images of a class that are tested
_MAX_POOLED = 256  # images of all small classes that are tested
Pair = tuple[int, int]
"""An image's index in the data set, and a class."""
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Images that are tested together.

    Attributes:
        class_index: their class, or `POOLED`.
        positions: of the images in the evidence.
        clusters: cluster of each image.
    """

    class_index: int
    positions: Positions
    clusters: npt.NDArray[np.int64]


def build_groups(evidence: ImageEvidence, options: AuditOptions) -> Iterator[Group]:
    """Yield a group for each class with enough images, and one for the images of all others."""
    classes, counts = np.unique(evidence.target, return_counts=True)
    large = classes[counts >= options.smallest].tolist()
    rest = int(counts[counts < options.smallest].sum())
    if len(classes) < 3 or (len(large) == 1 and rest < options.smallest):
        raise DataError(f"{options.data}: images of {len(classes)} classes; an audit compares a class with two others")
    names = np.where(np.isin(evidence.target, large), evidence.target, POOLED)
    maps = evidence.cells.reshape(len(evidence.cells), -1)
    features = evidence.features if options.cluster_by == "features" else maps
    for name in np.unique(names).tolist():
        draw = np.random.default_rng([options.seed, name + 1])
        most = _MAX_POOLED if name == POOLED else _MAX_MEMBERS
        positions = np.sort(draw.permutation(np.flatnonzero(names == name))[:most])
        if len(positions) >= options.smallest:
            yield Group(name, positions, cluster_images(features[positions], options.smallest, options.seed))
