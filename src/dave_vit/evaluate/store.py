"""The folder of a run: files that are whole or absent, claims that die with their process, one plan for ever.

- ``plan.json``: what is computed, by content; ``versions.json``: with what code, libraries and weights
- ``scan/``: which class each image has for each model; ``grids/``: the grids of each model
- ``rows/*.parquet``: results, one file per shard; ``maps/*.npz``: maps, where they were asked for
- ``examples/``: maps of the pictures in the report
- ``summary.json``, ``report.md``, ``report.html``
"""

from __future__ import annotations

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
from dave_vit.errors import DataError, OptionError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# What file systems say that know no locks; two processes may then compute a shard twice, and still write it whole.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}

_DATA = "data was"  # by content, which another limit changes as well: said where nothing else is to be said


class DamagedFile(DataError):
    """A file of a run cannot be read.

    Args:
        path: of the file.
        reason: what reading it said.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: damaged ({reason})")
        self.path = path


class RunFolder:
    """A run's folder; any number of processes may use it at once.

    Args:
        path: made if absent.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def holds_plan(self) -> bool:
        """Whether a run was begun here."""
        return (self / "plan.json").exists()

    def prepare(self, document: Mapping[str, Any]) -> None:
        """Writes the plan, or refuses where the folder holds another one."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.claim("plan", wait=True):
            path = self / "plan.json"
            if not path.exists():
                if any(self.path.glob("rows/*.parquet")):
                    raise OptionError(f"{self.path}: rows without a plan.json; use another --out")
                self.write({"plan.json": json_bytes(document)})
                return
            try:
                held = json.loads(path.read_bytes())
            except ValueError as error:
                raise OptionError(f"{path}: damaged; use another --out, or delete the folder") from error
        changes = list(differences(held, document))
        if changes:
            said = [change for change in changes if not change.startswith(_DATA)] or changes
            what = "; ".join(said[:3]) + ("; ..." if len(said) > 3 else "")
            raise OptionError(f"{self.path} holds a run of another plan ({what}); use another --out, or delete it")

    def enter(self, made_with: Mapping[str, Mapping[str, str]], *, allow_mixed: bool = False) -> list[dict[str, Any]]:
        """Notes what the run goes on with, or refuses where that is not what it was begun with.

        Args:
            made_with: software and weights; models that are not named are not compared.
            allow_mixed: go on all the same.

        Returns:
            All that it was computed with so far, this included, the first one first.
        """
        with self.claim("plan", wait=True):
            path = self / "versions.json"
            try:
                held: list[dict[str, Any]] = json.loads(path.read_bytes()) if path.exists() else []
            except ValueError as error:
                raise OptionError(f"{path}: damaged; use another --out, or delete the folder") from error
            software, models = dict(made_with["software"]), dict(made_with["models"])
            if any(one["software"] == software and models.items() <= one["models"].items() for one in held):
                return held
            now = {"software": software, "models": {**(held[-1]["models"] if held else {}), **models}}
            if held and not allow_mixed:
                what = "; ".join(change.partition(".")[2] for change in list(differences(held[-1], now))[:3])
                how = "use another --out, install that version again, or go on with --allow-mixed"
                raise OptionError(f"{self.path} was computed with other versions ({what}); {how}")
            held.append(now)
            self.write({"versions.json": json_bytes(held)})
        return held

    def write(self, files: Mapping[str, bytes]) -> None:
        """Writes files in the order given, each whole or not at all, also if the machine stops."""
        for name, data in files.items():
            write_bytes(self / name, data, durable=True)

    def present(self, files: Iterable[str]) -> set[str]:
        """Those of some files that are there: one look at each folder, however many they are."""
        wanted = set(files)
        folders = {name.rpartition("/")[0] for name in wanted}
        return wanted & {f"{folder}/{name}" for folder in folders for name in _listed(self / folder)}

    @contextmanager
    def claim(self, key: str, *, wait: bool = False) -> Iterator[bool]:
        """Whether a piece of work is this process's own while the block runs; the claim ends with the process.

        Args:
            key: of the work; a file name.
            wait: until another process is done with it.
        """
        locks = self / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with open(locks / key, "wb") as file:
            mine = _lock(file.fileno(), wait=wait)
            yield mine
            if mine and not wait:  # the work is done and can be seen; whoever opened this file meanwhile looks again
                (locks / key).unlink(missing_ok=True)

    def set_aside(self, path: Path) -> Path:
        """Renames a file that is no use to what nobody looks for, so that it is made again and nothing is lost."""
        aside = path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):  # another process was quicker
            path.rename(aside)
        return aside

    def clear_remains(self, name: str) -> None:
        """Removes what a killed process left of a file; its key must be claimed."""
        path = self / name
        for part in path.parent.glob(f".{path.name}.*.part"):
            part.unlink(missing_ok=True)


def differences(held: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """The points in which two plans differ, in words."""
    if isinstance(held, dict) and isinstance(wanted, dict):
        for name in sorted(held.keys() | wanted.keys()):
            yield from differences(held.get(name), wanted.get(name), f"{where}.{name}" if where else name)
    elif isinstance(held, list) and isinstance(wanted, list) and len(held) == len(wanted):
        for number, (before, now) in enumerate(zip(held, wanted, strict=True), 1):
            yield from differences(before, now, f"{where} {number}")
    elif held != wanted:
        yield f"{where} was {_short(held)}, now {_short(wanted)}"


def _short(value: Any) -> str:
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


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
