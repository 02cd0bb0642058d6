"""`dave compare`: draw the maps of several methods side by side."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dave_vit._internal.registry import split_names
from dave_vit.cli.common import Output, command, rich_table
from dave_vit.cli.options import DrawingOptions, MethodsOptions, ModelOptions, OptionGroup, Out, Plugins, flag, option
from dave_vit.errors import OptionError, escape_unprintable

_DEFAULT = MethodsOptions("dave,attn_lrp,chefer_lrp,legrad,smoothgrad,integrated_gradients,input_x_gradient")
# Side by side the maps of gradients are a hundred times larger than those of relevance.
_DRAWING = DrawingOptions(scales="own")

Target = Annotated[str, flag("--target -t CLASS", "Class to explain: name, part of a name, index, or top1 to top5.")]
Figure = Annotated[Literal["png", "svg", "pdf"], flag("--format", "Format of the figure.")]


class ObjectArea(OptionGroup):
    """The area of the object."""

    boxes: list[str] | None = option(
        "--box L,T,R,B", "Where the object is, in pixels of the image: left, top, right, bottom; repeatable."
    )
    mask: str | None = option("--mask FILE", "Where the object is: an image of the same size, not black inside.")


@command(
    "dave compare cat.jpg",
    "dave compare cat.jpg --methods dave,legrad,rollout --target tabby --box 40,30,300,280",
    "dave compare cat.jpg --methods all --mask cat_mask.png --out results",
)
def compare(
    *,
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="A file, or - for standard input.", show_default=False)],
    methods: MethodsOptions = _DEFAULT,
    model: ModelOptions,
    target: Target = "top1",
    area: ObjectArea,
    drawing: DrawingOptions = _DRAWING,
    out: Out = Path("dave-out"),
    figure: Figure = "png",
    plugins: Plugins = None,
    output: Output,
) -> None:
    """Draw the maps of several methods for one image and one class into one figure.

    Every map is scaled by the same rule: its positive part over its own 99 % quantile; with --scales shared all maps
    that are parts of the logit have one scale, so that methods with large values look brighter. With a box or a mask
    each map is scored: energy is the share of its positive part inside, pointing says whether its highest pixel is
    inside. The folder gets NAME.compare.dave.png and NAME.compare.dave.json, named as those of `dave explain`. A
    method that cannot explain the model is left out, with the reason.
    """
    from dave_vit.data.images import read_image
    from dave_vit.explanations.comparison import Comparison, compare_methods, object_region
    from dave_vit.explanations.output_files import OutputFolder

    names = _method_names(methods.names)
    folder = OutputFolder(out, [image, *filter(None, [area.mask])])
    picture = read_image(image)
    for note in picture.notes:
        output.note(f"{image}: {note}")
    loaded = model.load()
    output.advise(loaded)
    region = object_region(loaded, picture, area.boxes or [], area.mask)
    options: dict[str, Any] = {"samples": methods.samples, "seed": methods.seed, "against": methods.against}
    with output.progress(len(names)) as update:
        options |= {"report": lambda number, name: update(completed=number, description=name), "note": output.note}
        comparison = Comparison(compare_methods(loaded, picture, names, target, **options), region)
    explained = comparison.first.targets[0]
    labels = ["" if target == "top1" else target, "compare", "" if drawing.view == "map" else drawing.view]
    question = {"model": asdict(model), "methods": asdict(methods), "where": asdict(area), "target": target}
    question["drawing"] = asdict(drawing)
    files: dict[str, bytes] = {figure: comparison.figure(drawing.view, drawing.scales).to_bytes(figure)}
    record = {"source": escape_unprintable(image), "target": asdict(explained), "maps": comparison.rows}
    record = folder.write(picture, question, files, record, labels)
    output.print(f"{image}: {explained.name} ({explained.index}), {explained.probability:.1%}")
    cells = [["-" if value is None else str(value) for value in row.values()] for row in comparison.rows]
    output.print(rich_table(comparison.rows[0], cells), *(f"  {path}" for path in record["files"]))
    output.json(record)


def _method_names(text: str) -> list[str]:
    """Return the names of the methods; raise UnknownName for one that is not registered."""
    from dave_vit.methods import METHODS

    names = split_names(text, METHODS)
    if not names:
        raise OptionError("--methods is empty; give names from `dave methods` separated by commas, or all")
    for name in names:
        METHODS[name]
    return names
