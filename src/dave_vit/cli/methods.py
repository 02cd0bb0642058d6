"""`dave methods`: list the attribution methods."""

from __future__ import annotations

from dataclasses import asdict

from dave_vit.cli.common import Output, command
from dave_vit.cli.options import Json, Plugins

app = command("dave methods", "dave methods --json", "dave methods --plugin mine.py")


@app.command()
def methods(*, plugins: Plugins, as_json: Json = False) -> None:
    """List the attribution methods, what each costs, and whether it resolves pixels and tells classes apart.

    T is the number of samples; passes are counted for one image and one class.
    """
    from rich.table import Table

    from dave_vit.methods import METHODS

    output = Output(as_json=as_json)
    names = sorted(METHODS, key=lambda name: METHODS[name].__module__ != "dave_vit.methods.dave")  # the rest follows
    rows = [{"name": name, **asdict(METHODS[name].info)} for name in names]
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("what it shows, paper", ratio=1)
    table.add_column("passes", max_width=16)
    for header in ("map per", "by class"):
        table.add_column(header)
    for row in rows:
        shown = f"{row['summary']} {row['paper']}."
        specific = "yes" if row["class_specific"] else "no"
        table.add_row(row["name"], shown, row["passes"], row["resolution"], specific)
    output.print(table)
    output.json(rows)
