"""Words and pages of reports."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from jinja2 import UndefinedError

from dave_vit.viz.pages import render
from dave_vit.viz.report_section import ReportTable, Section, csv_bytes, estimate_cell


def test_an_estimate_is_written_one_way():
    assert estimate_cell(0.5123, 0.25, 0.75).format() == "0.512 [0.250, 0.750]"
    assert estimate_cell(56.92, 55.0, 58.26, digits=1, is_best=True).format(bold=True) == "**56.9** [55.0, 58.3]"
    assert estimate_cell(0.5123, None, None).format() == "0.512"  # too few images for an interval
    assert estimate_cell(None, None, None).format() == "-"


SUITE = {"title": "A & B", "facts": [("command", "dave <x>")], "notes": ["n < 3"], "figures": "figures"}


def suite_page(kind: str, **more: object) -> str:
    table = ReportTable(("method", "score"), (("<script>", "**0.5** [0, 1]"),), "a < b")
    record = Section("one", "One", "text", tables=[table]).record()
    content = {**SUITE, "records": [record], "figure": None, "ran": lambda record: "Run: here", **more}
    return render(f"suite.{kind}", **content)


def test_html_is_escaped_and_markdown_is_not():
    page = suite_page("html")
    assert "<title>A &amp; B</title>" in page
    assert "<code>dave &lt;x&gt;</code>" in page
    assert "<td>&lt;script&gt;</td><td><b>0.5</b> [0, 1]</td>" in page
    assert "a &lt; b" in page
    text = suite_page("md")
    assert "# A & B" in text
    assert "| <script> | **0.5** [0, 1] |" in text
    assert text.endswith("Run: here\n")


def test_a_template_with_a_hole_is_an_error():
    with pytest.raises(UndefinedError, match="notes"):
        render("suite.md", **{name: value for name, value in SUITE.items() if name != "notes"}, records=[])


def test_a_section_is_written_with_its_numbers(tmp_path):
    rows = [{"a": 1, "b": None}, {"a": 2, "b": 0.5}]
    files = Section("name", "Title", "text", rows=rows).write(tmp_path)
    assert [path.name for path in files] == ["name.csv", "name.json"]
    assert csv_bytes(rows) == b"a,b\n1,\n2,0.5\n"


def test_reports_have_the_colours_and_fonts_of_the_page():
    tokens = (resources.files("dave_vit") / "viz" / "static" / "tokens.css").read_text()
    page = suite_page("html")
    assert tokens.replace("\n", " ") in page
    used = set(re.findall(r"var\((--[\w-]+)\)", page))
    assert used <= set(re.findall(r"(--[\w-]+):", tokens))
