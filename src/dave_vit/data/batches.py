"""Load batches of a data set as tensors, and those that are likely needed next in advance."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dave_vit.data.base import Dataset, Item, Mask
from dave_vit.data.geometry import GeometryCache
from dave_vit.errors import DataError, DaveError, ImageError, first_line

_READERS = 4  # threads that decode images


@dataclass(frozen=True)
class Batch:
    """Preprocessed images.

    Attributes:
        indices: of the images in the data set.
        items: their items.
        inputs: ``[B, C, H, W]``.
        regions: ``[B, H, W]``, True at the label's objects; all False where they are cropped away or unknown.
        failures: (index, reason) of each image that could not be read; it is in none of the above.
    """

    indices: list[int]
    items: list[Item]
    inputs: Tensor
    regions: Tensor
    failures: list[tuple[int, str]]

    @property
    def labels(self) -> list[int | None]:
        """Class of each image in the data set; None where unknown."""
        return [item.label for item in self.items]

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with its tensors on a device."""
        return replace(self, inputs=self.inputs.to(device), regions=self.regions.to(device))


_Sample = tuple[Item, Tensor, Mask]
"""One preprocessed image ``[C, H, W]`` with its region ``[H, W]``."""


def load_batch(
    data: Dataset, indices: Sequence[int], geometries: GeometryCache, readers: Executor | None = None
) -> Batch:
    """Read and preprocess images; those that cannot be read are reported in `failures`.

    Args:
        data: the data set.
        indices: of the images.
        geometries: of the model's preprocessing.
        readers: threads that read several images at once.
    """

    def load(index: int) -> _Sample | ImageError | DataError:
        try:
            return _load(data, index, geometries)
        except (ImageError, DataError) as error:
            return error

    results = list(zip(indices, (readers.map if readers else map)(load, indices), strict=True))
    samples = [(index, *result) for index, result in results if isinstance(result, tuple)]
    failures = [(index, str(result)) for index, result in results if isinstance(result, DaveError)]
    if not samples:
        return Batch([], [], torch.empty(0), torch.empty(0, dtype=torch.bool), failures)
    loaded, items, tensors, regions = zip(*samples, strict=True)
    return Batch(list(loaded), list(items), torch.stack(tensors), torch.from_numpy(np.stack(regions)), failures)


def _load(data: Dataset, index: int, geometries: GeometryCache) -> _Sample:
    item, image, mask = data[index], data.image(index), data.mask(index)
    try:
        tensor = geometries.preprocess(image)
    except DaveError:
        raise
    except Exception as error:  # such as a side of one pixel, which a resize turns into none
        problem = f"{item.name}: {image.width} x {image.height} pixels cannot be preprocessed"
        raise ImageError(f"{problem} ({first_line(error)})") from error
    tensor = tensor.reshape(tensor.shape[-3:])
    if mask is None and not item.boxes:
        return item, tensor, np.zeros(tensor.shape[1:], dtype=np.bool_)
    if mask is not None and mask.shape != (image.height, image.width):
        mask_size = f"{mask.shape[1]} x {mask.shape[0]}"
        raise DataError(f"{item.name}: mask of {mask_size} pixels for a picture of {image.width} x {image.height}")
    geometry = geometries.get(*image.size)
    region = geometry.mask_to_input(mask) if mask is not None else geometry.boxes_to_mask(item.boxes)
    return item, tensor, region


class BatchPrefetcher:
    """Reads images in threads; keeps those of one request and of the likely next one, never more.

    Args:
        data: the data set.
        size: images of a batch.
    """

    def __init__(self, data: Dataset, size: int) -> None:
        self.data, self.size = data, size
        self._readers = ThreadPoolExecutor(_READERS, "dave-reader")
        self._stacker = ThreadPoolExecutor(1, "dave-stacker")  # one: batches are read in turn, by all readers
        self._cache: dict[tuple[GeometryCache, tuple[int, ...]], list[Future[Batch]]] = {}

    def batches(
        self, images: tuple[int, ...], geometries: GeometryCache, following: tuple[int, ...] = ()
    ) -> Iterator[Batch]:
        """Yield batches of images, each as soon as it is read; those of the last call are still cached.

        An error in a thread is raised here, where its images are needed.

        Args:
            images: their indices; each is read once.
            geometries: geometry of the model's preprocessing.
            following: images of the likely next call, which are read meanwhile.
        """
        keys = [(geometries, images), *([(geometries, following)] if following else [])]
        for key in self._cache.keys() - set(keys):  # before others come
            for future in self._cache.pop(key):
                future.cancel()
        for key in keys:
            if key not in self._cache:
                self._cache[key] = self._submit(*key)
        for future in self._cache[geometries, images]:
            try:
                batch = future.result()
            except BaseException:
                self.clear()  # else the same error would come again, whatever has changed
                raise
            yield batch

    def clear(self) -> None:
        """Forget all images; an iteration still gets all of its own."""
        self._cache.clear()

    def close(self) -> None:
        """Stop the threads after the images that they are reading."""
        for pool in (self._stacker, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, geometries: GeometryCache, images: tuple[int, ...]) -> list[Future[Batch]]:
        indices = list(dict.fromkeys(images))
        parts = [indices[start : start + self.size] for start in range(0, len(indices), self.size)]
        return [self._stacker.submit(load_batch, self.data, part, geometries, self._readers) for part in parts]
