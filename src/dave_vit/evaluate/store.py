"""The folder of a run: files that are complete or absent, locks that end with their process, one plan for ever.

- ``plan.json``: what is computed, by content; ``versions.json``: with what code, libraries and weights
- ``hashes.json``: hashes of files by size, time and inode, so that resuming reads no picture twice
- ``scan/``: predictions of each model; ``grids/``: the grids of each model
- ``rows/*.parquet``: results, one file per shard; ``maps/*.npz``: maps, if they are kept
- ``examples/``: maps of the images in the report
- ``summary.json``, ``report.md``, ``report.html``
"""

import errno
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dave_vit._internal.atomic_files import json_bytes, write_bytes
from dave_vit.errors import DataError, OptionError, first_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Errors of file systems without locks; two processes may then compute a shard twice, and still write it whole.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


class DamagedFile(DataError):
    """A file of a run cannot be read.

    Args:
        path: the file.
        reason: message of the reader.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: damaged ({reason})")
        self.path = path


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise `DamagedFile` if what is read inside fails, whatever the bytes of the file are."""
    try:
        yield
    except Exception as error:
        raise DamagedFile(path, first_line(error)) from error


class RunFolder:
    """A run's folder; any number of processes may use it at once.

    Args:
        path: created if absent.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def write_plan(self, document: Mapping[str, Any]) -> None:
        """Write the plan, or raise an error if the folder has another one."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.claim("plan", wait=True):
            stored = self._read_json("plan.json")
            if stored is None:
                if any(self.path.glob("rows/*.parquet")):
                    raise OptionError(f"{self.path}: rows without a plan.json; use another --out")
                self.write({"plan.json": json_bytes(document)})
                return
        changes = list(describe_differences(stored, document))
        # Another limit changes the content of the data as well: name the data only if nothing else differs.
        changes = [change for change in changes if not change.startswith("data was")] or changes
        if changes:
            what = "; ".join(changes[:3]) + ("; ..." if len(changes) > 3 else "")
            raise OptionError(f"{self.path} holds a run of another plan ({what}); use another --out, or delete it")

    def record_provenance(
        self, software: Mapping[str, str], weights: Mapping[str, str], *, allow_mixed: bool = False
    ) -> list[dict[str, Any]]:
        """Record what the run continues with, or raise an error if that is not what it was started with.

        Args:
            software: versions.
            weights: hashes by model; models that are not named are not compared.
            allow_mixed: continue with other versions.

        Returns:
            Everything that it was computed with so far, oldest first.
        """
        with self.claim("plan", wait=True):
            stored: list[dict[str, Any]] = self._read_json("versions.json") or []
            if any(one["software"] == software and weights.items() <= one["models"].items() for one in stored):
                return stored
            models = {**(stored[-1]["models"] if stored else {}), **weights}
            stored.append({"software": dict(software), "models": models})
            if len(stored) > 1 and not allow_mixed:
                what = "; ".join(describe_version_changes(*stored[-2:])[:3])
                how = "use another --out, install that version again, or continue with --allow-mixed"
                raise OptionError(f"{self.path} was computed with other versions ({what}); {how}")
            self.write({"versions.json": json_bytes(stored)})
        return stored

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files in the order given, each whole or not at all, also if the machine stops."""
        for name, data in files.items():
            write_bytes(self / name, data, durable=True)

    def find_existing(self, files: Iterable[str]) -> set[str]:
        """Return the files that exist; lists each folder once, however many files it has."""
        names, existing = set(files), set()
        for folder in {name.rpartition("/")[0] for name in names}:
            with suppress(FileNotFoundError):
                existing |= {f"{folder}/{name}" for name in os.listdir(self / folder)}
        return names & existing

    @contextmanager
    def claim(self, key: str, *, wait: bool = False) -> Iterator[bool]:
        """Lock work while the block runs and yield whether this process has it; the lock ends with the process.

        Args:
            key: name of the work; a file name.
            wait: wait until another process has released it.
        """
        locks = self / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with open(locks / key, "wb") as file:
            is_mine = _lock(file.fileno(), wait=wait)
            yield is_mine
            if is_mine and not wait:  # the work is done; a process that opened this file meanwhile sees the result
                (locks / key).unlink(missing_ok=True)

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged file, so that it is computed again and nothing is lost."""
        aside = path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):  # another process was quicker
            path.rename(aside)
        return aside

    def remove_partial_files(self, name: str) -> None:
        """Remove temporary files that a killed process left of a file; its key must be claimed."""
        path = self / name
        for part in path.parent.glob(f".{path.name}.*.part"):
            part.unlink(missing_ok=True)

    def _read_json(self, name: str) -> Any:
        """Return the content of a file, or None if there is none."""
        path = self / name
        try:
            return json.loads(path.read_bytes()) if path.exists() else None
        except ValueError as error:
            raise OptionError(f"{path}: damaged; use another --out, or delete the folder") from error


def describe_differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Describe each point in which two plans differ: "seeds 1 was 0, now 1"."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            joined = f"{where} {name}" if where.endswith(":") else f"{where}.{name}" if where else name
            yield from describe_differences(before.get(name), now.get(name), joined)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True), 1):
            yield from describe_differences(*pair, f"{where} {number}")
    elif before != now:
        yield f"{where} was {_shorten(before)}, now {_shorten(now)}"


def describe_version_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe how two entries of ``versions.json`` differ."""
    return [change.partition(".")[2] for change in describe_differences(before, now)]


def _shorten(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(one, dict) and "label" in one for one in value):
        value = [one["label"] for one in value]
    if value is None:
        return "not set"
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return f"content {value[:8]}"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _lock(descriptor: int, *, wait: bool) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
