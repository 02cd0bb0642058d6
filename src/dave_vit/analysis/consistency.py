"""Figure 2 of the paper: whether the map of a slightly moved picture is the moved map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dave_vit.analysis.catalog import method_entry
from dave_vit.analysis.section import Number, Picture, Section, Table
from dave_vit.analysis.subjects import Pictures, Setting, load, pictures
from dave_vit.bench import Smoothing
from dave_vit.bench.numbers.statistics import estimates
from dave_vit.bench.subject import MapMaker
from dave_vit.maps import positive, smooth
from dave_vit.metrics.consistency import consistency, moved, small_warp
from dave_vit.models import Adapter, traits_of
from dave_vit.viz import Drawing, draw, image_cell, map_cell
from dave_vit.viz.plots import style

METHODS = ("dave", "dave-paper", "attn_lrp", "legrad")
WINDOW = 15
_SHOWN = 3  # pictures in the figure


@dataclass(frozen=True)
class Moved:
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


def moved_maps(model: nn.Module, inputs: Tensor, target: Tensor, method: str, *, samples: int, seed: int) -> Moved:
    """Maps before and after the paper's small movement (5 degrees, 20 and 8 pixels of 224).

    Args:
        model: maps inputs to logits.
        inputs: [B,C,H,W].
        target: [B]; also for the moved pictures.
        method: label of `dave_vit.analysis.catalog`.
        samples: of the methods that draw any.
        seed: likewise.
    """
    warp = small_warp((inputs.shape[2], inputs.shape[3]))
    maker = MapMaker(method_entry(method, samples), Smoothing(), seed)
    shown = (inputs, moved(inputs, warp, fill=traits_of(model).fill))
    maps, others = (maker.maps(model, images, target) for images in shown)
    even, evened = (smooth(positive(part), "mean", WINDOW) for part in (maps, others))
    return Moved(maps, others, consistency(maps, others, warp), consistency(even, evened, warp))


def section(setting: Setting, methods: Sequence[str] = METHODS) -> Section:
    """Consistency of several methods on the first model of a setting."""
    model = load(setting.models[0], setting.device)
    shown = pictures(model, setting)
    found = {
        name: moved_maps(model, shown.inputs, shown.target, name, samples=setting.samples, seed=setting.seed)
        for name in methods
    }
    rows = [row for name, one in found.items() for row in _rows(name, one, setting.seed)]
    cells = tuple(
        (style(name).words, *(_words(row) for row in rows if row["method"] == name), str(len(shown))) for name in found
    )
    table = Table(("method", "pixel by pixel", f"after a {WINDOW} pixel mean", "n"), cells)
    text = (
        "The picture is turned by 5 degrees and shifted by 20 pixels to the right and 8 down (of 224). Above each map "
        "of the moved picture: the correlation of its positive part, moved back, with that of the original map, over "
        "the pixels that both show. Coarse maps correlate easily, so that the table also compares all of them after "
        "the same smoothing."
    )
    facts = setting.facts(images=len(shown), samples=setting.samples)
    caption = "Original above, moved picture below."
    picture = Picture("consistency", figure(model, shown, found, show=setting.show), caption, is_plot=False)
    return Section(
        "consistency", "Consistency under a small augmentation (figure 2)", text, facts, [table], rows, [picture]
    )


def _rows(name: str, one: Moved, seed: int) -> list[dict[str, Number]]:
    both = torch.stack([one.correlation, one.smoothed]).cpu().double().numpy()  # [2, images]
    means = estimates(both, list(range(both.shape[1])), seed)
    windows = (1, WINDOW)
    return [{"method": name, "window": window, **vars(mean)} for window, mean in zip(windows, means, strict=True)]


def _words(row: dict[str, Number]) -> str:
    return f"{row['mean']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" if row["n"] else "-"


def figure(model: Adapter, shown: Pictures, found: Mapping[str, Moved], *, show: bool = True) -> Drawing:
    """Two rows for each picture: itself and its maps, and the same of the moved picture."""
    warp = small_warp((shown.inputs.shape[2], shown.inputs.shape[3]))
    others = model.preprocessing.picture(moved(shown.inputs, warp, fill=model.traits.fill))
    rows, labels = [], []
    for number in range(min(_SHOWN, len(shown))):
        above = [image_cell(shown.colours[number], "picture")] if show else []
        below = [image_cell(others[number], "moved picture")] if show else []
        for name, one in found.items():
            above.append(map_cell(one.maps[number], style(name).words))
            below.append(map_cell(one.others[number], f"correlation {float(one.correlation[number]):.2f}"))
        rows += [above, below]
        labels += [shown.titles[number], "moved"]
    return draw(rows, labels=labels, width=1.7)
