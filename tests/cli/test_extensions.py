"""One plugin file adds everything that can be added, and the command line uses each of them."""

from __future__ import annotations

import json
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

REGISTRIES = (METHODS, METRICS, ENGINES, FAMILIES, DATASETS, PRESETS, REDUCERS, ANALYSES, SCORES)

PLUGIN = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from PIL import Image
from torchvision import transforms

from dave_vit.analysis import AnalysisOptions, analysis, flag
from dave_vit.data import DATASETS, Dataset, Item
from dave_vit.engine import EFFECTIVE
from dave_vit.engine.rules.activations import GateRule
from dave_vit.engine.score_registry import SCORES
from dave_vit.evaluate.engines import ENGINES, EngineOptions
from dave_vit.evaluate.worker import Worker
from dave_vit.methods import METHODS, Method, MethodInfo
from dave_vit.methods.base import multiply_by_input
from dave_vit.methods.presets import PRESETS, Preset
from dave_vit.metrics import METRICS, Metric, Scores
from dave_vit.models import Adapter, Preprocessing
from dave_vit.models.families import FAMILIES, Family
from dave_vit.neighborhood import Neighborhood, Noise, Spatial
from dave_vit.reduce import REDUCERS, Mean
from dave_vit.viz.report_section import ReportTable, Section

WITH_SINE = EFFECTIVE.extend("effective with sine", {"sin": GateRule(1.0)})


@METHODS.register("sine")
class SineMethod(Method):
    """Input times gradient with a rule for sine."""

    info = MethodInfo("Input times gradient with a rule for sine.", "example", "1 forward, 1 backward")

    def _explain(self, images, target, pass_size):
        return multiply_by_input(self._gradient(images, target, WITH_SINE), images, target)


@REDUCERS.register("plain_mean")
class PlainMean(Mean):
    """The mean under another name."""


@PRESETS.register("still")
def still(model):
    """Noise alone."""
    return Preset(Neighborhood(Spatial(flip=0.0, rotation=0.0, translation=0.0), Noise("additive", 0.1)), Mean())


@SCORES.register("total")
@dataclass(frozen=True)
class Total:
    """The sum of all logits, times a number."""

    form: ClassVar[str] = "total:FACTOR"

    factor: float

    @classmethod
    def parse(cls, text, context):
        return cls(float(text))

    def __call__(self, output):
        return self.factor * output.sum(1)


@METRICS.register("mass")
class Mass(Metric):
    """How much positive mass a map has."""

    summary = "Sum of the positive part."
    higher_is_better = True

    def score(self, case):
        return Scores(case.maps.clamp(min=0).flatten(1).sum(1))


class Sine(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x)


def load(name, weights=None, classes=None):
    """Return a small model whose name is its side."""
    size = int(name)
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(3 * size * size, 8)]
    model = torch.nn.Sequential(*layers, Sine(), torch.nn.Linear(8, 2))
    transform = transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor()])
    return Adapter(model, Preprocessing(transform), ["dark", "bright"], spec=f"sines:{name}")


FAMILIES.register("sines")(Family(load, "sines:SIDE", "two layers with a sine between"))


@DATASETS.register("greys")
class Greys(Dataset):
    """Grey images."""

    form = "greys:COUNT"

    def __init__(self, spec, limit=None):
        self.count, self.class_names = min(int(spec), limit or int(spec)), ["dark", "bright"]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return Item(f"grey-{index}", index % 2)

    def digest(self):
        return f"greys {self.count}"

    def image(self, index):
        return Image.new("RGB", (16, 16), (40 + 30 * (index % 7),) * 3)


@ENGINES.register("here")
class Here:
    """Computes one task after the other in this process."""

    def __init__(self, options: EngineOptions) -> None:
        self.device = "cpu" if options.device == "auto" else options.device

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        pass

    def run(self, job, folder, tasks, finished):
        worker = Worker(job, self.device)
        for task in tasks:
            folder.write(worker.compute(task))
            finished(task)
        worker.close()


@dataclass(frozen=True)
class CountingOptions(AnalysisOptions):
    """Options of the analysis."""

    most: int = flag(3, "Counts to this number.")


@analysis("counting")
def count(options: CountingOptions) -> Section:
    """Count."""
    rows = [{"number": number} for number in range(options.most)]
    table = ReportTable(("number",), tuple((str(row["number"]),) for row in rows))
    return Section("counting", "Counting", "Numbers.", {}, [table], rows)
'''


@pytest.fixture(autouse=True)
def plugin(tmp_path, monkeypatch) -> None:
    """Work in a folder with the plugin and a picture; registries forget what the plugin adds."""
    for table in REGISTRIES:
        monkeypatch.setattr(table, "_entries", dict(table._entries))
    monkeypatch.setattr(registry, "_PLUGINS", set())
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PLUGIN)
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
    line = "evaluate --model sines:8 --data greys:4 --methods sine --metric mass --engine here --out run"
    (result,) = run(line, capsys)["results"]
    assert (result["method"], result["metric"], result["n"]) == ("sine", "mass", 4)


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
