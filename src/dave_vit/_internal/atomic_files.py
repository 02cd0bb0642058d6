"""Files that are either whole or absent: written under another name first, then renamed.

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

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


@contextmanager
def replace_atomically(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A temporary name beside `path`, which takes its place where the block ends well and vanishes otherwise.

    An error of the disk, which knows no file where it comes from writing or syncing, gets the name of this one.

    Args:
        path: of the file.
        durable: whether it is on the disk when the block has ended, so that a machine that stops does not lose it.

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
            _sync(temporary, os.O_RDWR)
        os.replace(temporary, path)
        if durable:  # the folder holds the name, and the one above it that of a folder that was made for it
            for folder in (path.parent, *(one.parent for one in fresh)):
                _sync_folder(folder)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_files(contents: Mapping[Path, bytes], *, durable: bool = False) -> None:
    """Writes files that belong together: none is put in its place before all have been written, the first one last."""
    with ExitStack() as stack:
        for path, data in contents.items():
            stack.enter_context(replace_atomically(path, durable=durable)).write_bytes(data)


def write_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes one file."""
    write_files({path: data}, durable=durable)


def write_json(path: Path, data: Any) -> None:
    """Writes one JSON file."""
    write_bytes(path, json_bytes(data))


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Makes a rename last; on Windows, where folders cannot be opened, renames already do."""
    if os.name != "nt":
        _sync(folder, os.O_RDONLY)


def json_bytes(data: Any) -> bytes:
    """Indented JSON with a newline at its end."""
    return (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def npz_bytes(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """A compressed numpy archive."""
    import numpy as np

    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # numpy's stubs take the names for its own options
    return buffer.getvalue()


def png_bytes(image: Image) -> bytes:
    """A PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()
