"""Hashes of what numbers depend on: the bytes of files, and code without comments, docstrings and captions."""

import ast
import hashlib
import inspect
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_READERS = 8  # threads: a file server answers slowly, and hashing needs no lock
_KNOWN: dict[str, list[Any]] = {}  # size, time, inode and hash by path
_CAPTIONS = {"summary", "axis"}  # texts of a method or a metric that only tables show
PACKAGE = Path(__file__).parents[1]


def hash_content(content: Any) -> str:
    """Return the SHA-256 of JSON-like data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def hash_file(path: str | Path) -> str:
    """Return a hash of a file's bytes, or "" if there is no such file.

    A file is read again only if its size, its time of modification or its inode has changed.
    """
    if not os.path.isfile(path):
        return ""
    status, key = os.stat(path), os.path.abspath(path)
    stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
    known = _KNOWN.get(key)
    if known is None or known[:3] != stamp:
        with open(path, "rb") as file:
            known = _KNOWN[key] = [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
    return str(known[3])


def hash_files(paths: Iterable[str | Path]) -> list[str]:
    """Return a hash of each file, read by several threads."""
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(hash_file, paths))


def read_hashes(path: Path) -> None:
    """Read hashes that another process has written, if the file is there and whole."""
    try:
        stored = json.loads(path.read_bytes())
        _KNOWN.update({key: known for key, known in stored.items() if len(known) == 4})
    except (OSError, ValueError, TypeError, AttributeError):
        return


def pack_hashes() -> bytes:
    """Return size, time, inode and hash of all files that were hashed, by path, for `read_hashes`."""
    return json.dumps(_KNOWN).encode()  # in ASCII: names of files may be no text


def hash_code(path: str | Path) -> str:
    """Return a hash of what a Python file does; its bytes decide if it cannot be parsed."""
    return _hash_source(Path(path).read_bytes())


def hash_own_code(entry: Any) -> str:
    """Return a hash of the code of a user's method or metric; "" for those of this package."""
    try:
        file = _find_file(entry)
        if file and Path(file).is_relative_to(PACKAGE):
            return ""
        return hash_code(file) if file and os.path.isfile(file) else _hash_source(inspect.getsource(entry).encode())
    except (OSError, TypeError):  # written in a shell, so that nothing is left of its text
        return f"{getattr(entry, '__module__', '')}.{getattr(entry, '__qualname__', type(entry).__qualname__)}"


def _find_file(entry: Any) -> str | None:
    """Return the file of a class or a function; functions know it even if their module is not in `sys.modules`."""
    members = vars(entry).values() if isinstance(entry, type) else [entry]
    files = (one.__code__.co_filename for one in members if inspect.isfunction(one))
    return next(files, None) or inspect.getsourcefile(entry)


def _hash_source(source: bytes) -> str:
    try:
        text = ast.dump(_TextRemover().visit(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        text = repr(source)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class _TextRemover(ast.NodeTransformer):
    """Removes docstrings, and captions of classes."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Remove a text that stands alone."""
        return None if _is_text(node.value) else self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Remove captions."""
        node.body = [one for one in node.body if not _is_caption(one)]
        return self.generic_visit(node)


def _is_caption(node: ast.stmt) -> bool:
    if not (isinstance(node, ast.Assign) and _is_text(node.value)):
        return False
    return all(isinstance(target, ast.Name) and target.id in _CAPTIONS for target in node.targets)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
