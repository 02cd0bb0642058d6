"""Imports between the layers of the package go one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "dave_vit"
SOURCE = Path(__file__).resolve().parents[2] / "src" / PACKAGE

# A layer may import itself and the layers before it. "__init__" stands for the public names.
ORDER = [
    "_version",
    "errors",
    "_internal",
    "engine",
    "neighborhood",
    "maps",
    "reduce",
    "data",
    "models",
    "checks",
    "methods",
    "metrics",
    "viz",
    "explanations",
    "evaluate",
    "analysis",
    "audit",
    "__init__",
    "integrations",
    "web",
    "cli",
    "__main__",
]
# Allowed by the order and still wrong: a metric scores maps and never makes one.
NEVER = {("metrics", "methods")}


def layer_of(parts: tuple[str, ...]) -> str:
    """Return the layer of a module, given its dotted path inside the package: () is the package itself."""
    return parts[0] if parts else "__init__"


def imported_modules(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield line and dotted path of every import; ``package`` is where the module's relative imports start."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield node.lineno, (*start, *module, alias.name)


def imported_layers(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Yield line and layer of every import of the package's own modules, also those inside functions."""
    package = (root.name, *path.relative_to(root).parent.parts)
    layers = {entry.stem for entry in root.iterdir()} - {"__init__"}
    for line, target in imported_modules(ast.parse(path.read_text()), package):
        if target[0] == root.name:
            # `from dave_vit import DAVE` names no layer: it takes a public name.
            inner = target[1:] if target[1:2] and target[1] in layers else ()
            yield line, layer_of(inner)


def find_violations(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        importer = layer_of(path.relative_to(root).with_suffix("").parts)
        for line, imported in imported_layers(path, root):
            backwards = ORDER.index(imported) > ORDER.index(importer)
            if imported != importer and (backwards or (importer, imported) in NEVER):
                found.append(f"{path.relative_to(root)}:{line}: {importer} imports {imported}")
    return found


def test_every_layer_has_a_place_in_the_order():
    layers = {path.relative_to(SOURCE).with_suffix("").parts[0] for path in SOURCE.rglob("*.py")}
    assert layers <= set(ORDER), f"add {layers - set(ORDER)} to ORDER, and to CONTRIBUTING.md"


def test_imports_go_one_way():
    assert find_violations(SOURCE) == []
