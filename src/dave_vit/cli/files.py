"""The files of `dave explain` and `dave compare`: names under which nothing is lost that anybody made before."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dave_vit._internal.atomic_files import json_bytes, write_files
from dave_vit.errors import escape_unprintable

if TYPE_CHECKING:
    from dave_vit.data.images import LoadedImage
    from dave_vit.explain.classes import Explainer

_LENGTH = 120  # bytes of a name; file systems take 255 with the endings
_PLAIN = {"overlay.png": "png"}  # the one picture that most people want has the shortest name


class Results:
    """The folder of one command's results: NAME.dave.png, NAME.dave.json and so on.

    NAME is the picture's, and says what was asked where that is not the usual (`cat.tabby`). A result takes the place
    of an earlier one only where the same was asked of the same pixels. Where another file has its name, be it a source,
    the result of another question or anything that no record names, a number goes behind the picture's (`cat-2`).

    Args:
        out: the folder.
        sources: all files that the command reads, or `-`.
    """

    def __init__(self, out: Path, sources: Sequence[str]) -> None:
        self._out = out
        self._sources = {Path(source).resolve() for source in sources if source != "-"}
        self._written: set[str] = set()

    def write(
        self,
        picture: LoadedImage,
        asked: Mapping[str, Any],
        files: Mapping[str, bytes],
        record: Mapping[str, Any],
        words: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Writes the files of a result together, and returns its record with their names.

        Args:
            picture: what was explained.
            asked: all that decides the result, as plain data.
            files: contents by the ending of their names.
            record: of the result; it becomes NAME.dave.json.
            words: of the question, for the name.
        """
        contents = {_PLAIN.get(ending, ending): data for ending, data in files.items() if ending != "json"}
        return self._put(picture.name, _digest(asked, picture.image.tobytes()), contents, record, words)

    def write_gallery(
        self,
        written: Sequence[Mapping[str, Any]],
        files: Mapping[str, bytes],
        record: Mapping[str, Any],
        words: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Writes what shows several results together, by the same rules: gallery.dave.html and so on.

        Args:
            written: the records of the results; the same ones under the same names are the same gallery.
            files: contents by the ending of their names.
            record: of the gallery; it becomes gallery.dave.json.
            words: of the question, for the name.
        """
        asked = {"results": [[one["question"], Path(one["files"][0]).name] for one in written]}
        return self._put("gallery", _digest(asked), files, record, words)

    def _put(
        self, stem: str, question: str, contents: Mapping[str, bytes], record: Mapping[str, Any], words: Sequence[str]
    ) -> dict[str, Any]:
        name = self._name(stem, words, ["json", *contents], question)
        self._written.add(name)
        paths = {ending: self._out / f"{name}.{ending}" for ending in ("json", *contents)}
        names = [escape_unprintable(str(path)) for path in paths.values()]
        whole = {"files": names, "question": question, **record}
        write_files({paths["json"]: json_bytes(whole), **{paths[one]: data for one, data in contents.items()}})
        return whole

    def _name(self, stem: str, words: Sequence[str], endings: Sequence[str], question: str) -> str:
        for number in itertools.count(1):
            numbered = _short(stem) if number == 1 else f"{_short(stem)}-{number}"
            name = ".".join([numbered, *filter(None, map(_word, words)), "dave"])
            if name not in self._written and self._is_free(name, endings, question):
                return name
        raise AssertionError("there is always a next number")

    def _is_free(self, name: str, endings: Sequence[str], question: str) -> bool:
        ours = _named_in(self._out / f"{name}.json", question)
        paths = [self._out / f"{name}.{ending}" for ending in endings]
        return all(path.resolve() not in self._sources and (path.name in ours or not _taken(path)) for path in paths)


def _taken(path: Path) -> bool:
    return path.exists() or path.is_symlink()  # a link to nothing is somebody's as well


def _named_in(record: Path, question: str) -> set[str]:
    """The files of an earlier answer to the same question; none where the file is no record of one."""
    try:
        content = json.loads(record.read_bytes())
        return {Path(str(file)).name for file in content["files"]} if content["question"] == question else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _digest(asked: Mapping[str, Any], pixels: bytes = b"") -> str:
    told = json.dumps(asked, sort_keys=True, default=str).encode()
    return hashlib.sha256(told + pixels).hexdigest()[:16]


def _short(stem: str) -> str:
    return stem.encode()[:_LENGTH].decode(errors="ignore")


def _word(text: str) -> str:
    return re.sub(r"[^\w-]+", "-", escape_unprintable(text)).strip("-").encode()[: _LENGTH // 2].decode(errors="ignore")


def question(explainer: Explainer, target: str) -> dict[str, Any]:
    """All that decides a result, as plain data."""
    options = {name: value for name, value in explainer.options.items() if name != "chunk"}
    said = {"model": explainer.model.spec, "weights": explainer.weights, "against": explainer.against}
    prepare = explainer.model.prepare and asdict(explainer.model.prepare)
    return {**said, "prepare": prepare, "method": explainer.name, "options": options, "target": target}


def method_word(explainer: Explainer) -> str:
    """The method in the name of a file; nothing for the usual one."""
    return "" if explainer.name == "dave" else explainer.name
