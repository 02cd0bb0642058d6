"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def rich_table(head: Iterable[str], rows: Iterable[Iterable[str]], caption: str = "") -> Any:
    """Return a table for `Output.print`."""
    from rich.table import Table

    table = Table(*head, box=None, title=caption or None, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table
