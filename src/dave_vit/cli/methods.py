"""`dave methods`: list the attribution methods."""

from dataclasses import asdict

from dave_vit.cli.common import Output, command, rich_table
from dave_vit.cli.options import Json, Plugins


@command("dave methods", "dave methods --json", "dave methods --plugin mine.py")
def methods(*, plugins: Plugins = None, as_json: Json = False) -> None:
    """List the attribution methods, what each costs, and whether it resolves pixels and tells classes apart.

    T is the number of samples; passes are counted for one image and one class.
    """
    from rich.table import Column

    from dave_vit.methods import METHODS

    output = Output(as_json=as_json)
    names = sorted(METHODS, key=lambda name: METHODS[name].__module__ != "dave_vit.methods.dave")  # the rest follows
    rows = [{"name": name, **asdict(METHODS[name].info)} for name in names]
    head = (Column("method", no_wrap=True), Column("what it shows, paper", ratio=1), Column("passes", max_width=16))
    cells = []
    for row in rows:
        specific = "yes" if row["class_specific"] else "no"
        cells.append((row["name"], f"{row['summary']} {row['paper']}.", row["passes"], row["resolution"], specific))
    output.print(rich_table((*head, "map per", "by class"), cells, pad_edge=False))
    output.json(rows)
