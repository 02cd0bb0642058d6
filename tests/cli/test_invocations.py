"""A corpus of bad invocations: whatever is typed, there is no traceback, and what is refused is refused in one line."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import itertools
import os
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import typer
import yaml

from dave_vit import cli
from dave_vit import evaluate as bench
from dave_vit.errors import UnsupportedOperator
from dave_vit.evaluate.plan import Plan
from dave_vit.explanations import classes as results
from dave_vit.explanations.explainer import Explainer
from dave_vit.methods import METHODS
from dave_vit.methods.options import declared_options
from dave_vit.metrics import METRICS
from dave_vit.models.families import FAMILIES
from hostile_files import BOX_TABLES, PICTURES, WEIGHTS, good_png

SEED = int(os.environ.get("DAVE_INVOCATIONS_SEED", "0"))
WORDS = ["NaN", "Infinity", "-1", "1e999", '"x"', "[]", "{}", "null", "true", "[1,2]", "", "1e30", "-0.5", "abc", "[[["]
"""Values of `--set`, of which most fit nothing."""
STRANGE = """-1 0 nan inf 1e999 bogus $x^_y$ ../.. 99999999999999999999 {} : - -- folder: folder:/none coco:. voc:.
    builtin: timm: timm:none hf: hf:/none bcos:none a=b dave.x=1 1,2,3 1,2,3,nan top9 top0 cpu:-1 meta""".split()
STRANGE += ["", "\x00", os.fsdecode(b"\xff")]
"""Values of flags, of which most fit nothing."""
SETTINGS = [None, 3, -1, 0.5, True, "x", "", [], {}, [[]], [{}], {"a": 1}, [None], float("nan"), float("inf"), 10**30]
SETTINGS += [[{"method": 3}], [{"metric": "gridpg", "options": 3}], {"kind": 3}, {"method": "dave", "label": []}]
COMMANDS = [
    "explain good.png",
    "compare good.png",
    "evaluate --limit 1",
    "doctor",
    "tune",
    "diff none none",
    "analyze rotation",
    "analyze convergence",
    "reproduce builtin",
    "probe none",
    "serve",
]


def flags_of(line: str) -> list[str]:
    """The flags of a command that take a value; what is written and where is not put to the test."""
    name, *more = line.split()
    command = typer.main.get_command(getattr(importlib.import_module(f"dave_vit.cli.{name}"), name))
    if hasattr(command, "get_command"):
        command = command.get_command(typer.Context(command), more[0])
    options = [one for one in command.params if one.opts[0].startswith("-") and not getattr(one, "is_flag", False)]
    return [one.opts[0] for one in options if one.name not in ("help", "out")]


class Reached(BaseException):
    """The invocation was accepted: what it computes is none of these tests' business."""


def _reached(*args, **options):
    raise Reached


_load = lru_cache(FAMILIES["builtin"].load)


def _as_loaded(*args):
    """The builtin model, which computes nothing; each time another one, as some options change it."""
    model = copy.copy(_load(*args))
    model.forward = _reached
    return model


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with one good picture, in a world in which nothing is computed or served."""
    import uvicorn

    from dave_vit.analysis.paper import reproduce

    monkeypatch.chdir(tmp_path)
    Path("good.png").write_bytes(good_png(64))
    Path("red").mkdir()
    Path("red/0.png").write_bytes(good_png())
    for holder, name in [
        (Explainer, "refine"),
        (bench.run.EvaluationRun, "complete"),
        (reproduce, "reproduce"),
        (uvicorn.Server, "run"),
    ]:
        monkeypatch.setattr(holder, name, _reached)
    monkeypatch.setattr(
        results, "compute_logits", lambda model, inputs: torch.arange(float(len(model.class_names)))[None]
    )
    monkeypatch.setitem(FAMILIES.data, "builtin", replace(FAMILIES["builtin"], load=_as_loaded))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def complaint(args: Sequence[str]) -> str:
    """What is wrong with the answer to an invocation; empty where it is one line and exit code 2, or accepted."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.run(list(args))
    except Reached:
        return ""
    except BaseException as error:
        place = next(at for at in reversed(traceback.extract_tb(error.__traceback__)) if "dave_vit" in at.filename)
        return f"{args}: {type(error).__name__}: {error} at {Path(place.filename).name}:{place.lineno}"
    lines = [line for line in err.getvalue().splitlines() if line and not line.startswith("note: ")]
    if code == 0 and not lines:
        return ""
    good = code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and "see the notes" not in lines[0]
    return "" if good else f"{args}: exit {code}, {lines}"


Invocation = Callable[[], list[str]]
"""Writes its files into the working folder and returns its words."""


def words(*args: str) -> Invocation:
    return lambda: list(args)


def with_file(name: str, content: bytes, *args: str) -> Invocation:
    def invocation() -> list[str]:
        Path(name).write_bytes(content)
        return list(args)

    return invocation


def of_options() -> Iterator[Invocation]:
    """Every option of every method, with values of which most do not fit."""
    seen = set()
    for method, word in itertools.product(METHODS, WORDS):
        for name, option in declared_options(method).items():
            if (name, str(option.type), word) not in seen:  # one method stands for all that share an option
                seen.add((name, str(option.type), word))
                yield words("explain", "good.png", "-q", "--method", method, "--set", f"{name}={word}")


