"""From runs to tables, figures and pages; the commands; a whole suite in the slow part."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

import small_embedded
from dave_vit import cli
from dave_vit.analysis import (
    ANALYSES,
    AnalysisOptions,
    analysis,
    flag,
    inputs,
)
from dave_vit.analysis.paper import localization, reproduce, suites
from dave_vit.analysis.paper.reproduce import render_report
from dave_vit.errors import DataError
from dave_vit.evaluate import ModelEntry, evaluate
from dave_vit.models import Adapter, Preprocessing
from dave_vit.viz.figures import image_cell
from dave_vit.viz.report_section import ReportTable, Section
from evaluation_fixtures import load as load_squares
from evaluation_fixtures import paint

COUNTS = suites.with_counts(
    suites.read_suite("builtin", quick=True), {"samples": 2, "grids": 2, "pictures": 6, "deletion_steps": 4}
).counts


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> Path:
    return paint(tmp_path_factory.mktemp("squares") / "data")


@pytest.fixture(scope="module")
def scored(squares, tmp_path_factory) -> Section:
    group = suites.ModelGroup(
        "conventional", "Localisation", (ModelEntry(f"square:{squares}", label="DeiT-B"),), METHODS
    )
    settings = suites.ReproduceOptions(tmp_path_factory.mktemp("reproduced"), "dave")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(localization, "evaluate", partial(evaluate, loader=load_squares))
        return localization.score_group(group, COUNTS, f"folder:{squares}", settings)


METHODS = ("input_x_gradient", "dave-paper", "dave")


@pytest.fixture
def tiny(squares, monkeypatch) -> None:
    """Every model is the one that knows squares."""
    model = load_squares(ModelEntry(f"square:{squares}"), "cpu")

    def load_model(spec: str, weights: str | None, device: str, **options: object) -> Adapter:
        return Adapter(model, Preprocessing(model.preprocess, (0.5,) * 3, (0.5,) * 3), model.class_names, spec=spec)

    monkeypatch.setattr("dave_vit.models.loading.load_model", load_model)


def test_tables_hold_our_number_the_papers_and_the_difference(scored):
    table = scored.tables[0]
    assert table.head == ("method", "GridPG", "EnergyPG", "deletion")
    assert [row[0] for row in table.rows] == ["input x gradient", "DAVE, as in the paper", "DAVE, default"]
    match = re.fullmatch(r"\**([\d.]+)\** \[[\d.]+, [\d.]+\]; paper 30.2 \(([+-][\d.]+)\)", table.rows[0][1])
    assert float(match[2]) == pytest.approx(float(match[1]) - 30.25, abs=0.11)
    assert "paper" not in table.rows[2][1]  # the paper has no number for this package's own default
    assert "paper" not in table.rows[0][3]
    assert sum("**" in row[2] for row in table.rows) == 1


def test_the_authors_postprocessing_has_a_table_of_its_own(scored):
    raw, post = scored.tables
    assert post.head == ("method", "GridPG", "EnergyPG")
    assert "with the authors' post-processing" in post.caption
    assert [row[0] for row in post.rows] == [row[0] for row in raw.rows]
    assert all(raw.rows[i][k] != post.rows[i][k] for i in range(3) for k in (1, 2))
    assert "paper 30.2" in post.rows[0][1]  # the same published number beside both
    assert "look for it in both tables" in scored.text


def test_rows_are_in_per_cent_and_complete(scored):
    assert len(scored.rows) == len(METHODS) * 5
    row = next(row for row in scored.rows if row["metric"] == "energypg" and row["method"] == "dave-paper")
    assert 1 < row["low"] <= row["mean"] <= row["high"] <= 100
    assert row["difference"] == pytest.approx(row["mean"] - 82.23)


def test_curves_are_the_means_of_the_rows(scored, squares, tmp_path_factory):
    area = {row["method"]: row["mean"] for row in scored.rows if row["metric"] == "deletion"}
    runs = next(path for path in tmp_path_factory.getbasetemp().glob("reproduced*")) / "runs"
    curves = localization.read_curves(runs / "conventional-images", METHODS)["DeiT-B"]
    for method, (at, height) in curves.items():
        assert at.tolist() == [0, 0.25, 0.5, 0.75, 1]
        mean = (height[:-1] + height[1:]).sum() / 8
        assert 100 * mean == pytest.approx(area[method], abs=1e-3)


def test_pages_need_no_other_file(scored, tmp_path):
    run = {"seconds": 1.0, "device": "abacus", "versions": {"torch": "9.9"}, "command": "dave reproduce builtin"}
    record = {**scored.record(), **run}
    for picture in scored.pictures:
        for name, data in picture.files().items():
            (tmp_path / name).write_bytes(data)
    page = (suites.read_suite("builtin", quick=True), [record], "dave reproduce builtin --quick", tmp_path)
    text = render_report("html", *page)
    assert all(source.startswith("data:image/webp;base64,") for source in re.findall(r'src="([^"]*)', text))
    assert not re.search(r"https?://|<script|<link|url\(", text)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert "dave reproduce builtin --quick" in text
    ran = "Run: models DeiT-B, data folder:data, grids 2, pictures 6, samples 2, seed 0; 1 s on abacus; torch 9.9; dave"
    assert ran in text
    assert "<li>device: abacus</li><li>versions: torch 9.9</li>" in text  # of the run, not of who writes the page
    assert "<b>" in text
    assert "**" not in text
    lines = render_report("md", *page)
    assert "| method | GridPG | EnergyPG | deletion |" in lines
    assert f"({tmp_path.name}/deletion-conventional.png)" in lines


def test_pictures_are_those_that_the_model_recognises(tiny, squares):
    model = ModelEntry("x").load("cpu")
    shown = inputs.load_images(model, AnalysisOptions(data=f"folder:{squares}", n=5))
    with torch.no_grad():
        assert torch.equal(model(shown.inputs).argmax(1), shown.target)
    assert len(shown) == len(shown.titles) == 5
    assert shown.colours.min() >= 0
    files = tuple(str(path) for path in sorted(squares.rglob("*.png"))[:2])
    assert len(inputs.load_images(model, AnalysisOptions(images=files, n=7))) == 2


def test_pictures_that_nobody_recognises_are_an_error(tiny, squares, tmp_path):
    model = ModelEntry("x").load("cpu")
    for name in ("red", "blue"):
        (tmp_path / name).mkdir()
    wrong = next((squares / "blue").glob("*.png"))
    Image.open(wrong).save(tmp_path / "red" / "0.png")
    Image.open(next((squares / "red").glob("*.png"))).save(tmp_path / "blue" / "0.png")
    with pytest.raises(DataError, match="recognises none of 2"):
        inputs.load_images(model, AnalysisOptions(data=f"folder:{tmp_path}", n=2))


def test_a_finished_section_is_not_computed_again(tmp_path):
    calls = []

    def make() -> Section:
        calls.append(1)
        return Section("x", "X", "words", tables=[ReportTable(("a",), (("1",),))], rows=[{"a": 1}])

    options = suites.ReproduceOptions(tmp_path, "dave")
    first = reproduce._finish_section(options, "x", "key", make)
    assert reproduce._finish_section(options, "x", "key", make) == json.loads(json.dumps(first))
    assert len(calls) == 1
    reproduce._finish_section(options, "x", "other key", make)
    assert len(calls) == 2
    assert (tmp_path / "tables" / "x.csv").read_text() == "a\n1\n"


@pytest.mark.parametrize("name", ["construction", "consistency", "models", "classes"])
def test_pictures_that_must_not_be_shown_are_not(tiny, squares, name, monkeypatch):
    shown = []
    entry = ANALYSES[name]
    monkeypatch.setitem(entry.run.__globals__, "image_cell", lambda *args: shown.append(args) or image_cell(*args))
    options = entry.options(data=f"folder:{squares}", n=2, samples=2)
    with_pictures = entry.run(options).pictures[0].drawing
    assert shown
    shown.clear()
    without = entry.run(replace(options, show=False)).pictures[0].drawing
    assert not shown
    assert len(without.axes) < len(with_pictures.axes)


@pytest.mark.parametrize(
    ("args", "files"),
    [
        (["toy"], ["toy.csv", "toy.json", "toy.png", "toy.svg"]),
        (["rotation", "--step", "90", "--n", "2"], ["rotation.csv", "rotation.json", "rotation.png", "rotation.svg"]),
        (["noise", "--step", "1", "--n", "2"], ["noise.csv", "noise.json", "noise.png", "noise.svg"]),
        (["construction", "--n", "1", "--samples", "2"], ["construction.json", "construction.png"]),
        (
            ["consistency", "--n", "2", "--samples", "2", "--methods", "dave,legrad"],
            ["consistency.csv", "consistency.json", "consistency.png"],
        ),
        (["classes", "red", "--n", "2", "--samples", "2"], ["classes.json", "classes.png"]),
        (["models", "--n", "1", "--samples", "2"], ["models.json", "models.png"]),
        (
            ["convergence", "--n", "2", "--samples", "3", "--reference", "2"],
            ["convergence.csv", "convergence.json", "convergence.png", "convergence.svg"],
        ),
    ],
    ids=lambda value: value[0],
)
def test_every_analysis_is_a_command(tiny, squares, tmp_path, capsys, args, files):
    data = [] if args[0] == "toy" else ["--data", f"folder:{squares}"]
    assert cli.run(["analyze", *args, *data, "--out", str(tmp_path), "--json"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    record = json.loads(capsys.readouterr().out)
    assert record["name"] == args[0]
    assert record["text"]
    if f"{args[0]}.csv" in files:
        with open(tmp_path / f"{args[0]}.csv") as file:
            assert len(list(csv.DictReader(file))) == len(record["rows"]) > 0


@dataclass(frozen=True)
class Counting(AnalysisOptions):
    """Options of an analysis of one's own."""

    words: tuple[str, ...] = flag(("a", "b"), "Any.")
    pairs: tuple[int, ...] = flag((1, 2), "Numbers.")
    most: float = flag(2.0, "A bound.", least=1)


