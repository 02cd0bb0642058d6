"""What scoring costs beside the passes of the model that it needs.

    python benchmarks/evaluation.py --model timm:vit_base_patch16_224 --batch 16 --device cuda --out benchmarks/results

A metric needs forward passes (deletion and insertion: one per step), maps (consistency: one; sanity: one per stage), or
nothing but the map that it is given (gridpg, energypg, pointing), whose one forward pass is counted. The ratio is the
time of the metric, together with the pass it is given, over the time of those passes alone; at most 1.3 is wanted.
Weights and images are random: they do not change the cost. The file written is named after the environment.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dave_vit import __version__, load_model
from dave_vit.bench.plan import MethodEntry, Smoothing
from dave_vit.bench.subject import Explainer
from dave_vit.metrics import METRICS, Case, create_metric

METHOD = "input_x_gradient"
GRIDS = "gridpg"


@dataclass(frozen=True)
class Cost:
    """One metric; seconds are for one map.

    Attributes:
        metric: name.
        needed: seconds of the passes or maps that it needs.
        taken: seconds of these and the metric together.
        passes: what it needs, in words.
    """

    metric: str
    needed: float
    taken: float
    passes: str

    @property
    def ratio(self) -> float:
        return self.taken / self.needed


def clock(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of a call, the median of some after one to warm up; on the CPU its own time, whatever else runs."""
    now = time.perf_counter if device.type == "cuda" else time.process_time
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = now()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(now() - started)
    return statistics.median(times[1:])


def case_of(model: nn.Module, inputs: Tensor) -> Case:
    """A batch with maps of one method."""
    explain = Explainer(MethodEntry(METHOD), Smoothing(), seed=0).maps
    target = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    regions = torch.zeros(len(inputs), *inputs.shape[2:], dtype=torch.bool, device=inputs.device)
    regions[:, 60:160, 60:160] = True
    return Case(model, inputs, target, explain(model, inputs, target), regions, explain, (-2.0, -2.0, -2.0))


def measure(model: nn.Module, inputs: Tensor, repeats: int = 3) -> list[Cost]:
    """The cost of every metric on a batch."""
    device = inputs.device
    case = case_of(model, inputs)
    count = len(inputs)
    with torch.no_grad():
        forward = clock(lambda: model(inputs), device, repeats)
    one_map = clock(lambda: case.explain(model, inputs, case.target), device, repeats)
    costs = []
    for name in METRICS:
        metric = create_metric(name)
        given = _grid_case(case) if name == GRIDS else case
        taken = clock(lambda metric=metric, given=given: metric.score(given), device, repeats)
        if name in ("deletion", "insertion"):
            steps = len(metric.score(given).at)
            needed, words, given_pass = steps * forward, f"{steps} forward passes", 0.0
        elif name in ("consistency", "sanity"):
            maps = getattr(metric, "stages", 1)
            needed, words, given_pass = maps * one_map, f"{maps} maps", 0.0
        else:
            needed, words, given_pass = forward, "the map's own forward pass", forward
        costs.append(Cost(name, needed / count, (taken + given_pass) / count, words))
    return costs


def _grid_case(case: Case) -> Case:
    """The same batch as grids of four."""
    maps = case.maps[:, None].expand(-1, 4, -1, -1)
    return Case(case.model, case.inputs, case.target[:, None].expand(-1, 4), maps, case.regions, case.explain)


def table(costs: list[Cost]) -> str:
    lines = ["| metric | needs | needed, ms per map | with the metric, ms per map | ratio |", "|---|---|---|---|---|"]
    for cost in costs:
        numbers = f"{1e3 * cost.needed:.2f} | {1e3 * cost.taken:.2f} | {cost.ratio:.2f}"
        lines.append(f"| {cost.metric} | {cost.passes} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="timm:deit_tiny_patch16_224")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = load_model(given.model, "random", given.device)
    device = torch.device(given.device)
    inputs = torch.randn(given.batch, 3, 224, 224, device=device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    facts = f"{given.model}, batch {given.batch}, {where}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    text = f"{facts}\n\n{table(measure(model, inputs, given.repeats))}\n"
    print(text)
    if given.out:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"evaluation-{given.model}-{where}-torch{torch.__version__}")
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{name}.md").write_text(f"# What scoring costs (dave-vit {__version__})\n\n{text}")


if __name__ == "__main__":
    main()
