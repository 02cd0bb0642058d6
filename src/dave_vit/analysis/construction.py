"""Figure 4 of the paper: what each step from the gradient to DAVE does to a map."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from dave_vit.analysis.base import analysis
from dave_vit.analysis.inputs import ImageBatch, MapAnalysisOptions, count_flag, files_flag
from dave_vit.maps import collapse
from dave_vit.methods import create_method
from dave_vit.methods.options import filter_options
from dave_vit.viz import Drawing, draw_grid, image_cell, map_cell
from dave_vit.viz.report_section import ReportFigure, Section

STEPS = {
    "input x gradient": ("input_x_gradient", {}),
    "effective transformation": ("effective", {}),
    "equivariant": ("equivariant", {"preset": "paper"}),
    "DAVE, as in the paper": ("dave", {"preset": "paper"}),
    "DAVE, default": ("dave", {}),
}


@dataclass(frozen=True)
class ConstructionOptions(MapAnalysisOptions):
    """Options of the analysis."""

    images: tuple[str, ...] = files_flag()
    n: int = count_flag(3)


def construction(model: nn.Module, inputs: Tensor, target: Tensor, *, samples: int, seed: int) -> dict[str, Tensor]:
    """Compute the maps of each step, [B,H,W]."""
    maps = {}
    for title, (name, options) in STEPS.items():
        method = create_method(name, model, **options, **filter_options(name, samples=samples, seed=seed))
        maps[title] = collapse(method.attribute(inputs, target))
    return maps


@analysis("construction", first_model=True)
def analyze_construction(options: ConstructionOptions) -> Section:
    """Show what each step from the gradient to DAVE does to a map (figure 4)."""
    figures = []
    for index, (label, model, images) in enumerate(options.load_with_images()):
        maps = construction(model, images.inputs, images.target, samples=options.samples, seed=options.seed)
        name = "construction" if index == 0 else f"construction-{index + 1}"
        caption = f"{label}: positive part of the map, each over its own 99 % quantile."
        figures.append(ReportFigure(name, draw_steps(images, maps, show=options.show), caption, is_plot=False))
    facts = options.facts(images=len(options.images) or options.n, samples=options.samples)
    text = (
        "From the gradient to DAVE. Freezing the operators removes their variation (effective transformation), the "
        "average over flips, turns and shifts removes what belongs to the patch grid (equivariant), and noise removes "
        "what does not survive it. The last column is this package's default, which also sets the class against its "
        "rivals, favours in each layer what speaks for it (the gamma rule), and keeps what is significant at every "
        "scale."
    )
    return Section("construction", "Progressive construction (figure 4)", text, facts, pictures=figures)


def draw_steps(images: ImageBatch, maps: dict[str, Tensor], *, show: bool = True) -> Drawing:
    """Draw a row for each image and a column for each step."""
    rows = []
    for index, colours in enumerate(images.colours):
        picture = [image_cell(colours, "picture")] if show else []
        rows.append(picture + [map_cell(column[index], title) for title, column in maps.items()])
    return draw_grid(rows, labels=images.titles, width=1.7)
