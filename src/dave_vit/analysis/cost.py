"""Table 3 of the paper, measured: time and memory of each method beside one forward pass, over samples and depth."""

import timeit
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit._internal.environment import synchronized_time
from dave_vit._internal.torch_private import DispatchMode, tree_leaves
from dave_vit.analysis.inputs import AnalysisOptions, analysis, flag, method_entry
from dave_vit.engine.forward import compute_logits
from dave_vit.errors import OptionError
from dave_vit.methods import create_method
from dave_vit.viz.figures import Drawing
from dave_vit.viz.plots import SERIES, add_legend, create_plots, method_style
from dave_vit.viz.report_section import Number, ReportFigure, ReportTable, Section


@dataclass(frozen=True)
class ResourceUse:
    """Seconds, and the most bytes that tensors held at once beyond those before."""

    seconds: float
    peak_bytes: int

    @property
    def mib(self) -> float:
        """Peak memory in MiB."""
        return self.peak_bytes / 2**20


def measure(work: Callable[[], Any], device: torch.device, repeats: int = 3) -> ResourceUse:
    """Measure the shortest time of some repeats and the peak memory of one more.

    Args:
        work: function to measure; it runs once beforehand to warm up.
        device: device it runs on.
        repeats: the shortest counts, since other programs can only make it longer.
    """
    if device.type == "cuda":
        work()  # libraries allocate their workspaces once
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with _TensorMemory() as memory:
            work()
        peak = memory.peak
    times = timeit.repeat(work, timer=partial(synchronized_time, device), repeat=repeats, number=1)
    return ResourceUse(min(times), peak)


class _TensorMemory(DispatchMode):
    """Sums the memory of all live tensors; memory that an operation uses internally is not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._sizes: dict[int, int] = {}  # of live storages, by their ids

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = {id(storage) for storage in _storages((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            if id(storage) not in self._sizes and id(storage) not in arguments:  # no view, and not there before
                self._sizes[id(storage)] = storage.nbytes()
                self.peak = max(self.peak, sum(self._sizes.values()))
                weakref.finalize(storage, self._sizes.pop, id(storage), None)
        return output


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


METHODS = {  # the measured methods, and their computation as table 3 of the paper states it
    "input_x_gradient": "O(1)",
    "integrated_gradients": "O(steps)",
    "smoothgrad": "O(steps)",
    "legrad": "O(steps)",
    "attn_lrp": "O(steps)",
    "chefer_lrp": "O(1)",
    "effective": "-",
    "dave": "O(samples)",
}
Uses = Mapping[int, ResourceUse]
"""Resource use by the number of samples or layers."""

_CHUNK = 4  # rows of a pass, the same for all methods, so that memory depends on methods and not on chunks
_FORWARD = "forward pass"


@dataclass(frozen=True)
class Growth:
    """How a quantity grows: value = start + slope * x, and the exponent of a power law.

    Attributes:
        start: value at x = 0.
        slope: increase per unit of x.
        fit: share of the variance that the straight line explains, R^2.
        power: exponent of value ~ x ** power; 1 is linear, 0 is flat.
    """

    start: float
    slope: float
    fit: float
    power: float


def growth(at: Sequence[float], values: Sequence[float]) -> Growth:
    """Fit a straight line to values, and another one to their logarithms, by least squares."""
    x, y = np.asarray(at, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(x) < 2 or len(x) != len(y):
        raise OptionError(f"{len(x)} points and {len(y)} values; a growth needs two or more of each")
    slope, start = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    fit = float(np.corrcoef(x, y)[0, 1] ** 2) if spread > 1e-12 * float((y**2).sum()) else 1.0
    return Growth(float(start), float(slope), fit, float(np.polyfit(np.log(x), np.log(np.maximum(y, 1e-12)), 1)[0]))


def fit_growth(uses: Uses, quantity: Literal["seconds", "mib"]) -> Growth:
    """Fit the growth of the time, or of the memory."""
    return growth(list(uses), [getattr(use, quantity) for use in uses.values()])


@dataclass(frozen=True)
class Costs:
    """All measurements.

    Attributes:
        forward: one forward pass of the model with one image.
        methods: over numbers of samples, by label.
        depths: over numbers of layers, by label and for a forward pass.
    """

    forward: ResourceUse
    methods: Mapping[str, Uses]
    depths: Mapping[str, Uses]


def forward_cost(model: nn.Module, inputs: Tensor) -> ResourceUse:
    """Measure one forward pass without gradients."""
    return measure(partial(compute_logits, model, inputs), inputs.device)


def attribution_cost(model: nn.Module, inputs: Tensor, target: Tensor, label: str, samples: int) -> ResourceUse:
    """Measure one map."""
    entry = method_entry(label, samples)
    options: dict[str, Any] = {**entry.options, **({"chunk": _CHUNK} if entry.options else {})}  # of samples or steps
    return measure(lambda: create_method(entry.method, model, **options).attribute(inputs, target), inputs.device)


def measure_costs(
    model: nn.Module, inputs: Tensor, target: Tensor, samples: Sequence[int], depths: Sequence[int]
) -> Costs:
    """Measure everything on one image [1,C,H,W]."""
    methods = {}
    for label in METHODS:
        counts = samples if method_entry(label, 1).options else samples[:1]
        methods[label] = {count: attribution_cost(model, inputs, target, label, count) for count in counts}
    by_depth: dict[str, dict[int, ResourceUse]] = {_FORWARD: {}, "input_x_gradient": {}, "dave": {}}
    image = torch.randn(1, 3, *inputs.shape[2:], generator=torch.Generator().manual_seed(0)).to(inputs.device)
    for depth in depths:
        deep = deep_vit(depth, inputs.shape[2]).to(inputs.device)
        by_depth[_FORWARD][depth] = forward_cost(deep, image)
        for label in ("input_x_gradient", "dave"):
            by_depth[label][depth] = attribution_cost(deep, image, torch.zeros(1, dtype=torch.long), label, _CHUNK)
    return Costs(forward_cost(model, inputs), methods, by_depth)


def deep_vit(depth: int, size: int) -> nn.Module:
    """Build a Vision Transformer of DeiT-Tiny's width with random weights, on which cost does not depend."""
    from timm.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(size, 16, num_classes=10, embed_dim=192, depth=depth, num_heads=3)
    return model.eval()


