"""`dave compare`: draw the maps of several methods side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dave_vit._internal.registry import split_names
from dave_vit.cli.common import Output, command, examples
from dave_vit.cli.options import DrawingOptions, MethodsOptions, Out, Plugins, expand_groups, flag
from dave_vit.cli.preparation import PreparedModel
from dave_vit.errors import DaveError, ImageError, OptionError, escape_unprintable

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from dave_vit.data.images import LoadedImage
    from dave_vit.explain.classes import ClassExplanation
    from dave_vit.models import Adapter
    from dave_vit.viz import Cell, Drawing

app = command()

_DEFAULT = MethodsOptions("dave,attn_lrp,chefer_lrp,legrad,smoothgrad,integrated_gradients,input_x_gradient")
_COLUMNS = 4
_DRAWING = DrawingOptions(
    scales="own"
)  # side by side the maps of gradients are a hundred times larger than those of relevance

Target = Annotated[
    str, flag("Class to explain: name, part of a name, index, or top1 to top5.", "--target", "-t", metavar="CLASS")
]
Figure = Annotated[Literal["png", "svg", "pdf"], flag("Format of the figure.", "--format")]


@dataclass(frozen=True)
class ObjectArea:
    """The area of the object."""

    boxes: Annotated[
        list[str] | None,
        flag(
            "Where the object is, in pixels of the image: left, top, right, bottom; repeatable.",
            "--box",
            metavar="L,T,R,B",
        ),
    ] = None
    mask: Annotated[
        str | None, flag("Where the object is: an image of the same size, not black inside.", metavar="FILE")
    ] = None


@app.command(
    epilog=examples(
        "dave compare cat.jpg",
        "dave compare cat.jpg --methods dave,legrad,rollout --target tabby --box 40,30,300,280",
        "dave compare cat.jpg --methods all --mask cat_mask.png --out results",
    )
)
@expand_groups
def compare(
    *,
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="A file, or - for standard input.", show_default=False)],
    methods: MethodsOptions = _DEFAULT,
    model: PreparedModel,
    target: Target = "top1",
    area: ObjectArea,
    drawing: DrawingOptions = _DRAWING,
    out: Out = Path("dave-out"),
    figure: Figure = "png",
    plugins: Plugins,
    output: Output,
) -> None:
    """Draw the maps of several methods for one image and one class into one figure.

    Every map is scaled by the same rule: its positive part over its own 99 % quantile; with --scales shared all maps
    that are parts of the logit have one scale, and the larger ones outshine the others by far. With a box or a mask
    each map is scored: energy is the share of its positive part inside, pointing says whether its highest pixel is
    inside. The folder gets NAME.compare.dave.png and NAME.compare.dave.json, under names as those of `dave explain`. A
    method that cannot explain the model is left out, with the reason.
    """
    from dave_vit.data.images import read_image
    from dave_vit.explain.output_files import OutputFolder

    names = _method_names(methods.names)
    picture = read_image(image)
    for note in picture.notes:
        output.note(f"{image}: {note}")
    loaded = model.load()
    output.advise(loaded)
    region = _region(loaded, picture, area)
    results = _explain_all(loaded, picture, names, target, methods, output)
    rows = [_row(name, result, region) for name, result in results.items()]
    explained = next(iter(results.values())).targets[0]
    labels = ["" if target == "top1" else target, "compare", "" if drawing.view == "map" else drawing.view]
    question = {"model": asdict(model), "methods": asdict(methods), "where": asdict(area), "target": target}
    question["drawing"] = asdict(drawing)
    files: dict[str, bytes] = {figure: _draw(results, rows, region, drawing).to_bytes(figure)}
    record = {"source": escape_unprintable(image), "target": asdict(explained), "maps": rows}
    record = OutputFolder(out, [image, *filter(None, [area.mask])]).write(picture, question, files, record, labels)
    output.print(f"{image}: {explained.name} ({explained.index}), {explained.probability:.1%}")
    output.print(_table(rows), *(f"  {path}" for path in record["files"]))
    output.json(record)


def _method_names(text: str) -> list[str]:
    """Return the names of the methods; raise UnknownName for one that is not registered."""
    from dave_vit.methods import METHODS

    names = split_names(text, METHODS)
    if not names:
        raise OptionError("--methods names none; give names of `dave methods` with commas between, or all")
    for name in names:
        METHODS[name]
    return names


def _region(model: Adapter, picture: LoadedImage, area: ObjectArea) -> Tensor | None:
    """Return the area of the object in the model's input, [H, W]; None where none was given."""
    import numpy as np
    import torch

    from dave_vit.data.geometry import Geometry
    from dave_vit.data.images import read_image

    if not area.boxes and area.mask is None:
        return None
    if area.boxes and area.mask is not None:
        raise OptionError("--box and --mask are both given; give one of them")
    geometry = Geometry.measure(model.preprocess, picture.image.size)
    if area.mask is None:
        region = geometry.boxes_to_mask([_box(text) for text in area.boxes or []])
    else:
        drawn = read_image(area.mask).image
        if drawn.size != picture.image.size:
            raise ImageError(
                f"--mask {area.mask} has {drawn.size} pixels and the image {picture.image.size}; give one mask "
                "of the image's size"
            )
        region = geometry.mask_to_input(np.asarray(drawn.convert("L")) > 0)
    if not region.any():
        raise OptionError("the box or mask lies outside of what the model sees, the centre of the image; give another")
    return torch.from_numpy(region)


def _box(text: str) -> tuple[float, float, float, float]:
    from dave_vit.engine.boxes import parse_box

    try:
        left, top, right, bottom = parse_box(text)
    except ValueError as error:
        raise OptionError(
            f"--box {text}; expected four numbers left,top,right,bottom, such as 40,30,300,280"
        ) from error
    if right <= left or bottom <= top:
        raise OptionError(f"--box {text} is empty; expected left < right and top < bottom")
    return left, top, right, bottom


def _explain_all(
    model: Adapter, picture: LoadedImage, names: list[str], target: str, methods: MethodsOptions, output: Output
) -> dict[str, ClassExplanation]:
    """Return the explanation of each method, by its name."""
    from dave_vit.explain.classes import classify, explain_classes
    from dave_vit.explain.explainer import Explainer
    from dave_vit.methods.options import filter_options

    classified = classify(model, picture)
    targets = classified.pick(target)
    if len(targets) > 1:
        raise OptionError(f"--target {target} means {len(targets)} classes; compare draws the maps of one")
    results: dict[str, ClassExplanation] = {}
    reason = ""
    with output.progress(len(names)) as progress:
        for number, name in enumerate(names):
            progress.update(done=number, text=name)
            options = filter_options(name, samples=methods.samples, seed=methods.seed)
            try:
                explainer = Explainer(model, name, against=methods.against, **options)
                results[name] = explain_classes(explainer, classified, targets)
            except DaveError as error:
                if len(names) == 1:
                    raise
                reason = f"{name}: {error}"
                output.note(f"{name} is left out: {error}")
    if not results:
        raise OptionError(f"none of the methods can explain this model; {reason}")
    return results


def _row(name: str, result: ClassExplanation, region: Tensor | None) -> dict[str, Any]:
    """Return the record of one map; scores are None where the map has no positive part."""
    import torch

    from dave_vit.metrics import energypg, pointing

    row = {"method": name, "seconds": round(result.seconds, 3), "samples": result.explanation.samples}
    if region is None:
        return row
    values = torch.as_tensor(result.panels[0].map).cpu()[None]
    scores = {"energy": energypg(values, region[None]), "pointing": pointing(values, region[None])}
    return row | {key: round(float(score), 4) if score.isfinite() else None for key, score in scores.items()}


def _draw(
    results: dict[str, ClassExplanation], rows: Sequence[dict[str, Any]], region: Tensor | None, drawing: DrawingOptions
) -> Drawing:
    """Draw the image and all maps, scaled by one rule."""
    from dave_vit.viz import HUES, draw_grid, image_cell

    first = next(iter(results.values()))
    photo = first.photo.resize(2)
    cells = [image_cell(photo.frame_seen_area(photo.image))]
    if region is not None:
        cells = [replace(cells[0], contours=(photo.place([region.double()]).numpy(), ((0.5, HUES[1]),)))]
    for row, cell in zip(rows, _cells(results, drawing), strict=True):
        score = f", energy {row['energy']:.1%}" if row.get("energy") is not None else ""
        cells.append(cell.with_title(f"{row['method']}{score}"))
    scaled = "one scale for maps of logits" if drawing.scales == "shared" else "each map on its own scale"
    title = f"{first.picture.name}: {first.panels[0].target}, {first.explainer.model.spec}; {scaled}"
    return draw_grid([cells[start : start + _COLUMNS] for start in range(0, len(cells), _COLUMNS)], title=title)


def _cells(results: dict[str, ClassExplanation], drawing: DrawingOptions) -> list[Cell]:
    """Return the maps; those that are parts of a logit share a scale if --scales shared was given."""
    from dave_vit.viz import panel_cells

    panels = {name: result.placed[0] for name, result in results.items()}
    together = [name for name, panel in panels.items() if panel.unit and drawing.scales == "shared"]
    shared = panel_cells([panels[name] for name in together], view=drawing.view)
    alone = {name: panel_cells([panel], view=drawing.view)[0] for name, panel in panels.items() if name not in together}
    cells = alone | dict(zip(together, shared, strict=True))
    return [cells[name] for name in panels]


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    return table
