"""One plugin file adds everything that can be added, and the command line uses each of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dave_vit import cli
from dave_vit._internal import registry
from dave_vit.analysis import ANALYSES
from dave_vit.data.sets import DATASETS
from dave_vit.engine.score_registry import SCORES
from dave_vit.evaluate.engines import ENGINES
from dave_vit.methods import METHODS
from dave_vit.methods.presets import PRESETS
from dave_vit.metrics import METRICS
from dave_vit.models.families import FAMILIES
from dave_vit.reduce import REDUCERS

PLUGIN = Path(__file__).parents[1] / "support" / "example_plugin.py"
REGISTRIES = (METHODS, METRICS, ENGINES, FAMILIES, DATASETS, PRESETS, REDUCERS, ANALYSES, SCORES)


@pytest.fixture(autouse=True)
def plugin(tmp_path, monkeypatch) -> None:
    """Work in a folder with the plugin and a picture; registries forget what the plugin adds."""
    for table in REGISTRIES:
        monkeypatch.setattr(table, "data", dict(table.data))
    monkeypatch.setattr(registry, "_PLUGINS", {})
    monkeypatch.chdir(tmp_path)
    shutil.copy(PLUGIN, "mine.py")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)).save("photo.png")


def run(line: str, capsys: pytest.CaptureFixture[str]) -> object:
    """Run a command with the plugin, and return its JSON."""
    code = cli.run([*line.split(), "--plugin", "mine.py", "--json"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return json.loads(shown.out)


def test_methods_are_listed(capsys):
    assert "sine" in [row["name"] for row in run("methods", capsys)]


def test_a_method_with_a_rule_of_its_own_explains_a_model_of_a_new_family(capsys):
    (record,) = run("explain photo.png --model sines:8 --method sine", capsys)
    assert (record["model"], record["method"]) == ("sines:8", "sine")
    assert list(Path().glob("*/photo*.png"))
    assert cli.run("explain photo.png --plugin mine.py --model sines:".split()) == 2
    assert "write sines:SIDE" in capsys.readouterr().err
    assert cli.run("explain photo.png --model sines:8 --method effective".split()) == 2  # sine has no rule there
    assert "sin" in capsys.readouterr().err


def test_a_reducer_and_a_preset(capsys):
    line = "explain photo.png --samples 2 --preset still --set reducer=plain_mean"
    (record,) = run(line, capsys)
    assert record["settings"]["reducer"]["type"] == "PlainMean"
    assert record["settings"]["neighborhood"]["spatial"]["rotation"] == 0


def test_a_score(capsys):
    (once,) = run("explain photo.png --model sines:8 --method sine --score total:1", capsys)
    (twice,) = run("explain photo.png --model sines:8 --method sine --score total:2", capsys)
    assert twice["value"] == pytest.approx(2 * once["value"])


def test_a_metric_a_data_set_and_an_engine(capsys):
    line = "evaluate --model sines:8 --data greys:4 --methods sine --metric mass,energypg --engine here --out run"
    results = run(line, capsys)["results"]
    assert [(r["method"], r["metric"], r["n"]) for r in results] == [("sine", "mass", 4), ("sine", "energypg", 4)]


def test_an_analysis(capsys):
    assert len(run("analyze counting --most 5", capsys)["rows"]) == 5


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("explain", ["sine", "still", "total:FACTOR", "sines:SIDE"]),
        ("evaluate", ["mass", "greys:COUNT", "here", "sines:SIDE"]),
    ],
)
def test_help_lists_what_the_plugin_adds(command, names, capsys):
    assert cli.run([command, "--plugin", "mine.py", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [name for name in names if name not in text] == []


def test_help_lists_families_and_data_sets_by_their_form(capsys):
    assert cli.run(["evaluate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "builtin, bcos:NAME, hf:NAME_OR_FOLDER" in text
    assert [form for form in ("coco:DIR, folder:DIR, imagenet:DIR", "voc:DIR") if form not in text] == []
    assert "{" not in text


def test_families_describe_themselves():
    assert all(FAMILIES[name].summary and FAMILIES[name].form for name in FAMILIES)
