"""File names of results: no file of anybody else is overwritten."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dave_vit._internal.atomic_files import check_folder, json_bytes, write_files
from dave_vit.data.images import LoadedImage
from dave_vit.errors import escape_unprintable

_MOST_BYTES = 120  # of a name; file systems take 255 with the endings
_SHORT_ENDINGS = {"overlay.png": "png"}  # the one picture that most people want has the shortest name


class OutputFolder:
    """The folder of one command's results: NAME.dave.png, NAME.dave.json and so on.

    NAME is the picture's name, with labels for what was explained where that is not the default (`cat.tabby`). A result
    replaces an earlier one only where the same question was answered for the same pixels. Where another file has its
    name, be it a source, another result or anything that no record names, the picture's name gets a number (`cat-2`).

    Args:
        folder: the folder; created if absent.
        sources: all files that the command reads, or `-`.

    Raises:
        OptionError: nothing can be written there; known before anything is computed.
    """

    def __init__(self, folder: Path, sources: Sequence[str]) -> None:
        check_folder(folder)
        self._folder = folder
        self._sources = {Path(source).resolve() for source in sources if source != "-"}
        self._written: set[str] = set()

    def write(
        self,
        picture: LoadedImage,
        question: Mapping[str, Any],
        files: Mapping[str, bytes],
        record: Mapping[str, Any],
        labels: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Write the files of a result together, and return its record with their names.

        Args:
            picture: the picture that was explained.
            question: all that decides the result, as plain data.
            files: contents by the ending of their names.
            record: record of the result; it becomes NAME.dave.json.
            labels: parts of the name that tell results of one picture apart; empty ones are left out.
        """
        contents = {_SHORT_ENDINGS.get(ending, ending): data for ending, data in files.items() if ending != "json"}
        return self._write(picture.name, _fingerprint(question, picture.image.tobytes()), contents, record, labels)

    def write_gallery(
        self,
        results: Sequence[Mapping[str, Any]],
        files: Mapping[str, bytes],
        record: Mapping[str, Any],
        labels: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Write the files that show several results together: gallery.dave.html and so on.

        Args:
            results: the records of the results; the same results under the same names are the same gallery.
            files: contents by the ending of their names.
            record: record of the gallery; it becomes gallery.dave.json.
            labels: as of `write`.
        """
        question = {"results": [[one["question"], Path(one["files"][0]).name] for one in results]}
        return self._write("gallery", _fingerprint(question), files, record, labels)

    def _write(
        self, stem: str, question: str, contents: Mapping[str, bytes], record: Mapping[str, Any], labels: Sequence[str]
    ) -> dict[str, Any]:
        name = self._choose_name(stem, labels, ["json", *contents], question)
        self._written.add(name)
        paths = {ending: self._folder / f"{name}.{ending}" for ending in ("json", *contents)}
        names = [escape_unprintable(str(path)) for path in paths.values()]
        whole = {"files": names, "question": question, **record}
        write_files({paths["json"]: json_bytes(whole), **{paths[one]: data for one, data in contents.items()}})
        return whole

    def _choose_name(self, stem: str, labels: Sequence[str], endings: Sequence[str], question: str) -> str:
        start = stem.encode()[:_MOST_BYTES].decode(errors="ignore")
        for number in itertools.count(1):
            numbered = start if number == 1 else f"{start}-{number}"
            name = ".".join([numbered, *filter(None, map(_clean_label, labels)), "dave"])
            if name not in self._written and self._is_free(name, endings, question):
                return name
        raise AssertionError("there is always a next number")

    def _is_free(self, name: str, endings: Sequence[str], question: str) -> bool:
        replaceable = _files_of_record(self._folder / f"{name}.json", question)
        paths = [self._folder / f"{name}.{ending}" for ending in endings]
        return all(
            path.resolve() not in self._sources and (path.name in replaceable or not _exists(path)) for path in paths
        )


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()  # a link to nothing is somebody's as well


def _files_of_record(record: Path, question: str) -> set[str]:
    """Return the files of an earlier answer to the same question; none where the file is no record of one."""
    try:
        content = json.loads(record.read_bytes())
        return {Path(str(file)).name for file in content["files"]} if content["question"] == question else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _fingerprint(question: Mapping[str, Any], pixels: bytes = b"") -> str:
    text = json.dumps(question, sort_keys=True, default=str).encode()
    return hashlib.sha256(text + pixels).hexdigest()[:16]


def _clean_label(text: str) -> str:
    label = re.sub(r"[^\w-]+", "-", escape_unprintable(text)).strip("-")
    return label.encode()[: _MOST_BYTES // 2].decode(errors="ignore")
