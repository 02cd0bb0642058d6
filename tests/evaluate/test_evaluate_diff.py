"""`dave diff`: two runs, paired by image."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dave_vit import cli
from dave_vit.evaluate import evaluate
from dave_vit.evaluate.statistics import intervals
from dave_vit.evaluate.statistics.summary import describe_changes, read_run
from evaluation_fixtures import build_plan, load, paint, read_rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """The same plan with few and with more samples; the second on fewer images."""
    folder = tmp_path_factory.mktemp("runs")
    squares = paint(folder / "data")
    for name, samples, limit in (("before", 1, 20), ("after", 2, 17)):
        methods = ["input_x_gradient", {"method": "smoothgrad", "options": {"samples": samples, "level": 0.5}}]
        grids = {"metric": "gridpg", "options": {"grids": 5, "confidence": 0.0}}
        evaluate(
            build_plan(squares, methods=methods, metrics=["energypg", grids], limit=limit), folder / name, loader=load
        )
    return folder / "before", folder / "after"


def diff(capsys, *words) -> dict:
    assert cli.run(["diff", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def scores(run: Path, method: str) -> dict[str, float]:
    return {
        row["image"]: row["value"] for row in read_rows(run) if (row["method"], row["metric"]) == (method, "energypg")
    }


def test_differences_are_paired_by_image(runs, capsys):
    comparison = diff(capsys, *runs)
    one = next(d for d in comparison["differences"] if (d["metric"], d["method"]) == ("energypg", "smoothgrad"))
    before, after = (scores(run, "smoothgrad") for run in runs)
    expected = [after[name] - before[name] for name in after]
    assert (one["n"], one["images"]) == (17, 17)
    assert one["mean"] == pytest.approx(np.mean(expected))
    assert one["after"] - one["before"] == pytest.approx(one["mean"])
    assert one["low"] < one["mean"] < one["high"]
    same = next(d for d in comparison["differences"] if (d["metric"], d["method"]) == ("energypg", "input_x_gradient"))
    assert (same["mean"], same["low"], same["high"]) == (0, 0, 0)
    assert "method smoothgrad: options.samples was 1, now 2" in comparison["changes"]
    assert "limit was 20, now 17" in comparison["changes"]


def test_grids_are_compared_only_where_they_are_the_same(runs, capsys):
    grids = [json.loads(next((run / "grids").glob("*.json")).read_text())["grids"] for run in runs]
    both = [i for i, (a, b) in enumerate(zip(*grids, strict=True)) if a == b]
    differences = [one for one in diff(capsys, *runs)["differences"] if one["metric"] == "gridpg"]
    assert [one["n"] for one in differences] == ([4 * len(both)] * 2 if both else [])


def test_a_run_with_itself_method_with_method(runs, capsys):
    differences = diff(capsys, runs[0], runs[0], "--pair", "input_x_gradient=smoothgrad")["differences"]
    one = next(d for d in differences if d["metric"] == "energypg")
    plain, noisy = (scores(runs[0], name) for name in ("input_x_gradient", "smoothgrad"))
    assert one["method"] == "input_x_gradient -> smoothgrad"
    assert one["mean"] == pytest.approx(np.mean([noisy[name] - plain[name] for name in plain]))
    assert cli.run(["diff", str(runs[0]), str(runs[1])]) == 0
    assert "smoothgrad" in capsys.readouterr().out


def test_what_differs_is_named(runs, capsys):
    changes = diff(capsys, runs[0], runs[0], "--pair", "input_x_gradient=smoothgrad")["changes"]
    assert "method input_x_gradient -> smoothgrad: options.samples was not set, now 1" in changes
    assert 'method input_x_gradient -> smoothgrad: method was "input_x_gradient", now "smoothgrad"' in changes
    first = read_run(runs[0])
    software = {**first.provenance["software"], "torch": "9.9"}
    plan = copy.deepcopy(first.plan)
    plan["methods"][0]["label"] = "renamed"
    other = replace(first, path=Path("other"), plan=plan, provenance={**first.provenance, "software": software})
    assert describe_changes(first, other, {"smoothgrad": "smoothgrad"}) == [
        f"method input_x_gradient is only in {runs[0]}",
        "method renamed is only in other",
        f'software.torch was "{first.provenance["software"]["torch"]}", now "9.9"',
    ]


def test_the_star_and_the_number_of_comparisons_are_explained(runs, capsys, monkeypatch):
    monkeypatch.setattr(intervals, "MIN_IMAGES", 18)
    assert cli.run(["diff", *map(str, runs)]) == 0
    out = capsys.readouterr().out
    assert "* the 95 % interval of the change excludes 0" in out
    assert "[" not in out  # 17 images are too few now


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["absent"], "absent: no run of dave evaluate"),
        (["RUN", "--pair", "dave=x"], "has no method 'dave'; it has: input_x_gradient, smoothgrad"),
        (["RUN", "--pair", "dave"], "expected A=B"),
    ],
)
def test_wrong_calls_are_one_line(runs, words, expected, capsys):
    words = [str(runs[0]) if word == "RUN" else word for word in words]
    assert cli.run(["diff", str(runs[0]), *words]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == 1