def of_metrics() -> Iterator[Invocation]:
    for metric, word in itertools.product(METRICS, WORDS):
        for name in inspect.signature(METRICS[metric]).parameters:
            plain = f"evaluate -q --limit 1 --methods center --metric {metric} --set {metric}.{name}={word}"
            yield words(*plain.split(" "))


def of_flags() -> Iterator[Invocation]:
    for command in COMMANDS:
        yield from (words(*command.split(), flag, word) for flag, word in itertools.product(flags_of(command), STRANGE))


def of_plans() -> Iterator[Invocation]:
    usual = {"limit": 1, "methods": "center", "metrics": "energypg"}
    for name, value in itertools.product([one.name for one in fields(Plan)], SETTINGS):
        content = yaml.safe_dump({**usual, name: value}).encode()
        yield with_file("plan.yaml", content, "evaluate", "-q", "--plan", "plan.yaml")


PLAN_FILES = {
    "no UTF-8": b"\xff\xfe",
    "contains itself": b"models: &a [*a]",
    "a list": b"- 1",
    "a number": b"3",
    "empty": b"",
    "runs code": b"methods: !!python/object/apply:os.system [echo]",
    "a list as a name": b"? [1]\n: 2",
    "a number as a name": b"1: 2",
    "a date": b"limit: 2020-01-01",
    "deep": b"[" * 1500,
    "nul": b"\x00",
    "options in options": b"methods: {method: dave, options: {samples: {}}}",
    "a window of words": b"smoothing: {kind: mean, size: x}",
    "an unknown smoothing": b"smoothing: {foo: 1}",
}


def of_files() -> Iterator[Invocation]:
    for content, name in itertools.product(PLAN_FILES.values(), ("plan.yaml", "plan.toml")):
        yield with_file(name, content, "evaluate", "-q", "--limit", "1", "--plan", name)
    for content in PICTURES.values():
        yield with_file("bad.png", content, "explain", "bad.png")
        yield with_file("bad.png", content, "compare", "bad.png")
        yield with_file("bad.png", content, "compare", "good.png", "--mask", "bad.png")
    for write in WEIGHTS.values():
        yield partial(_weights, write)
    for content in BOX_TABLES.values():
        yield with_file("boxes.csv", content, "evaluate", "-q", "--data", "folder:.", "--methods", "center")


def _weights(write: Callable[[Path], Path]) -> list[str]:
    return ["explain", "good.png", "--weights", str(write(Path()))]


def corpus() -> Iterator[Invocation]:
    """Some 6,000 of them."""
    return itertools.chain(of_options(), of_metrics(), of_plans(), of_files(), of_flags())


def check(invocations: Iterable[Invocation], share: float, seed: int = SEED) -> None:
    """Tries a share of them, drawn by lot."""
    draw = random.Random(seed)
    answers = [complaint(invocation()) for invocation in invocations if draw.random() < share]
    print(f"DAVE_INVOCATIONS_SEED={seed}, {len(answers)} invocations")
    assert [answer for answer in answers if answer] == []
    assert answers


def test_bad_invocations_are_one_line(desk):
    check(corpus(), 0.012)


@pytest.mark.slow
def test_many_bad_invocations_are_one_line(desk):
    check(corpus(), float(os.environ.get("DAVE_INVOCATIONS", "0.06")), SEED + 1)


def test_several_bad_flags_at_once(desk):
    draw = random.Random(SEED)

    def drawn() -> list[str]:
        command = draw.choice(COMMANDS)
        flags = draw.choices(flags_of(command), k=draw.randint(2, 3))
        return [*command.split(), *(word for flag in flags for word in (flag, draw.choice(STRANGE + WORDS)))]

    check([drawn] * 60, 1.0)


@pytest.mark.skipif(os.name == "nt", reason="names are text there")
@pytest.mark.parametrize("name", [b"caf\xe9.png", b"$x^_y$.png", b"a\nb.png", "日本.png".encode(), b"x" * 240])
@pytest.mark.filterwarnings("ignore:Glyph")
def test_any_file_name_is_explained(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(os.fsdecode(name)).write_bytes(good_png())
    assert cli.run(["explain", os.fsdecode(name), "--method", "effective", "--json", "--out", "maps"]) == 0
    shown = capsys.readouterr().out
    assert shown.encode().decode() == shown
    assert len(list(Path("maps").iterdir())) == 4


def test_what_has_a_flag_is_not_set_as_well(desk, capsys):
    assert cli.run("explain good.png --set against=rivals".split()) == 2
    assert "give --against rivals instead" in capsys.readouterr().err


def test_quiet_errors_stand_for_themselves(desk, capsys):
    with patch.object(Explainer, "refine", _unable):
        assert cli.run("compare good.png -q --methods center,random".split()) == 2
    told = capsys.readouterr().err
    assert "random: cannot be done" in told
    assert "notes" not in told


def test_a_run_in_which_nothing_is_scored_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = "evaluate -q --limit 1 --methods center --metric energypg --min-confidence 0.99999999 --out run"
    assert cli.run(args.split()) == 2
    told = capsys.readouterr().err
    assert len(told.strip().splitlines()) == 1
    assert "notes" not in told


def _unable(*args):
    raise UnsupportedOperator("cannot be done")
