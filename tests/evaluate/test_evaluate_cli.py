"""`dave evaluate` as people and scripts call it."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from dave_vit import cli
from evaluation_fixtures import paint


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> list[str]:
    """Arguments that name a tiny model and tiny data."""
    import timm
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=5).state_dict(), root / "tiny.safetensors")
    data = paint(root / "data", each=1)
    return ["--model", "timm:test_vit", "--weights", f"{root}/tiny.safetensors", "--data", f"folder:{data}"]


@pytest.fixture
def words(monkeypatch):
    """Return the arguments of `_run` without running it."""
    arguments = {}
    from dave_vit.cli import evaluate

    def note(plan, out, how, **output):
        arguments.update(plan=plan, out=out, **how, **output)

    monkeypatch.setattr(evaluate, "_run", note)
    return arguments


def test_json_is_the_summary_and_nothing_else(world, tmp_path, capsys):
    arguments = ["--metric", "energypg,deletion", "--methods", "effective,bcos", "--set", "deletion.steps=2"]
    code = cli.run(["evaluate", *world, *arguments, "--out", str(tmp_path / "run"), "--json", "--threads", "1"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    summary = json.loads(shown.out)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(one["method"], one["metric"], one["n"]) for one in summary["results"]] == [
        ("effective", "energypg", 5),
        ("bcos", "energypg", 0),
        ("effective", "deletion", 5),
        ("bcos", "deletion", 0),
    ]
    assert [line for line in shown.err.splitlines() if line] == [
        f"note: bcos on timm:test_vit: {next(iter(summary['results'][1]['reasons']))}"
    ]
    assert cli.run(["evaluate", *world, *arguments, "--out", str(tmp_path / "run"), "--threads", "1"]) == 0
    again = capsys.readouterr().out
    line = shlex.join(["dave", "evaluate", *world, *arguments, "--out", str(tmp_path / "run"), "--threads", "1"])
    assert f"- command: {line}\n" in (tmp_path / "run" / "report.md").read_text()  # the last one
    assert f"<code>{html.escape(line, quote=False)}</code>" in (tmp_path / "run" / "report.html").read_text()
    assert "effective" in again
    assert "report.html" in again
    assert cli.run(["evaluate", *world, "--methods", "dave", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "holds a run of another plan" in error
    assert len(error.splitlines()) == 1


def test_a_log_gets_a_line_now_and_then(world, tmp_path, capsys, monkeypatch):
    from dave_vit.cli import common as watching

    words = ["evaluate", *world, "--metric", "energypg", "--methods", "effective", "--shard", "2", "--threads", "1"]
    assert cli.run([*words, "--out", str(tmp_path / "short")]) == 0
    assert "evaluating" not in capsys.readouterr().err
    monkeypatch.setattr(watching, "_EVERY_LINE", 0.0)
    assert cli.run([*words, "--out", str(tmp_path / "run")]) == 0
    assert re.search(r"note: evaluating: 4 of 5, .* a second, .* left\n", capsys.readouterr().err)


def test_the_time_left_is_told_in_words():
    from dave_vit.cli.common import _format_duration

    assert [_format_duration(seconds) for seconds in (4.2, 90, 3600, 9000)] == [
        "4 s",
        "2 min",
        "1 h 0 min",
        "2 h 30 min",
    ]


def test_flags_make_the_plan(words):
    line = "--metric all --methods dave,effective --samples 4 --preset paper --seed 3 --limit 12 --smoothing mean"
    line += " --smoothing-size 9 --target predicted --min-confidence 0.9 --batch 8 --shard 16 --save-maps"
    line += " --set dave.rotation=0 --set deletion.protocol=official --device cpu --workers 2 --threads 1 --out here"
    assert cli.run(["evaluate", *line.split()]) == 0
    plan = words["plan"]
    every = (
        "gridpg energypg pointing average_precision deletion insertion irof road srg r_oms saco consistency infidelity"
    )
    every += " sensitivity_n single_deletion sanity random_logit complexity sparseness"
    assert [entry.metric for entry in plan.metrics] == every.split()
    assert plan.methods[0].options == {"samples": 4, "preset": "paper", "rotation": 0}
    assert plan.methods[1].options == {}  # samples go where they are understood
    assert {entry.metric: entry.options for entry in plan.metrics}["deletion"] == {"protocol": "official"}
    assert (plan.data, plan.models[0].spec, plan.limit, plan.seeds) == ("builtin", "builtin", 12, (3,))
    assert (plan.smoothing.kind, plan.smoothing.size, plan.target) == ("mean", 9, "predicted")
    assert (plan.min_confidence, plan.batch, plan.shard, plan.save_maps) == (0.9, 8, 16, True)
    assert (list(words["engine"].devices), words["threads"], words["out"]) == (["cpu", "cpu"], 1, Path("here"))


def test_all_methods_are_all_methods(words):
    from dave_vit.methods import METHODS

    assert cli.run(["evaluate", "--methods", "all"]) == 0
    assert [entry.method for entry in words["plan"].methods] == list(METHODS)
    assert [entry.metric for entry in words["plan"].metrics] == ["gridpg", "energypg", "deletion"]


def test_flags_go_before_the_file(words, tmp_path):
    (tmp_path / "plan.toml").write_text(
        'methods = ["effective"]\ndata = "builtin:pair"\nlimit = 5\n[smoothing]\nsize = 9'
    )
    arguments = ["evaluate", "--plan", str(tmp_path / "plan.toml"), "--limit", "7", "--smoothing", "gaussian"]
    assert cli.run(arguments) == 0
    plan = words["plan"]
    assert (plan.data, plan.limit, plan.methods[0].method) == ("builtin:pair", 7, "effective")
    assert (plan.smoothing.kind, plan.smoothing.size) == ("gaussian", 9)


def test_a_metric_of_the_file_keeps_its_own_smoothing(words, tmp_path):
    entry = '{metric = "gridpg", label = "coarse", smoothing = {kind = "patch"}}'
    (tmp_path / "plan.toml").write_text(f'metrics = ["gridpg", {entry}]')
    assert cli.run(["evaluate", "--plan", str(tmp_path / "plan.toml"), "--smoothing", "gaussian"]) == 0
    plan = words["plan"]
    assert plan.smoothing.kind == "gaussian"
    assert [entry.smoothing and entry.smoothing.kind for entry in plan.metrics] == [None, "patch"]


def test_flags_go_before_what_the_file_says_of_a_method(words, tmp_path):
    (tmp_path / "plan.toml").write_text(
        """
        methods = [
            {method = "dave", against = "none", options = {samples = 9, seed = 4, rotation = 5}},
            {method = "dave", label = "paper", options = {preset = "paper"}},
            {method = "integrated_gradients", options = {steps = 7}},
        ]"""
    )

    def options(*flags):
        assert cli.run(["evaluate", "--plan", str(tmp_path / "plan.toml"), *flags]) == 0
        return [dict(entry.options) for entry in words["plan"].methods]

    assert options() == [{"samples": 9, "seed": 4, "rotation": 5}, {"preset": "paper"}, {"steps": 7}]
    assert options("--samples", "3")[:2] == [
        {"samples": 3, "seed": 4, "rotation": 5},
        {"preset": "paper", "samples": 3},
    ]
    assert [one["preset"] for one in options("--preset", "exact")[:2]] == ["exact", "exact"]
    assert "seed" not in options("--seed", "1")[0]
    assert options("--seed", "1", "--set", "dave.seed=2")[0]["seed"] == 2
    assert [one.get("samples", one.get("steps")) for one in options("--budget", "20")] == [18, 20, 20]
    options("--against", "rivals")
    assert [entry.against for entry in words["plan"].methods] == ["rivals"] * 3
    assert cli.run(["evaluate", "--budget", "20", "--samples", "3"]) == 2


def test_ray_is_an_engine(words):
    assert cli.run(["evaluate", "--engine", "ray", "--address", "auto", "--workers", "3"]) == 0
    assert (words["engine"].address, words["engine"].workers) == ("auto", 3)


def test_an_engine_of_a_plugin_is_used_by_its_name(world, tmp_path, monkeypatch, capsys):
    from dave_vit.evaluate.engines import ENGINES

    page = (Path(__file__).parents[2] / "docs" / "howto" / "own-engine.md").read_text()
    (tmp_path / "engine.py").write_text(re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1])
    monkeypatch.setattr(ENGINES, "data", dict(ENGINES.data))
    line = "--metric energypg --methods effective --threads 1 --json --engine plain".split()
    words = ["evaluate", *world, *line, "--plugin", str(tmp_path / "engine.py"), "--out", str(tmp_path / "run")]
    assert cli.run(words) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["n"] == 5
    assert cli.run(["evaluate", "--engine", "plian"]) == 2
    assert "unknown engine 'plian'; did you mean plain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--methods dav", "unknown method 'dav'; did you mean dave"),
        ("--metric energpg", "unknown metric 'energpg'; did you mean energypg"),
        ("--data imagenet:absent", "absent: no such folder"),
        ("--data imagnet:x", "did you mean imagenet"),
        ("--set dave=3", "expected WHO.NAME=VALUE"),
        ("--set legrad.x=3", "'legrad' is neither a method nor a metric of this run"),
        (
            "--set deletion.protocol=theirs",
            "protocol of metric 'deletion' is 'theirs'; expected one of paper",
        ),
        ("--address auto", "add --engine ray"),
        ("--smoothing-size 4", "expected an odd number"),
        ("--plan absent.yaml", "absent.yaml: cannot be read as a plan"),
        ("--min-confidence 1", "expected float, at least 0, below 1"),
    ],
)
def test_wrong_calls_are_one_line(line, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["evaluate", *line.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert expected in shown.err
    assert len(shown.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []  # nothing was started
