"""A plugin file that adds one of everything that can be added."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from PIL import Image
from torchvision import transforms

from dave_vit.analysis import AnalysisOptions, analysis, flag
from dave_vit.data import DATASETS, Dataset, Item
from dave_vit.engine import EFFECTIVE
from dave_vit.engine.rules.products import GateRule
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
    """Grey images, dark or bright, with a box around the left half."""

    form = "greys:COUNT"

    def __init__(self, spec, limit=None):
        self.count, self.class_names = min(int(spec), limit or int(spec)), ["dark", "bright"]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return Item(f"grey-{index}", index % 2, ((0, 0, 8, 16),))

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
