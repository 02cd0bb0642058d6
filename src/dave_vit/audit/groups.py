"""Groups of images that are tested together, their clusters by the features of their evidence, and names of places."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dave_vit.audit.findings import AuditOptions
from dave_vit.errors import DataError
from dave_vit.evaluate.scoring import ImageEvidence

Floats = npt.NDArray[np.float64]

_CORNER, _BORDER = 3, 10  # a corner is a third of the side, a border a tenth
_DENSE = 2.0  # times the mean density from which on evidence belongs to a place


def name_place(evidence: Floats) -> str:
    """Return where evidence ``[h, w]`` lies: a corner, the border, the centre, or "spread out"."""
    total = evidence.sum()
    if total <= 0:
        return "nowhere"
    shares = {name: (float(evidence[mask].sum() / total), mask.mean()) for name, mask in _places(*evidence.shape)}
    dense = {name: share for name, (share, area) in shares.items() if share >= _DENSE * area}
    return max(dense, key=lambda name: dense[name]) if dense else "spread out"


def _places(height: int, width: int) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    """Return names of places and their masks ``[h, w]``."""
    y, x = np.mgrid[:height, :width]
    top, left = y < height / _CORNER, x < width / _CORNER
    bottom, right = y >= height - height / _CORNER, x >= width - width / _CORNER
    edge_y, edge_x = max(1, round(height / _BORDER)), max(1, round(width / _BORDER))
    return [
        ("upper left corner", top & left),
        ("upper right corner", top & right),
        ("lower left corner", bottom & left),
        ("lower right corner", bottom & right),
        ("border", (y < edge_y) | (y >= height - edge_y) | (x < edge_x) | (x >= width - edge_x)),
        ("centre", ~(top | bottom | left | right)),
    ]


Labels = npt.NDArray[np.int64]

_DIMENSIONS = 16  # principal components that are compared
_MOST = 4  # clusters of a class
_LEAST_SILHOUETTE = 0.15  # below it the images are one cluster
_RESTARTS, _ITERATIONS = 8, 50


def cluster_images(features: npt.NDArray[np.float32], smallest: int, seed: int = 0) -> Labels:
    """Return the cluster of each image, ``[n]``, the largest cluster first.

    Args:
        features: ``[n, D]``.
        smallest: images of a cluster at least; a partition with a smaller one is not used.
        seed: seed of the first centres.
    """
    points = _project(features.astype(np.float64))
    best, labels = _LEAST_SILHOUETTE, np.zeros(len(points), dtype=np.int64)
    for count in range(2, min(_MOST, len(points) // smallest) + 1):
        candidate = partition(points, count, np.random.default_rng(seed))
        quality = silhouette(points, candidate)
        if quality > best and np.bincount(candidate, minlength=count).min() >= smallest:
            best, labels = quality, candidate
    return np.argsort(np.argsort(-np.bincount(labels), kind="stable"))[labels]


def _project(features: Floats) -> Floats:
    """Return principal components of standardised features, ``[n, d]``."""
    centred = features - features.mean(0)
    centred /= centred.std(0).clip(1e-6)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    return np.asarray((left * values)[:, :_DIMENSIONS])


def partition(points: Floats, count: int, draw: np.random.Generator) -> Labels:
    """Partition points ``[n, d]`` by k-means; the best of some starts by k-means++."""
    return min((_partition_once(points, count, draw) for _ in range(_RESTARTS)), key=lambda run: run[1])[0]


def _partition_once(points: Floats, count: int, draw: np.random.Generator) -> tuple[Labels, float]:
    """Return clusters and the sum of squared distances from their centres."""
    centres = points[draw.integers(len(points))][None]
    while len(centres) < count:
        nearest = _squared_distances(points, centres).min(1) + 1e-12
        centres = np.concatenate([centres, points[draw.choice(len(points), p=nearest / nearest.sum())][None]])
    for _ in range(_ITERATIONS):
        labels = _squared_distances(points, centres).argmin(1)
        moved = np.stack([points[labels == k].mean(0) if (labels == k).any() else centres[k] for k in range(count)])
        if np.allclose(moved, centres):
            break
        centres = moved
    distances = _squared_distances(points, centres)
    return distances.argmin(1), float(distances.min(1).sum())


def _squared_distances(points: Floats, centres: Floats) -> Floats:
    return np.asarray(((points[:, None] - centres) ** 2).sum(2))


def silhouette(points: Floats, labels: Labels) -> float:
    """Return the mean silhouette (Rousseeuw, 1987), from -1 to 1; the higher, the better points are separated."""
    apart = np.sqrt(_squared_distances(points, points))
    members = np.stack([labels == k for k in range(labels.max() + 1)])  # [clusters, n]
    sums, sizes = apart @ members.T, members.sum(1)  # [n, clusters]
    own = members.T
    inside = (sums * own).sum(1) / (sizes[labels] - 1).clip(1)
    outside = np.where(own, np.inf, sums / sizes.clip(1)).min(1)
    values = np.where(sizes[labels] > 1, (outside - inside) / np.maximum(inside, outside), 0.0)
    return float(np.nan_to_num(values).mean())


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
