"""From a data set to tensors, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dave_vit.data.base import Dataset, Item, Mask
from dave_vit.data.placement import Placements
from dave_vit.errors import DataError, DaveError, ImageError, first_line


@dataclass(frozen=True)
class Batch:
    """Preprocessed images.

    Attributes:
        indices: numbers of the images in the data set.
        items: what is known of each.
        inputs: [B,C,H,W].
        regions: [B,H,W], where the label's objects are; empty where the crop shows none or they are unknown.
        failures: (number, reason) of each image that could not be read; they are in none of the above.
    """

    indices: list[int]
    items: list[Item]
    inputs: Tensor
    regions: Tensor
    failures: list[tuple[int, str]]

    @property
    def labels(self) -> list[int | None]:
        """Class of each image in the data set, None where unknown."""
        return [item.label for item in self.items]

    def to(self, device: torch.device | str) -> Batch:
        """The same with its tensors on a device."""
        inputs, regions = self.inputs.to(device), self.regions.to(device)
        return Batch(self.indices, self.items, inputs, regions, self.failures)


@dataclass(frozen=True)
class _Read:
    """One image, preprocessed."""

    item: Item
    tensor: Tensor  # [C,H,W]
    region: Mask  # [H,W]


def load_batch(data: Dataset, indices: Sequence[int], placements: Placements, readers: Executor | None = None) -> Batch:
    """Reads and preprocesses some images; those that cannot be read are reported, never fatal.

    Args:
        data: the data set.
        indices: numbers of the images.
        placements: of the model's preprocessing.
        readers: threads that read several at once.
    """

    def load(index: int) -> _Read | ImageError | DataError:
        try:
            return _read(data, index, placements)
        except (ImageError, DataError) as error:
            return error

    loaded = list(zip(indices, (readers.map if readers else map)(load, indices), strict=True))
    good = [(index, one) for index, one in loaded if isinstance(one, _Read)]
    bad = [(index, str(one)) for index, one in loaded if not isinstance(one, _Read)]
    inputs = torch.stack([one.tensor for _, one in good]) if good else torch.empty(0)
    regions = np.stack([one.region for _, one in good]) if good else np.empty(0, dtype=np.bool_)
    items = [one.item for _, one in good]
    return Batch([index for index, _ in good], items, inputs, torch.from_numpy(regions), bad)


def iterate_batches(
    data: Dataset, placements: Placements, size: int = 32, indices: Sequence[int] | None = None
) -> Iterator[Batch]:
    """All images of a data set, or those numbered, in iterate_batches."""
    chosen = range(len(data)) if indices is None else indices
    for start in range(0, len(chosen), size):
        yield load_batch(data, chosen[start : start + size], placements)


def _read(data: Dataset, index: int, placements: Placements) -> _Read:
    item, picture, mask = data[index], data.image(index), data.mask(index)
    try:
        tensor = placements.preprocess(picture)
    except DaveError:
        raise
    except Exception as error:  # such as a side of one pixel, which a resize turns into none
        what = f"{item.name}: {picture.width} x {picture.height} pixels cannot be preprocessed"
        raise ImageError(f"{what} ({first_line(error)})") from error
    tensor = tensor.reshape(tensor.shape[-3:])
    if mask is None and not item.boxes:
        return _Read(item, tensor, np.zeros(tensor.shape[1:], dtype=np.bool_))
    if mask is not None and mask.shape != (picture.height, picture.width):
        found = f"{mask.shape[1]} x {mask.shape[0]}"
        raise DataError(f"{item.name}: mask of {found} pixels for a picture of {picture.width} x {picture.height}")
    placement = placements.of_size(*picture.size)
    return _Read(item, tensor, placement.mask(mask) if mask is not None else placement.boxes(item.boxes))
