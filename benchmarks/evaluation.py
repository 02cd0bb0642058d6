"""What scoring costs beside the passes of the model that it needs.

    python benchmarks/evaluation.py --model timm:vit_base_patch16_224 --batch 16 --device cuda --out benchmarks/results

A metric needs forward passes (deletion, insertion, irof, srg and r_oms: one per step; infidelity, sensitivity_n, saco
and single_deletion: one per mask), maps (consistency and random_logit: one; sanity: one per stage), or nothing but the
map that it is given (gridpg, energypg, pointing, average_precision, complexity, sparseness), whose one forward pass is
counted. The ratio is the time of the metric, together with the pass it is given, over the time of those passes alone;
at most 1.3 is wanted. Only road takes more: it fills pixels in, and for that solves linear equations of the size of the
image.
Weights and images are random: they do not change the cost. The file written is named after the environment.
"""

from __future__ import annotations

import argparse
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dave_vit import __version__, load_model
from dave_vit.evaluate.plan_entries import MethodEntry, Smoothing
from dave_vit.evaluate.scoring import MapMaker
from dave_vit.metrics import METRICS, Case, create_metric

METHOD = "input_x_gradient"
GRIDS = "gridpg"
FEW = {"infidelity": {"samples": 8}, "sensitivity_n": {"samples": 4, "sizes": 2}}  # a ratio needs no more


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


def clock(calls: list[Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """Seconds of calls, the shortest of some after one to warm up; in turn, so that what else runs disturbs all alike.

    On the CPU it is the time of this process alone.
    """
    now = time.perf_counter if device.type == "cuda" else time.process_time
    best = [float("inf")] * len(calls)
    for repeat in range(repeats + 1):
        for number, call in enumerate(calls):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = now()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat:
                best[number] = min(best[number], now() - started)
    return best


def case_of(model: nn.Module, inputs: Tensor) -> Case:
    """A batch with maps of one method."""
    explain = MapMaker(MethodEntry(METHOD), Smoothing(), seed=0).maps
    target = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    regions = torch.zeros(len(inputs), *inputs.shape[2:], dtype=torch.bool, device=inputs.device)
    regions[:, 60:160, 60:160] = True
    return Case(model, inputs, target, explain(model, inputs, target), regions, explain, (-2.0, -2.0, -2.0))


def measure(
    model: nn.Module, inputs: Tensor, repeats: int = 3, metrics: Mapping[str, Mapping[str, int]] | None = None
) -> list[Cost]:
    """The cost on a batch of every metric, or of some with options of their own."""
    case = case_of(model, inputs)
    chosen = {name: FEW.get(name, {}) for name in METRICS} if metrics is None else metrics
    return [_cost(name, case, repeats, options) for name, options in chosen.items()]


def _cost(name: str, case: Case, repeats: int, options: Mapping[str, int]) -> Cost:
    metric = create_metric(name, **options)
    given = _grid_case(case) if name == GRIDS else case

    def forward() -> Tensor:
        with torch.no_grad():
            return case.model(case.inputs)

    def explain() -> Tensor:
        return case.explain(case.model, case.inputs, case.target)

    rows: list[int] = []
    hook = case.model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    metric.score(given)
    hook.remove()
    of_maps = name in ("consistency", "sanity", "random_logit")
    unit, taken = clock([explain if of_maps else forward, lambda: metric.score(given)], case.inputs.device, repeats)
    count = len(case.inputs)
    if of_maps:
        maps = getattr(metric, "stages", 1)
        return Cost(name, maps * unit / count, taken / count, f"{maps} maps")
    if rows:
        passes = sum(rows) / count
        return Cost(name, passes * unit / count, taken / count, f"{passes:g} forward passes")
    return Cost(name, unit / count, (taken + unit) / count, "the map's own forward pass")


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
