"""Clusters of images by the features of their evidence: k-means, with the number of clusters by silhouette."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
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
    order = np.argsort(-np.bincount(labels), kind="stable")
    return np.argsort(order)[labels]


def _project(features: Floats) -> Floats:
    """Return principal components of standardised features, ``[n, d]``."""
    centred = features - features.mean(0)
    centred /= centred.std(0).clip(1e-6)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    return np.asarray((left * values)[:, :_DIMENSIONS])


def partition(points: Floats, count: int, draw: np.random.Generator) -> Labels:
    """Partition points ``[n, d]`` by k-means; the best of some starts by k-means++."""
    runs = [_partition_once(points, count, draw) for _ in range(_RESTARTS)]
    return min(runs, key=lambda run: run[1])[0]


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