@dataclass(frozen=True)
class CostOptions(AnalysisOptions):
    """Options of the analysis.

    Attributes:
        samples: numbers of samples to measure.
        depths: numbers of layers to measure.
    """

    n: int = 1
    samples: tuple[int, ...] = flag((4, 8, 16), "Numbers of samples to measure.", metavar="A,B,...")
    depths: tuple[int, ...] = flag((3, 6, 12), "Numbers of layers to measure.", metavar="A,B,...")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("samples", "depths"):
            values = getattr(self, name)
            if len(set(values)) < 2 or min(values) < 1:
                raise OptionError(f"{name} {list(values)}; expected two or more different numbers, 1 or above")
            object.__setattr__(self, name, tuple(sorted(set(values))))


@analysis("cost", first_model=True)
def analyze_cost(options: CostOptions) -> Section:
    """Measure time and memory of each method beside one forward pass, over samples and depth (table 3)."""
    _, model, images = next(options.load_with_images())
    costs = measure_costs(model, images.inputs[:1], images.target[:1], options.samples, options.depths)
    times, memory = fit_growth(costs.methods["dave"], "seconds"), fit_growth(costs.methods["dave"], "mib")
    layers = fit_growth(costs.depths["dave"], "mib")
    text = (
        f"One image, {_CHUNK} rows in a pass, the shortest of three times; memory is the peak of all tensors beyond "
        f"model and input. One forward pass takes {costs.forward.seconds * 1e3:.0f} ms and "
        f"{costs.forward.mib:.0f} MiB. DAVE's time grows with samples to the power {times.power:.2f} "
        f"({times.slope / costs.forward.seconds:.1f} forward passes per sample, straight line R^2 {times.fit:.3f}); "
        f"its memory by {memory.slope:.2f} MiB per sample beyond {memory.start:.0f} MiB, the draws kept for the next "
        f"image. Every layer adds {layers.slope:.1f} MiB (R^2 {layers.fit:.3f}): memory is linear in depth, since "
        "nothing is recomputed; the square root of the number of layers that the paper states needs checkpointing."
    )
    tables = [_method_table(costs), _depth_table(costs)]
    figure = ReportFigure("cost", _draw(costs), "DAVE and the methods that take samples, and growth with depth.")
    facts = options.facts(images=1, chunk=_CHUNK, threads=torch.get_num_threads(), device=options.device)
    return Section("cost", "Cost (table 3), measured", text, facts, tables, _rows(costs), [figure])


