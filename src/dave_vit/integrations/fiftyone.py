"""Maps for FiftyOne and COCO: heatmaps of samples, and run-length masks.

Example:
    >>> add_heatmaps(dataset, model="timm:deit_tiny_patch16_224")
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.data.geometry import Geometry
from dave_vit.data.images import read_image
from dave_vit.engine.targets import TargetLike
from dave_vit.errors import InputError, import_optional
from dave_vit.explanations.api import AttributionPipeline
from dave_vit.methods import Explanation
from dave_vit.models.loading import find_preprocessing

SURE = 2.0  # standard errors from which on a pixel counts as significant


def add_heatmaps(
    samples: Iterable[Any],
    model: str | nn.Module = "builtin",
    target: TargetLike = None,
    *,
    field: str = "dave",
    processor: Any = None,
    **options: Any,
) -> None:
    """Explain samples of FiftyOne, and store each map in the frame of its whole photograph as a ``Heatmap``.

    Args:
        samples: a dataset or view, or any samples with ``filepath``.
        model: as for `dave_vit.explain`.
        target: as for every method.
        field: of the sample that gets the heatmap.
        processor: as for `dave_vit.explain`.
        options: ``method``, and options of the method.
    """
    fiftyone = import_optional("fiftyone")
    pipeline = AttributionPipeline(model, processor=processor, **options)
    preprocessing = find_preprocessing(pipeline.model, processor)
    if preprocessing is None:
        raise InputError("how this model preprocesses pictures is not known; give processor=")
    for sample in samples:
        picture = read_image(sample.filepath).image
        heatmap = pipeline.explain(picture, target).heatmap[0].cpu()
        placed = Geometry.measure(preprocessing, picture.size).to_photo(heatmap)
        sample[field] = fiftyone.Heatmap(map=placed.numpy(), range=[0, 1])
        sample.save()


def to_coco_masks(explanation: Explanation, threshold: float = 0.5) -> list[dict[str, Any]]:
    """Return a COCO mask (uncompressed RLE) for each map: where it is high and significant.

    Args:
        explanation: of images.
        threshold: of the heatmap. Where the method draws samples, pixels also differ from zero by two standard errors.
    """
    masks = explanation.mask(threshold)
    if explanation.certainty is not None:
        masks = masks & (explanation.certainty >= SURE)
    return [encode_mask(mask) for mask in masks.flatten(0, -3)]


def encode_mask(mask: Tensor) -> dict[str, Any]:
    """Encode a mask ``[H, W]`` as COCO's uncompressed RLE: lengths of runs down the columns, the first one of zeros."""
    values = mask.cpu().T.flatten()
    counts = torch.unique_consecutive(values, return_counts=True)[1].tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if bool(values[0]) else counts}
