"""The architecture page: every file it names exists, and one image takes at most ten steps."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "dave_vit"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FILE = re.compile(r"(?<![\w/.])(?:[\w.]+/)+(?:\w+\.py)?|\b\w+\.py\b")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}")[2].partition("\n## ")[0]


def table(title: str) -> list[list[str]]:
    """Cells of the rows of a section's table, without its head."""
    rows = re.findall(r"^\| (.+) \|$", section(title), re.MULTILINE)
    return [row.split(" | ") for row in rows[1:]]


def missing(text: str) -> list[str]:
    """File and folder names of a text that are neither in the package nor in the repository."""
    names = [name for name in FILE.findall(text) if not name.startswith("howto/")]
    return [name for name in names if not (SOURCE / name).exists() and not (ROOT / name).exists()]


def test_one_image_takes_at_most_ten_steps():
    steps = table("One image")
    assert [row[0] for row in steps] == [str(number) for number in range(1, len(steps) + 1)]
    assert 5 < len(steps) <= 10
    assert all(FILE.search(row[2]) for row in steps)


def test_every_file_of_an_image_and_of_an_evaluation_row_exists():
    assert missing(" ".join(row[2] for row in table("One image"))) == []
    diagram = re.findall(r"^ {4,}(\S+)", section("One row of an evaluation"), re.MULTILINE)
    assert len(diagram) > 5
    assert missing(" ".join(diagram)) == []


def test_one_image_passes_through_every_file_of_its_steps(tmp_path):
    from PIL import Image

    from dave_vit.cli import run
    from dave_vit.data.builtin import compose_scene

    Image.fromarray(compose_scene(0).image).save(tmp_path / "photo.png")
    called: set[str] = set()

    def note(frame, event, _argument):
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function, not a class or module body
            called.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        code = run(["explain", str(tmp_path / "photo.png"), "--samples", "2", "--out", str(tmp_path), "--quiet"])
    finally:
        sys.setprofile(None)
    assert code == 0
    files = FILE.findall(" ".join(row[2] for row in table("One image")))
    assert [name for name in files if str(SOURCE / name) not in called] == []


def test_every_extension_says_where_it_goes():
    kinds = "method rule operator reducer preset score metric data set model family engine analysis"
    rows = table("Where to add what")
    assert all(any(kind in row[0] for row in rows) for kind in kinds.split())
    assert all(FILE.search(row[1]) for row in rows)
    assert missing(" ".join(row[1] for row in rows)) == []
