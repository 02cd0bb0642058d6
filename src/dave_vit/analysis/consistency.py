"""Figure 2 of the paper: whether the map of a slightly moved picture is the moved map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dave_vit.analysis.base import analysis, flag
from dave_vit.analysis.inputs import ImageBatch, MapAnalysisOptions, image_count_flag, image_files_flag, load_images
from dave_vit.evaluate.scoring import MapMaker
from dave_vit.evaluate.statistics.intervals import MeanEstimate, estimate_means
from dave_vit.maps import positive, smooth
from dave_vit.metrics.consistency import consistency, small_warp, warp_images
from dave_vit.models import Adapter, traits_of
from dave_vit.viz import Drawing, draw_grid, image_cell, map_cell
from dave_vit.viz.pages import format_estimate
from dave_vit.viz.plots import method_style
from dave_vit.viz.report_section import Number, ReportFigure, ReportTable, Section

WINDOW = 15
_SHOWN = 3  # pictures in the figure


@dataclass(frozen=True)
class WarpedMaps:
    """Maps of pictures and of the same pictures slightly moved.

    Attributes:
        maps: [B,H,W].
        others: of the moved pictures, [B,H,W].
        correlation: of the positive parts, pixel by pixel, [B].
        smoothed: the same after a mean filter over both, [B].
    """

    maps: Tensor
    others: Tensor
    correlation: Tensor
    smoothed: Tensor


@dataclass(frozen=True)
class ConsistencyOptions(MapAnalysisOptions):
    """Options of the analysis.

    Attributes:
        methods: labels of `dave_vit.analysis.catalog`.
    """

    images: tuple[str, ...] = image_files_flag()
    methods: tuple[str, ...] = flag(
        ("dave", "dave-paper", "attn_lrp", "legrad"),
        "Names of `dave methods`, dave-paper or dave-official.",
        metavar="A,B,...",
    )
    n: int = image_count_flag(6)


def compare_warped_maps(model: nn.Module, inputs: Tensor, target: Tensor, maker: MapMaker) -> WarpedMaps:
    """Maps before and after the paper's small movement (5 degrees, 20 and 8 pixels of 224).

    Args:
        model: maps inputs to logits.
        inputs: [B,C,H,W].
        target: [B]; also for the moved pictures.
        maker: of the maps.
    """
    warp = small_warp((inputs.shape[2], inputs.shape[3]))
    shown = (inputs, warp_images(inputs, warp, fill=traits_of(model).fill))
    maps, others = (maker.maps(model, images, target) for images in shown)
    even, evened = (smooth(positive(part), "mean", WINDOW) for part in (maps, others))
    return WarpedMaps(maps, others, consistency(maps, others, warp), consistency(even, evened, warp))


@analysis("consistency", first_model=True)
def analyze_consistency(options: ConsistencyOptions) -> Section:
    """Whether the map of a slightly moved picture is the moved map (figure 2)."""
    _, model = next(options.load())
    shown = load_images(model, options)
    methods = {
        name: compare_warped_maps(model, shown.inputs, shown.target, options.maker(name)) for name in options.methods
    }
    estimated = {name: _estimates(one, options.seed) for name, one in methods.items()}
    rows: list[dict[str, Number]] = [
        {"method": name, "window": window, **vars(mean)}
        for name, means in estimated.items()
        for window, mean in zip((1, WINDOW), means, strict=True)
    ]
    cells = tuple(
        (
            method_style(name).label,
            *(format_estimate(mean.mean, mean.low, mean.high) for mean in means),
            str(len(shown)),
        )
        for name, means in estimated.items()
    )
    table = ReportTable(("method", "pixel by pixel", f"after a {WINDOW} pixel mean", "n"), cells)
    text = (
        "The picture is turned by 5 degrees and shifted by 20 pixels to the right and 8 down (of 224). Above each map "
        "of the moved picture: the correlation of its positive part, moved back, with that of the original map, over "
        "the pixels that both show. Coarse maps correlate easily, so that the table also compares all of them after "
        "the same smoothing."
    )
    facts = options.facts(images=len(shown), samples=options.samples)
    caption = "Original above, moved picture below."
    picture = ReportFigure("consistency", figure(model, shown, methods, show=options.show), caption, is_plot=False)
    return Section(
        "consistency", "Consistency under a small augmentation (figure 2)", text, facts, [table], rows, [picture]
    )


def _estimates(one: WarpedMaps, seed: int) -> list[MeanEstimate]:
    """Pixel by pixel, and after smoothing."""
    both = torch.stack([one.correlation, one.smoothed]).cpu().double().numpy()  # [2, images]
    return estimate_means(both, list(range(both.shape[1])), seed)


def figure(model: Adapter, shown: ImageBatch, methods: Mapping[str, WarpedMaps], *, show: bool = True) -> Drawing:
    """Two rows for each picture: itself and its maps, and the same of the moved picture."""
    warp = small_warp((shown.inputs.shape[2], shown.inputs.shape[3]))
    others = model.preprocessing.picture(warp_images(shown.inputs, warp, fill=model.traits.fill))
    rows, labels = [], []
    for number in range(min(_SHOWN, len(shown))):
        above = [image_cell(shown.colours[number], "picture")] if show else []
        below = [image_cell(others[number], "moved picture")] if show else []
        for name, one in methods.items():
            above.append(map_cell(one.maps[number], method_style(name).label))
            below.append(map_cell(one.others[number], f"correlation {float(one.correlation[number]):.2f}"))
        rows += [above, below]
        labels += [shown.titles[number], "moved"]
    return draw_grid(rows, labels=labels, width=1.7)
