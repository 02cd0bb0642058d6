"""Data sets: one file each, which registers itself here; all files of this folder are found by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dave_vit._internal.registry import Registry, import_all
from dave_vit.data.base import Dataset, FileDataset
from dave_vit.errors import DataError, OptionError

DATASETS: Registry[Callable[[str, int | None], Dataset]] = Registry("kind of data")
"""Each takes what follows the colon of a spec, and how many images to use at most."""


def open_dataset(spec: str, limit: int | None = None) -> Dataset:
    """A data set by its spec.

    Args:
        spec: "builtin" (also "builtin:pair", "builtin:plain", "builtin:single:unseen", and with a seed for fresh
            pictures "builtin:single:seen:7"), "imagenet:DIR", "folder:DIR", "coco:DIR" or "voc:DIR".
        limit: use the first so many images.

    Example:
        >>> data = open_dataset("imagenet:ILSVRC", limit=1000)
        >>> data[0].label, data[0].boxes, data.image(0)
    """
    kind, _, rest = spec.partition(":")
    make = DATASETS[kind]
    if limit is not None and limit < 1:
        raise OptionError(f"limit {limit}; expected 1 or more images")
    data = make(rest, limit)
    if not len(data):
        raise DataError(f"{spec}: no images")
    if isinstance(data, FileDataset):
        _check_names(spec, data)
    return data


def _check_names(spec: str, data: FileDataset) -> None:
    """Results go by the names of images."""
    names = Counter(item.name for item in data.items)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise DataError(f"{spec}: {names[twice[0]]} images are called {twice[0]!r}; give each a name of its own")


import_all(__name__)
