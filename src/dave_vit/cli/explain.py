"""`dave explain`: what the model saw in images."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dave_vit.atomic import write_files
from dave_vit.cli.common import Output, Progress, command, examples
from dave_vit.cli.options import MethodOptions, ModelOptions, Out, grouped
from dave_vit.errors import ImageError, OptionError

if TYPE_CHECKING:
    from dave_vit.results import Explainer, Result

app = command()

Images = Annotated[
    list[str], typer.Argument(metavar="IMAGE", help="Files, folders, or - for standard input.", show_default=False)
]
Target = Annotated[
    str,
    typer.Option(
        "--target", "-t", metavar="CLASS", help="Name, part of a name or index of a class, top1 to top5, or all-top5."
    ),
]
Figure = Annotated[Literal["png", "svg", "pdf"], typer.Option("--format", help="Of the side-by-side figure.")]
Animate = Annotated[
    Literal["gif", "webp"] | None, typer.Option("--animate", help="Also show how the map refines, as an animation.")
]

Score = Annotated[
    str | None,
    typer.Option(
        "--score",
        metavar="SCORE",
        help="Explain a score of the output: query:N:CLASS, box:x0,y0,x1,y1:CLASS, region:x0,y0,x1,y1:CLASS (in pixels "
        "of the photograph), similarity:FILE, value, token:WORD.",
    ),
]
Boxes = Annotated[bool, typer.Option("--boxes", help="One map for each box that a detector finds.")]
Threshold = Annotated[float, typer.Option("--threshold", help="The least probability of a box.")]


@app.command(
    epilog=examples(
        "dave explain cat.jpg",
        "dave explain photos/ --target all-top5 --out results",
        "dave explain cat.jpg --target tabby --against 'tiger cat'",
        "dave explain cat.jpg --model timm:vit_base_patch16_224 --target tabby --method smoothgrad",
    )
)
@grouped
def explain(
    *,
    images: Images,
    model: ModelOptions,
    target: Target = "top1",
    method: MethodOptions,
    out: Out = Path("dave-out"),
    figure: Figure = "png",
    animate: Animate = None,
    score: Score = None,
    boxes: Boxes = False,
    threshold: Threshold = 0.5,
    output: Output,
) -> None:
    """Explain what the model saw in images.

    For each image NAME the folder gets NAME.overlay.png (map over image), NAME.panels.png (image, map and standard
    error side by side), NAME.npz (raw numbers) and NAME.json (classes, options, versions). An image that cannot be
    read is reported and the others are still done.
    """
    from dave_vit.data.images import find_images
    from dave_vit.results import Explainer

    options = method.options()
    if animate:
        options = {"chunk": _frame_samples(method), **options}
    sources = find_images(images)
    with output.progress(len(sources), "loading the model") as progress:
        explainer = Explainer(model.load(), method.name, weights=model.weights, against=method.against, **options)
        if score is not None or boxes:
            output.json(_explain_scores(explainer, sources, score, threshold, out, output))
            return
        records = list(_explain_all(explainer, sources, target, out, (figure, animate), output, progress))
    output.json(records)
    if len(records) < len(sources):
        raise typer.Exit(2)


def _explain_all(
    explainer: Explainer,
    sources: Sequence[str],
    target: str,
    out: Path,
    kinds: tuple[str, str | None],
    output: Output,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """The record of each image that could be read, after its files are written; `kinds` of figure and animation."""
    for number, (source, name) in enumerate(zip(sources, distinct_names(sources), strict=True)):
        progress.update(done=number, text=name)
        try:
            results = _results(explainer, source, target, output, partial(_move, progress, number))
        except ImageError as error:
            output.error(str(error))
            continue
        files = {out / f"{name}.{ending}": data for ending, data in _files(results, *kinds).items()}
        write_files(files)
        yield _report(results[-1], source, list(files), output)


def _explain_scores(
    explainer: Explainer, sources: Sequence[str], score: str | None, threshold: float, out: Path, output: Output
) -> list[dict[str, Any]]:
    """One record a map: of the score, or of each box that is found."""
    from dave_vit.data.images import read_picture
    from dave_vit.scored import explain_boxes, explain_score

    records = []
    for source, name in zip(sources, distinct_names(sources), strict=True):
        picture = read_picture(source)
        if score is not None:
            maps = [(name, score, explain_score(explainer, picture, score))]
        else:
            found = enumerate(explain_boxes(explainer, picture, threshold), 1)
            maps = [
                (f"{name}.box{number}", f"{each.name} {each.probability:.1%}", made) for number, (each, made) in found
            ]
        for title, what, made in maps:
            files = {out / f"{title}.{ending}": data for ending, data in made.files().items()}
            write_files(files)
            output.print(f"{source}: {what}, {made.value:.4g}", *(f"  {path}" for path in files))
            records.append({"source": source, "files": [str(path) for path in files], **made.record()})
    return records


def _move(progress: Progress, number: int, part: float) -> None:
    progress.update(done=number + part)


def _frame_samples(method: MethodOptions) -> int:
    """Samples between two frames of an animation, for about 24 of them."""
    from dave_vit.methods import METHODS
    from dave_vit.methods.options import most_samples

    if not hasattr(METHODS[method.name], "refine"):
        raise OptionError(f"method {method.name!r} does not refine sample by sample; leave out --animate")
    return max(1, most_samples(method.name, method.options()) // 24)


def distinct_names(sources: Sequence[str]) -> list[str]:
    """Names for the results of files: theirs without the ending, with a number behind where two would be the same."""
    names: list[str] = []
    for source in sources:
        stem = "stdin" if source == "-" else Path(source).stem
        tries = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        names.append(next(name for name in tries if name not in names))
    return names


def _results(
    explainer: Explainer, source: str, target: str, output: Output, report: Callable[[float], None]
) -> list[Result]:
    """The result after each chunk of samples; the share of them that is done is reported."""
    from dave_vit.data.images import read_picture
    from dave_vit.results import classify

    picture = read_picture(source)
    for note in picture.notes:
        output.note(f"{source}: {note}")
    classified = classify(explainer.model, picture)
    total = explainer.most_samples
    results = []
    for result in explainer.refine(classified, classified.pick(target)):
        results.append(result)
        report(result.explanation.samples / total)
    return results


def _files(results: list[Result], figure: str, animate: str | None) -> dict[str, bytes]:
    """Contents by the ending of the file's name."""
    files = results[-1].files(figure)
    if animate:
        from dave_vit.viz import Step
        from dave_vit.viz import animate as animated

        stages = [(result.explanation.samples, result.panels[0]) for result in results]
        steps = [Step(samples, panel.map, panel.standard_error) for samples, panel in stages]
        files[animate] = animated(results[-1].image, steps, animate)
    return files


def _report(result: Result, source: str, files: list[Path], output: Output) -> dict[str, Any]:
    """Tells what was found, and returns the record with the names of its files."""
    explained = [target.index for target in result.targets]
    shown = list(result.classified.top5)
    shown += [target for target in result.targets if target not in shown]
    output.print(f"{source}  ({result.seconds:.1f} s)")
    for prediction in shown:
        mark = "  <- explained" if prediction.index in explained else ""
        output.print(f"  {prediction.probability:6.1%}  {prediction.name} ({prediction.index}){mark}")
    output.print(*(f"  {path}" for path in files))
    return {"source": source, "files": [str(path) for path in files], **result.record()}
