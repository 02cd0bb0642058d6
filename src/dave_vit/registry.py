"""One table from names to objects, with a hint at the nearest name when one is misspelt."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Generic, TypeVar

from dave_vit.errors import UnknownName

T = TypeVar("T")


def nearest(name: str, names: list[str]) -> str:
    """A clause that names up to three close matches, or nothing where none is close."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""


def import_all(package: str) -> None:
    """Import every module of a package, so that each registers what it holds: one file more is all it takes."""
    for module in pkgutil.iter_modules(import_module(package).__path__):
        import_module(f"{package}.{module.name}")


class Registry(Generic[T]):
    """Names to objects, in the order of their registration.

    Args:
        kind: the noun used in error messages, such as "method".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that files its object under ``name``."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            names = list(self._entries)
            hint = nearest(name, names) or f"; known: {', '.join(names)}"
            raise UnknownName(f"unknown {self.kind} {name!r}{hint}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries
