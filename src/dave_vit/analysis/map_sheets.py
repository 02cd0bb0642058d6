"""Sheets of images and their maps.

Whether maps move with the image (figure 2 of the paper), the steps to DAVE (figure 4), several models, images of one
class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dave_vit.analysis import MapAnalysisOptions, analysis, flag
from dave_vit.analysis.inputs import ImageBatch, count_flag, files_flag, load_classes, method_flag
from dave_vit.engine.target_names import find_class
from dave_vit.evaluate import ModelEntry
from dave_vit.evaluate.scoring import MapMaker
from dave_vit.evaluate.statistics.intervals import MeanEstimate, estimate_means
from dave_vit.maps import collapse, positive, smooth
from dave_vit.methods import create_method
from dave_vit.methods.options import filter_options
from dave_vit.metrics.stability import consistency, small_warp, warp_images
from dave_vit.models import Adapter, traits_of
from dave_vit.viz.figures import Cell, Drawing, draw_grid, image_cell, map_cell
from dave_vit.viz.plots import method_style
from dave_vit.viz.report_section import ReportFigure, ReportTable, Section, estimate_cell

WINDOW = 15
_SHOWN = 3  # images in the figure
_CAPTION = "Positive part of each map over its own 99 % quantile."


@dataclass(frozen=True)
class WarpedMaps:
    """Maps of images and of the same images slightly moved.

    Attributes:
        moved: the moved images, [B,C,H,W].
        maps: maps of the images, [B,H,W].
        others: maps of the moved images, [B,H,W].
        correlation: correlation of the positive parts, pixel by pixel, [B].
        smoothed: that correlation after a mean filter over both maps, [B].
    """

    moved: Tensor
    maps: Tensor
    others: Tensor
    correlation: Tensor
    smoothed: Tensor

    def estimates(self) -> list[MeanEstimate]:
        """Estimate the mean correlation, pixel by pixel and after smoothing."""
        both = torch.stack([self.correlation, self.smoothed]).cpu().double().numpy()  # [2, images]
        return estimate_means(both, range(both.shape[1]), bounds=(-1.0, 1.0))


@dataclass(frozen=True)
class ConstructionOptions(MapAnalysisOptions):
    """Options of the analysis, of a few files."""

    images: tuple[str, ...] = files_flag()
    n: int = count_flag(3)


@dataclass(frozen=True)
class ConsistencyOptions(MapAnalysisOptions):
    """Options of the analysis.

    Attributes:
        methods: labels of `dave_vit.analysis.inputs`.
    """

    images: tuple[str, ...] = files_flag()
    methods: tuple[str, ...] = flag(
        ("dave", "dave-paper", "attn_lrp", "legrad"),
        "Names of `dave methods`, dave-paper or dave-official.",
        metavar="A,B,...",
    )
    n: int = count_flag(6)


def compare_warped_maps(model: nn.Module, inputs: Tensor, target: Tensor, maker: MapMaker) -> WarpedMaps:
    """Compute maps before and after the paper's small movement (5 degrees, 20 and 8 pixels of 224).

    Args:
        model: maps inputs to logits.
        inputs: [B,C,H,W].
        target: [B]; also for the moved images.
        maker: makes the maps.
    """
    warp = small_warp((inputs.shape[2], inputs.shape[3]))
    moved = warp_images(inputs, warp, fill=traits_of(model).fill)
    maps, others = (maker.maps(model, images, target) for images in (inputs, moved))
    smooth_maps, smooth_others = (smooth(positive(part), "mean", WINDOW) for part in (maps, others))
    correlations = consistency(maps, others, warp), consistency(smooth_maps, smooth_others, warp)
    return WarpedMaps(moved, maps, others, *correlations)


@analysis("consistency", first_model=True)
def analyze_consistency(options: ConsistencyOptions) -> Section:
    """Measure whether the map of a slightly moved image is the moved map (figure 2)."""
    _, model, images = next(options.load_with_images())
    shown = images.inputs, images.target
    methods = {name: compare_warped_maps(model, *shown, options.maker(name)) for name in options.methods}
    rows, cells = [], []
    for name, warped in methods.items():
        means = warped.estimates()
        pairs = zip((1, WINDOW), means, strict=True)
        rows += [{"method": name, "window": window, **vars(mean)} for window, mean in pairs]
        intervals = (estimate_cell(mean.mean, mean.low, mean.high).format() for mean in means)
        cells.append((method_style(name).label, *intervals, str(len(images))))
    table = ReportTable(("method", "pixel by pixel", f"after a {WINDOW} pixel mean", "n"), tuple(cells))
    text = (
        "The image is turned by 5 degrees and shifted by 20 pixels to the right and 8 down (of 224). Above each map "
        "of the moved image: the correlation of its positive part, moved back, with that of the original map, over "
        "the pixels that both show. Coarse maps correlate easily, so that the table also compares all of them after "
        "the same smoothing."
    )
    facts = options.facts(images=len(images), samples=options.samples)
    drawing = draw_methods(model, images, methods, show=options.show)
    figure = ReportFigure("consistency", drawing, "Original above, moved image below.", is_plot=False)
    title = "Consistency under a small augmentation (figure 2)"
    return Section("consistency", title, text, facts, [table], rows, [figure])


def draw_methods(model: Adapter, images: ImageBatch, methods: Mapping[str, WarpedMaps], *, show: bool) -> Drawing:
    """Draw two rows for each image: it with its maps, and the moved image with its maps."""
    moved = model.preprocessing.picture(next(iter(methods.values())).moved)
    rows, labels = [], []
    for index in range(min(_SHOWN, len(images))):
        above = [image_cell(images.colours[index], "picture")] if show else []
        below = [image_cell(moved[index], "moved picture")] if show else []
        for name, warped in methods.items():
            above.append(map_cell(warped.maps[index], method_style(name).label))
            below.append(map_cell(warped.others[index], f"correlation {float(warped.correlation[index]):.2f}"))
        rows += [above, below]
        labels += [images.titles[index], "moved"]
    return draw_grid(rows, labels=labels, width=1.7)


STEPS = {
    "input x gradient": ("input_x_gradient", {}),
    "effective transformation": ("effective", {}),
    "equivariant": ("equivariant", {"preset": "paper"}),
    "DAVE, as in the paper": ("dave", {"preset": "paper"}),
    "DAVE, default": ("dave", {}),
}


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


def draw_steps(images: ImageBatch, maps: dict[str, Tensor], *, show: bool) -> Drawing:
    """Draw a row for each image and a column for each step."""
    rows = []
    for index, colours in enumerate(images.colours):
        picture = [image_cell(colours, "picture")] if show else []
        rows.append(picture + [map_cell(column[index], title) for title, column in maps.items()])
    return draw_grid(rows, labels=images.titles, width=1.7)


@dataclass(frozen=True)
class ModelComparisonOptions(MapAnalysisOptions):
    """Options of the analysis.

    Attributes:
        method: label of `dave_vit.analysis.inputs`.
    """

    images: tuple[str, ...] = files_flag()
    method: str = method_flag()
    n: int = count_flag(3)
    models: tuple[ModelEntry, ...] = tuple(ModelEntry(name, label=name) for name in ("builtin", "builtin-bcos"))


@analysis("models")
def compare_models(options: ModelComparisonOptions) -> Section:
    """Show maps of the same images for several models; by default builtin and builtin-bcos."""
    maker = options.maker(options.method)
    columns: dict[str, tuple[ImageBatch, Tensor]] = {}
    for label, model, images in options.load_with_images(recognised=False):
        columns[label] = (images, maker.maps(model, images.inputs, images.target))
    facts = options.facts(images=len(images), samples=options.samples, method=options.method)
    text = "Each row is an image, each column a model; above a map, the predicted class, which is explained."
    figure = ReportFigure("models", draw_models(columns, show=options.show), _CAPTION, is_plot=False)
    return Section("models", "One image, several models", text, facts, pictures=[figure])


def draw_models(columns: dict[str, tuple[ImageBatch, Tensor]], *, show: bool) -> Drawing:
    """Draw a row for each image and a column for each model."""
    first = next(iter(columns.values()))[0]
    rows = []
    for index in range(len(first)):
        cells = [image_cell(first.colours[index], "picture" if index == 0 else "")] if show else []
        cells += [map_cell(maps[index], f"{label}: {own.titles[index]}") for label, (own, maps) in columns.items()]
        rows.append(cells)
    return draw_grid(rows, width=1.9)


@dataclass(frozen=True)
class ClassesOptions(MapAnalysisOptions):
    """Options of the analysis; n is the number of images of each class.

    Attributes:
        names: names or indices of classes; by default those with the most images.
        method: label of `dave_vit.analysis.inputs`.
    """

    names: tuple[str, ...] = flag((), "Names or indices of classes.", metavar="CLASS", positional=True)
    method: str = method_flag()
    n: int = count_flag(4)


@analysis("classes", first_model=True)
def analyze_classes(options: ClassesOptions) -> Section:
    """Show several images of one class with their maps, to see what recurs."""
    _, model = next(options.load())
    labels = [find_class(name, model.class_names) for name in options.names]
    sheets = load_classes(model, options.data, options.n, labels)
    maker = options.maker(options.method)
    maps = {label: maker.maps(model, images.inputs, images.target) for label, images in sheets.items()}
    facts = options.facts(images=f"{options.n} per class", samples=options.samples, method=options.method)
    text = "Maps of images of one class that the model recognises: what recurs is what the class is."
    figure = ReportFigure("classes", draw_sheets(sheets, maps, show=options.show), _CAPTION, is_plot=False)
    return Section("classes", "Class-consistent features", text, facts, pictures=[figure])


def draw_sheets(sheets: dict[int, ImageBatch], maps: dict[int, Tensor], *, show: bool) -> Drawing:
    """Draw two rows for each class: images, and their maps."""
    rows: list[list[Cell]] = []
    labels: list[str] = []
    for label, images in sheets.items():
        if show:
            rows.append([image_cell(colours, "") for colours in images.colours])
        rows.append([replace(map_cell(values, ""), bar=None) for values in maps[label]])
        labels += [images.titles[0], "map"] if show else [images.titles[0]]
    return draw_grid(rows, labels=labels, width=1.5)
