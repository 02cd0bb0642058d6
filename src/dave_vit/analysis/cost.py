"""Table 3 of the paper, measured: time and memory of each method beside one forward pass, over samples and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit.analysis.base import analysis, flag
from dave_vit.analysis.catalog import method_entry
from dave_vit.analysis.inputs import AnalysisOptions, load_images
from dave_vit.analysis.meter import ResourceUse, measure
from dave_vit.engine.forward import logits_of
from dave_vit.errors import OptionError
from dave_vit.methods import create_method
from dave_vit.viz import DAVE, Drawing
from dave_vit.viz.plots import SERIES, add_legend, create_plots, method_style
from dave_vit.viz.report_section import Number, ReportFigure, ReportTable, Section

METHODS = (
    "input_x_gradient",
    "integrated_gradients",
    "smoothgrad",
    "legrad",
    "attn_lrp",
    "chefer_lrp",
    "effective",
    "dave",
)
_CHUNK = 4  # rows of a pass, the same for all methods, so that memory tells of methods and not of chunks
_PAPER = {  # computation and memory, as table 3 of the paper states them
    "input_x_gradient": "O(1)",
    "integrated_gradients": "O(steps)",
    "smoothgrad": "O(steps)",
    "legrad": "O(steps)",
    "chefer_lrp": "O(1)",
    "attn_lrp": "O(steps)",
    "dave": "O(samples)",
}


@dataclass(frozen=True)
class Growth:
    """How something grows: value = start + slope * x, and the power of a power law.

    Attributes:
        start: at x = 0.
        slope: per unit of x.
        fit: share of the variance that the straight line explains, R^2.
        power: exponent of value ~ x ** power; 1 is linear, 0 is flat.
    """

    start: float
    slope: float
    fit: float
    power: float


def growth(at: Sequence[float], values: Sequence[float]) -> Growth:
    """Least squares through a straight line, and through a straight line of the logarithms."""
    x, y = np.asarray(at, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(x) < 2 or len(x) != len(y):
        raise OptionError(f"{len(x)} points and {len(y)} values; a growth needs two or more of each")
    slope, start = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    left = float(((y - start - slope * x) ** 2).sum())
    power = float(np.polyfit(np.log(x), np.log(np.maximum(y, 1e-12)), 1)[0])
    return Growth(float(start), float(slope), 1 - left / spread if spread > 1e-12 * float((y**2).sum()) else 1.0, power)


def attribution_cost(model: nn.Module, inputs: Tensor, target: Tensor, label: str, samples: int) -> ResourceUse:
    """What one map costs."""
    return measure(partial(_attribute, model, inputs, target, label, samples), inputs.device)


def _attribute(model: nn.Module, inputs: Tensor, target: Tensor, label: str, samples: int) -> Tensor:
    entry = method_entry(label, samples)
    options: dict[str, Any] = dict(entry.options)
    if "samples" in options or "steps" in options:
        options["chunk"] = _CHUNK
    return create_method(entry.method, model, **options).attribute(inputs, target)


def deep_vit(depth: int, size: int = 224) -> nn.Module:
    """A Vision Transformer as narrow as DeiT-Tiny with random weights: cost does not depend on them."""
    from timm.models.vision_transformer import VisionTransformer

    made: nn.Module = VisionTransformer(
        img_size=size, patch_size=16, embed_dim=192, depth=depth, num_heads=3, num_classes=10
    )
    return made.eval()


@dataclass(frozen=True)
class Costs:
    """All that was measured.

    Attributes:
        forward: one forward pass of the model with one picture.
        methods: by label and number of samples.
        depths: by label and number of layers, each beside a forward pass of the same model.
    """

    forward: ResourceUse
    methods: Mapping[str, Mapping[int, ResourceUse]]
    depths: Mapping[str, Mapping[int, ResourceUse]]


def costs(model: nn.Module, inputs: Tensor, target: Tensor, samples: Sequence[int], depths: Sequence[int]) -> Costs:
    """Measures everything, on one picture [1,C,H,W]."""
    methods: dict[str, dict[int, ResourceUse]] = {}
    for label in METHODS:
        counts = samples if _takes_samples(label) else samples[:1]
        methods[label] = {count: attribution_cost(model, inputs, target, label, count) for count in counts}
    by_depth: dict[str, dict[int, ResourceUse]] = {"forward pass": {}, "input_x_gradient": {}, "dave": {}}
    picture = torch.randn(1, 3, *inputs.shape[2:], generator=torch.Generator().manual_seed(0)).to(inputs.device)
    for depth in depths:
        deep = deep_vit(depth, inputs.shape[2]).to(inputs.device)
        by_depth["forward pass"][depth] = forward_cost(deep, picture)
        for label in ("input_x_gradient", "dave"):
            by_depth[label][depth] = attribution_cost(deep, picture, torch.zeros(1, dtype=torch.long), label, _CHUNK)
    return Costs(forward_cost(model, inputs), methods, by_depth)


def forward_cost(model: nn.Module, inputs: Tensor) -> ResourceUse:
    """What one forward pass costs, without gradients."""
    return measure(partial(logits_of, model, inputs), inputs.device)


def _takes_samples(label: str) -> bool:
    return bool({"samples", "steps"} & set(method_entry(label, 1).options))


@dataclass(frozen=True)
class CostOptions(AnalysisOptions):
    """Options of the analysis.

    Attributes:
        samples: at which cost is measured.
        depths: layers of the measured models.
    """

    n: int = 1
    samples: tuple[int, ...] = flag((4, 8, 16), "At which cost is measured.", metavar="A,B,...")
    depths: tuple[int, ...] = flag((3, 6, 12), "Layers of the measured models.", metavar="A,B,...")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("samples", "depths"):
            given = getattr(self, name)
            if len(set(given)) < 2 or min(given) < 1:
                raise OptionError(f"{name} {list(given)}; expected two or more different numbers, 1 or above")
            object.__setattr__(self, name, tuple(sorted(set(given))))


@analysis("cost", first_model=True)
def analyze_cost(options: CostOptions) -> Section:
    """Time and memory of each method beside one forward pass, over samples and depth (table 3)."""
    _, model = next(options.load())
    one = load_images(model, options)
    spent = costs(model, one.inputs[:1], one.target[:1], options.samples, options.depths)
    times = growth(options.samples, [each.seconds for each in spent.methods["dave"].values()])
    memory = growth(options.samples, [_mib(each) for each in spent.methods["dave"].values()])
    layers = growth(options.depths, [_mib(each) for each in spent.depths["dave"].values()])
    text = (
        f"One picture, {_CHUNK} rows in a pass, the shortest of three times; memory is the peak of all tensors beyond "
        f"model and input. One forward pass takes {spent.forward.seconds * 1e3:.0f} ms and "
        f"{_mib(spent.forward):.0f} MiB. DAVE's time grows with samples to the power {times.power:.2f} "
        f"({times.slope / spent.forward.seconds:.1f} forward passes a sample, straight line R^2 {times.fit:.3f}); its "
        f"memory by {memory.slope:.2f} MiB a sample beyond {memory.start:.0f} MiB, the draws kept for the next "
        f"picture. Every layer adds {layers.slope:.1f} MiB (R^2 {layers.fit:.3f}): memory is linear in depth, since "
        "nothing is recomputed; the square root of the number of layers that the paper states needs checkpointing."
    )
    shown = [_method_table(spent, options.samples), _depth_table(spent)]
    picture = ReportFigure("cost", _figure(spent), "DAVE and the methods that take samples, and growth with depth.")
    facts = options.facts(images=1, chunk=_CHUNK, threads=torch.get_num_threads(), device=options.device)
    return Section("cost", "Cost (table 3), measured", text, facts, shown, _rows(spent), [picture])


def _mib(spent: ResourceUse) -> float:
    return spent.peak_bytes / 2**20


def _method_table(measured: Costs, samples: Sequence[int]) -> ReportTable:
    forward = measured.forward
    rows = []
    for label, by_count in measured.methods.items():
        last = by_count[max(by_count)]
        fitted = growth(samples, [spent.seconds for spent in by_count.values()]) if len(by_count) > 1 else None
        rows.append(
            (
                method_style(label).label,
                _PAPER.get(label, "-"),
                str(max(by_count)) if fitted else "-",
                f"{last.seconds / forward.seconds:.1f}",
                f"{last.peak_bytes / forward.peak_bytes:.1f}",
                f"T^{fitted.power:.2f}" if fitted else "1",
            )
        )
    head = ("method", "time in the paper", "T", "time / forward", "memory / forward", "fitted time")
    return ReportTable(head, tuple(rows), "Relative to one forward pass without gradients.")


def _depth_table(measured: Costs) -> ReportTable:
    rows = []
    for label, by_depth in measured.depths.items():
        time = growth(list(by_depth), [spent.seconds for spent in by_depth.values()])
        memory = growth(list(by_depth), [_mib(spent) for spent in by_depth.values()])
        cells = (f"{spent.seconds * 1e3:.0f} ms, {_mib(spent):.0f} MiB" for spent in by_depth.values())
        rows.append((_words(label), *cells, f"L^{time.power:.2f}", f"L^{memory.power:.2f}", f"{memory.slope:.1f}"))
    head = (
        "what",
        *(f"{depth} layers" for depth in next(iter(measured.depths.values()))),
        "time",
        "memory",
        "MiB a layer",
    )
    return ReportTable(head, tuple(rows), f"Width of DeiT-Tiny, random weights; DAVE with {_CHUNK} samples.")


def _words(label: str) -> str:
    return label if label == "forward pass" else method_style(label).label


def _figure(measured: Costs) -> Drawing:
    figure, (left, middle, right) = create_plots(3, width=4.4)
    sampled = {label: by_count for label, by_count in measured.methods.items() if len(by_count) > 1}
    for label, by_count in sampled.items():
        how = method_style(label)
        line = {"color": how.colour, "linestyle": how.dash, "marker": how.marker, "markersize": 4, "label": how.label}
        left.plot(list(by_count), [one.seconds / measured.forward.seconds for one in by_count.values()], **line)
        middle.plot(list(by_count), [one.peak_bytes / measured.forward.peak_bytes for one in by_count.values()], **line)
    left.set(xlabel="samples or steps T", ylabel="time over one forward pass")
    middle.set(xlabel="samples or steps T", ylabel="peak memory over one forward pass")
    for axes in (left, middle):
        counts = list(next(iter(sampled.values())))
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_ylim(bottom=0)
        add_legend(axes)
    colours = {"forward pass": SERIES[5], "input_x_gradient": method_style("input_x_gradient").colour, "dave": DAVE}
    for label, by_depth in measured.depths.items():
        values = [_mib(one) for one in by_depth.values()]
        right.plot(list(by_depth), values, color=colours[label], marker="o", markersize=4, label=_words(label))
    right.set(xlabel="layers", ylabel="peak memory in MiB")
    right.set_xticks(list(next(iter(measured.depths.values()))))
    right.set_ylim(bottom=0)
    add_legend(right)
    return figure


def _rows(measured: Costs) -> list[dict[str, Number]]:
    rows = [_row("forward pass", None, None, measured.forward)]
    rows += [_row(label, T, None, one) for label, by_count in measured.methods.items() for T, one in by_count.items()]
    rows += [_row(label, None, L, one) for label, by_depth in measured.depths.items() for L, one in by_depth.items()]
    return rows


def _row(what: str, samples: int | None, layers: int | None, spent: ResourceUse) -> dict[str, Number]:
    return {
        "what": what,
        "samples": samples,
        "layers": layers,
        "seconds": spent.seconds,
        "peak_bytes": spent.peak_bytes,
    }
