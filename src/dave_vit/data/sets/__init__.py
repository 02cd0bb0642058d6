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
        name, count = Counter(item.name for item in data.items).most_common(1)[0]
        if count > 1:  # results are stored by the names of images
            raise DataError(f"{spec}: {count} images are called {name!r}; give each a name of its own")
    return data


import_all(__name__)
