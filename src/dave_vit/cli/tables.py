"""Tables on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dave_vit.viz.report_section import ReportTable


def rich_table(table: ReportTable) -> Any:
    """Return a table for `Output.print`."""
    from rich.table import Table

    shown = Table(*table.head, box=None, title=table.caption or None, title_justify="left")
    for row in table.rows:
        shown.add_row(*row)
    return shown