def _method_table(costs: Costs) -> ReportTable:
    rows = []
    for label, uses in costs.methods.items():
        count, last = max(uses.items())
        sampled = len(uses) > 1
        time = f"{last.seconds / costs.forward.seconds:.1f}"
        memory = f"{last.peak_bytes / costs.forward.peak_bytes:.1f}"
        power = f"T^{fit_growth(uses, 'seconds').power:.2f}" if sampled else "1"
        rows.append((method_style(label).label, METHODS[label], str(count) if sampled else "-", time, memory, power))
    head = ("method", "time in the paper", "T", "time / forward", "memory / forward", "fitted time")
    return ReportTable(head, tuple(rows), "Relative to one forward pass without gradients.")


def _depth_table(costs: Costs) -> ReportTable:
    rows = []
    for label, uses in costs.depths.items():
        memory = fit_growth(uses, "mib")
        cells = (f"{use.seconds * 1e3:.0f} ms, {use.mib:.0f} MiB" for use in uses.values())
        powers = (f"L^{fit_growth(uses, 'seconds').power:.2f}", f"L^{memory.power:.2f}")
        rows.append((method_style(label).label, *cells, *powers, f"{memory.slope:.1f}"))
    layers = (f"{depth} layers" for depth in costs.depths[_FORWARD])
    caption = f"Width of DeiT-Tiny, random weights; DAVE with {_CHUNK} samples."
    return ReportTable(("what", *layers, "time", "memory", "MiB a layer"), tuple(rows), caption)


def _draw(costs: Costs) -> Drawing:
    figure, plots = create_plots(3, width=4.4)
    left, middle, right = plots
    for label, uses in costs.methods.items():
        if len(uses) > 1:
            line = {**method_style(label).line, "markersize": 4}
            left.plot(list(uses), [use.seconds / costs.forward.seconds for use in uses.values()], **line)
            middle.plot(list(uses), [use.mib / costs.forward.mib for use in uses.values()], **line)
    for label, uses in costs.depths.items():
        style = method_style(label)
        colour = SERIES[5] if label == _FORWARD else style.colour
        memory = [use.mib for use in uses.values()]
        right.plot(list(uses), memory, color=colour, marker="o", markersize=4, label=style.label)
    left.set(xlabel="samples or steps T", ylabel="time over one forward pass")
    middle.set(xlabel="samples or steps T", ylabel="peak memory over one forward pass")
    right.set(xlabel="layers", ylabel="peak memory in MiB")
    for axes, counts in zip(plots, (costs.methods["dave"], costs.methods["dave"], costs.depths["dave"]), strict=True):
        axes.set_xticks(list(counts), [str(count) for count in counts])
        axes.set_ylim(bottom=0)
        add_legend(axes)
    return figure


def _rows(costs: Costs) -> list[dict[str, Number]]:
    entries: list[tuple[str, int | None, int | None, ResourceUse]] = [(_FORWARD, None, None, costs.forward)]
    entries += [(label, T, None, use) for label, uses in costs.methods.items() for T, use in uses.items()]
    entries += [(label, None, L, use) for label, uses in costs.depths.items() for L, use in uses.items()]
    return [{"what": what, "samples": T, "layers": L, **vars(use)} for what, T, L, use in entries]
