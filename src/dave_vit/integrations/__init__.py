"""Adapters to other libraries, one file each; a library is imported when it is first needed."""

from collections.abc import Callable
from typing import Any

from dave_vit.errors import import_optional
from dave_vit.methods import METHODS


def class_finder(module: str, build: Callable[[str], type], library: str, package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that has a class for each method, and all names of another library.

    Args:
        module: its name.
        build: returns the class of a method.
        library: where all other names are taken from.
        package: that installs it.
    """

    def find(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        methods = {METHODS[method].__name__.casefold(): method for method in METHODS}
        method = methods.get(name.casefold())  # captum writes Lime and KernelShap
        return getattr(import_optional(library, package), name) if method is None else build(method)

    return find


def list_classes() -> list[str]:
    """Return the class names of all methods."""
    return sorted(METHODS[method].__name__ for method in METHODS)
