"""Registries: names to objects, with a suggestion of the nearest name when one is misspelt."""

import difflib
import pkgutil
import sys
from collections import UserDict
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from dave_vit._internal.content_hash import hash_code
from dave_vit.errors import OptionError, UnknownName, first_line

T = TypeVar("T")


def suggest_names(name: str, names: list[str]) -> str:
    """Return a clause with up to three close matches, or "" where none is close.

    Names that start with the given one come first, the shortest before others: `deit_tiny` means
    `deit_tiny_patch16_224`.
    """
    prefixed = sorted((known for known in sorted(names) if name and known.startswith(name)), key=len)
    close = [*prefixed, *difflib.get_close_matches(name, names, n=3, cutoff=0.5)]
    close = list(dict.fromkeys(close))[:3]
    return f"; did you mean {', '.join(close)}?" if close else ""


def split_names(text: str, every: Iterable[str]) -> list[str]:
    """Return the names in a text with commas between, each once; "all" stands for every name."""
    if text.strip() == "all":
        return list(every)
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def import_all(package: str) -> None:
    """Import every module of a package, so that each registers its entries; a new file needs no other change."""
    for module in pkgutil.iter_modules(import_module(package).__path__):
        import_module(f"{package}.{module.name}")


def import_file(path: str | Path) -> ModuleType:
    """Import a user's Python file as a module, so that it registers its entries."""
    file = Path(path)
    if not file.is_file():
        raise OptionError(f"{path}: no such file; give a Python file")
    spec = spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path}: not a Python file; its name must end in .py")
    module = module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses with postponed annotations look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's own code raises
        raise OptionError(f"{path} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    return module


_PLUGINS: dict[Path, str] = {}  # a hash of the code that was imported


def import_plugins(paths: Iterable[str | Path]) -> tuple[str, ...]:
    """Import files that register entries, each once in a process, and return their resolved paths."""
    files = list(paths)
    for path in files:
        if not isinstance(path, str | Path) or "\0" in str(path):
            raise OptionError(f"plugin {path!r}; give the path of a Python file")
    resolved = [Path(path).resolve() for path in files]
    for file in resolved:
        if file not in _PLUGINS:
            import_file(file)
            _PLUGINS[file] = hash_code(file)
        elif _PLUGINS[file] != hash_code(file):
            raise OptionError(f"plugin {file} has changed since it was imported; start again, in a new process")
    return tuple(map(str, resolved))


class Registry(UserDict[str, T]):
    """Names to objects, in the order of their registration unless they are arranged.

    Args:
        kind: the noun used in error messages, such as "method".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self._libraries: dict[str, Callable[[str], T]] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under ``name``."""

        def add(entry: T) -> T:
            if name in self:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self[name] = entry
            return entry

        return add

    def arrange(self, names: str) -> None:
        """List the entries of these names, with spaces between, first and in this order."""
        self.data = {**{name: self.data[name] for name in names.split()}, **self.data}

    def register_library(self, library: str) -> Callable[[Callable[[str], T]], Callable[[str], T]]:
        """Return a decorator for a function from NAME to the entry of ``library:NAME``; such entries are not listed."""

        def add(find: Callable[[str], T]) -> Callable[[str], T]:
            self._libraries[library] = find
            return find

        return add

    def __missing__(self, name: str) -> T:
        library, colon, inner = name.partition(":")
        if colon and library in self._libraries:
            return self._libraries[library](inner)
        hint = suggest_names(name, list(self)) or f"; known: {', '.join(self)}"
        raise UnknownName(f"unknown {self.kind} {name!r}{hint}")

    def summaries(self) -> dict[str, str]:
        """Return the first line of each entry's docstring by its name, for help texts."""
        return {name: (entry.__doc__ or "").partition("\n")[0] for name, entry in self.items()}
