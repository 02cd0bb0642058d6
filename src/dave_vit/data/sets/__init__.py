"""Data sets: one file each, which registers itself in `DATASETS`; all files of this folder are imported."""

from collections import Counter
from collections.abc import Callable

from dave_vit._internal.registry import Registry, import_all
from dave_vit.data.base import Dataset, FileDataset
from dave_vit.errors import DataError, OptionError

DATASETS: Registry[Callable[[str, int | None], Dataset]] = Registry("kind of data")
"""Each takes what follows the colon of a spec, and the largest number of images to use.

The first line of its docstring and its attribute `form`, if it has one, are shown as help.
"""


def dataset_forms() -> dict[str, str]:
    """Return the summary of all data sets by the form of their specs, for help texts."""
    summaries = DATASETS.summaries()
    return {str(getattr(entry, "form", f"{name}:DIR")): summaries[name] for name, entry in DATASETS.items()}


def open_dataset(spec: str, limit: int | None = None) -> Dataset:
    """Open a data set by its spec.

    Args:
        spec: "builtin" (also "builtin:pair", "builtin:plain", "builtin:single:unseen", and with a seed for other
            images "builtin:single:seen:7"), "imagenet:DIR", "folder:DIR", "coco:DIR" or "voc:DIR".
        limit: use at most this many images, the first ones.

    Example:
        >>> data = open_dataset("imagenet:ILSVRC", limit=1000)
        >>> data[0].label, data[0].boxes, data.image(0)
    """
    kind, _, rest = spec.partition(":")
    open_kind = DATASETS[kind]
    if limit is not None and limit < 1:
        raise OptionError(f"limit {limit}; expected 1 or more images")
    data = open_kind(rest, limit)
    if not len(data):
        raise DataError(f"{spec}: no images")
    if isinstance(data, FileDataset):
        _check_unique_names(spec, data)
    return data


def _check_unique_names(spec: str, data: FileDataset) -> None:
    """Raise DataError where two images share a name: results are stored by the names of images."""
    names = Counter(item.name for item in data.items)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        raise DataError(f"{spec}: {names[repeated[0]]} images are called {repeated[0]!r}; give each a name of its own")


import_all(__name__)