@pytest.fixture
def counting(monkeypatch) -> None:
    """An analysis that nothing else knows of."""
    monkeypatch.setattr(ANALYSES, "data", dict(ANALYSES.data))

    @analysis("counting", first_model=True)
    def section(options: Counting) -> Section:
        """Counts."""
        return Section("counting", "Counting", f"{options.words} {options.pairs} {options.most}", options.facts())


def test_a_registered_analysis_is_a_command(tiny, counting, tmp_path, capsys):
    line = "analyze counting --words x,y --pairs 3,4 --most 5 --model m --json --out".split()
    assert cli.run([*line, str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == "('x', 'y') (3, 4) 5.0"
    assert record["facts"]["models"] == "m"
    assert cli.run(["analyze", "counting", "--pairs", "3,x"]) == 2
    assert "--pairs 3,x; expected whole numbers" in capsys.readouterr().err
    assert cli.run(["analyze", "countin"]) == 2
    assert "did you mean counting" in capsys.readouterr().err


PLUGIN = """
from dataclasses import dataclass
from dave_vit.analysis import analysis, flag
from dave_vit.viz.report_section import Section

@dataclass(frozen=True)
class DoublingOptions:
    number: int = flag(1, "Number to double.")
    seed: int = 0

@analysis("doubling")
def double(options: DoublingOptions) -> Section:
    \"\"\"Double a number.\"\"\"
    return Section("doubling", "Doubling", str(2 * options.number))
"""


@pytest.mark.parametrize("first", ["", "from __future__ import annotations"])
def test_an_analysis_of_a_plugin_is_a_command(first, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ANALYSES, "data", dict(ANALYSES.data))
    (tmp_path / "doubling.py").write_text(first + PLUGIN)
    line = ["analyze", "--plugin", str(tmp_path / "doubling.py"), "doubling", "--number", "4", "--json"]
    assert cli.run([*line, "--out", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "8"


def test_a_registered_analysis_is_a_section_of_every_suite(tiny, counting, tmp_path):
    suite = suites.read_suite("builtin", quick=True)
    makers = dict(reproduce._list_sections(suite, suites.ReproduceOptions(tmp_path, "dave", seed=3), 10))
    named = ["conventional", "bcos", *suite.analyses]
    assert list(makers) == [*named, "counting"]
    section = makers["counting"]()
    assert section.text == "('a', 'b') (1, 2) 2.0"
    assert section.facts == {"models": "builtin", "data": "builtin", "seed": 3}


@pytest.mark.parametrize("name", list(ANALYSES))
def test_suites_give_analyses_options_that_they_have(name, tmp_path):
    suite = suites.read_suite("paper")
    options = reproduce._analysis_options(ANALYSES[name], suite, suites.ReproduceOptions(tmp_path, "dave"))
    assert isinstance(options, ANALYSES[name].options)
    assert ANALYSES[name].summary.endswith((".", ")."))
    if isinstance(options, AnalysisOptions):
        assert len(options.models) == (1 if ANALYSES[name].first_model else 6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["analyze", "cost", "--samples", "4"], "two or more"),
        (["analyze", "rotation", "--model", "a", "--model", "b", "--weights", "c"], "--weights belongs to one"),
        (["reproduce", "paper"], "--data imagenet:DIR"),
        (["reproduce", "builtin", "--weights", "x"], "--weights belongs to one"),
    ],
)
def test_mistakes_are_one_line(args, message, capsys):
    assert cli.run(args) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note:")]
    assert len(errors) == 1
    assert message in errors[0]


# What is computed does not matter here, so every section gets the least that it takes, of small models.
LEAST = {
    **{"grids": 2, "pool": small_embedded.KNOWN, "pictures": 3, "samples": 2, "deletion_steps": 4},
    "analyses": {
        **{"consistency": {"n": 1}, "toy": {}, "construction": {"n": 1}},
        **{"models": {"n": 1, "method": "dave-paper"}, "classes": {"n": 1, "method": "dave-paper"}},
        **{"convergence": {"n": 1, "samples": 2, "reference": 4}},
        **{"rotation": {"n": 2, "step": 90}, "noise": {"n": 2, "step": 1}},
        **{"cost": {"samples": [1, 2], "depths": [1, 2]}},
    },
}


@pytest.mark.slow
def test_the_builtin_suite_is_reproduced_and_resumed(tmp_path, monkeypatch, capsys):
    assert list(LEAST["analyses"]) == list(suites.read_suite("builtin", quick=True).analyses)
    small_embedded.shrink(tmp_path, monkeypatch.setattr)
    small_embedded.write_weights(tmp_path)
    monkeypatch.setitem(suites._read_toml("suites.toml")["builtin"], "quick", LEAST)
    monkeypatch.chdir(tmp_path)
    args = ["reproduce", "builtin", "--quick", "--out", "out"]
    assert cli.run([*args, "--device", "cpu", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    names = "conventional bcos consistency toy construction models classes convergence rotation noise cost"
    assert [section["name"] for section in record["sections"]] == names.split()
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<figure>") == sum(len(section["pictures"]) for section in record["sections"])
    assert str(tmp_path) not in page
    assert (tmp_path / "out" / "figures" / "deletion-bcos.svg").exists()
    assert (tmp_path / "out" / "tables" / "cost.csv").exists()
    monkeypatch.setattr(localization, "evaluate", None)  # would fail if it was called again
    assert cli.run([*args, "--device", "cpu", "--quiet"]) == 0
    assert (tmp_path / "out" / "report.html").read_text() == page
