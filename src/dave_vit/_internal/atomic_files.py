"""Atomic writes: files are written under a temporary name first, then renamed.

Whatever interrupts a write, an exception, Ctrl-C or a lost machine, the file keeps its old content or does not exist.
"""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dave_vit.errors import OptionError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


@contextmanager
def replace_atomically(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary name beside `path`; it replaces `path` if the block succeeds, and is deleted otherwise.

    An OSError from writing or syncing carries no file name; it gets the name of this file.

    Args:
        path: the file.
        durable: sync the file to the disk before returning, so that a crash of the machine does not lose it.

    Example:
        >>> with replace_atomically(folder / "rows.parquet") as temporary:
        ...     write_table(rows, temporary)
    """
    fresh = [folder for folder in path.parents if durable and not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield temporary
        if durable:
            _sync(temporary)
        os.replace(temporary, path)
        if durable:  # the folder holds the name, and the one above it that of a folder that was made for it
            for folder in (path.parent, *(one.parent for one in fresh)) if os.name != "nt" else ():
                _sync(folder)  # Windows cannot open folders, and needs not
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(folder: Path) -> None:
    """Raise OptionError where files cannot be written into a folder, which is created if absent."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise OptionError(f"{folder}: {existing} is a file; give a folder for the results")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OptionError(f"{folder}: {existing} is not writable; give another folder for the results")


def write_files(contents: Mapping[Path, bytes], *, durable: bool = False) -> None:
    """Write files that belong together: none is renamed before all have been written, the first one last."""
    with ExitStack() as stack:
        for path, data in contents.items():
            stack.enter_context(replace_atomically(path, durable=durable)).write_bytes(data)


def write_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write one file."""
    write_files({path: data}, durable=durable)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_bytes(data: Any) -> bytes:
    """Encode as indented JSON with a newline at the end."""
    return (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def npz_bytes(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Encode arrays as a compressed numpy archive."""
    import numpy as np

    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # numpy's stubs take the names for its own options
    return buffer.getvalue()


def image_bytes(image: Image, kind: str = "png", **options: Any) -> bytes:
    """Encode an image as a file; options are those of Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
