"""One door to all data sets."""

from __future__ import annotations

from dave_vit.data.base import Dataset
from dave_vit.errors import DataError, OptionError, UnknownName
from dave_vit.registry import nearest

KINDS = ("builtin", "imagenet", "folder", "coco", "voc")


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
    if kind not in KINDS:
        hint = nearest(kind, list(KINDS)) or f"; known: {', '.join(KINDS)}"
        raise UnknownName(f"unknown kind of data {kind!r} in {spec!r}{hint}")
    if limit is not None and limit < 1:
        raise OptionError(f"limit {limit}; expected 1 or more images")
    if kind != "builtin" and not rest:
        raise OptionError(f"data {spec!r} names no folder; write {kind}:DIR")
    data = _builtin(rest, limit) if kind == "builtin" else _files(kind, rest, limit)
    if not len(data):
        raise DataError(f"{spec}: no images")
    return data


def _builtin(rest: str, limit: int | None) -> Dataset:
    from dave_vit.data.embedded import Embedded

    split, family, seed, *more = (*rest.split(":"), "", "")
    if any(more) or not (seed or "0").isdecimal():
        raise OptionError(f"data builtin:{rest}; expected builtin:SPLIT:FAMILY:SEED, such as builtin:single:seen:7")
    return Embedded(split or "single", family or "seen", limit, seed=int(seed or 0))


def _files(kind: str, folder: str, limit: int | None) -> Dataset:
    # Imported one by one, so that a data set of one kind does not wait for the others.
    if kind == "imagenet":
        from dave_vit.data.imagenet import ImageNet

        return ImageNet(folder, limit)
    if kind == "folder":
        from dave_vit.data.folder import Folder

        return Folder(folder, limit)
    if kind == "coco":
        from dave_vit.data.coco import Coco

        return Coco(folder, limit)
    from dave_vit.data.voc import Voc

    return Voc(folder, limit)
