"""`dave explain`: what the model saw in images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dave_vit.cli.common import Output, Progress, command, examples
from dave_vit.cli.files import Results, method_word, question
from dave_vit.cli.kinds import KindOptions, explain_kinds
from dave_vit.cli.options import DrawingOptions, MethodOptions, Out, Plugins, expand_groups
from dave_vit.cli.preparation import PreparedModel
from dave_vit.errors import ImageError, OptionError, escape_unprintable

if TYPE_CHECKING:
    from dave_vit.explain.classes import ClassExplanation, Explainer

app = command()

Images = Annotated[
    list[str], typer.Argument(metavar="IMAGE", help="Files, folders, or - for standard input.", show_default=False)
]
Target = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        "-t",
        metavar="CLASS",
        help="Name, part of a name or index of a class, top1 to top5, or all-top5; several with commas or repeated.",
        show_default="top1",
    ),
]
Figure = Annotated[Literal["png", "svg", "pdf"], typer.Option("--format", help="Of the side-by-side figure.")]
Animate = Annotated[
    Literal["gif", "webp"] | None, typer.Option("--animate", help="Also show how the map refines, as an animation.")
]


@dataclass(frozen=True)
class GalleryOptions:
    """What shows all pictures of one command together."""

    gallery: Annotated[
        bool,
        typer.Option("--gallery/--no-gallery", help="A page and a contact sheet of all images, if there are several."),
    ] = True
    order: Annotated[
        Literal["confidence", "sureness", "name"],
        typer.Option("--sort", help="Order of both; the most confident or the surest first."),
    ] = "confidence"


@app.command(
    epilog=examples(
        "dave explain cat.jpg",
        "dave explain photos/ --target all-top5 --out results",
        "dave explain cat.jpg --target tabby --against 'tiger cat'",
        "dave explain cat.jpg --model timm:vit_base_patch16_224 --target tabby --method smoothgrad",
        "dave explain photo.jpg --model hf:FOLDER --prompt 'What is on the table?' --words 3,5",
    )
)
@expand_groups
def explain(
    *,
    images: Images,
    model: PreparedModel,
    targets: Target = None,
    method: MethodOptions,
    out: Out = Path("dave-out"),
    look: DrawingOptions,
    figure: Figure = "png",
    animate: Animate = None,
    together: GalleryOptions,
    kinds: KindOptions,
    plugins: Plugins,
    output: Output,
) -> None:
    """Explain what the model saw in images.

    For each image NAME the folder gets NAME.dave.png (map over image), NAME.dave.panels.png (image, map and sureness
    side by side), NAME.dave.npz (raw numbers) and NAME.dave.json (classes, options, versions). A target, score or
    method of your own goes into the name (NAME.tabby.dave.png). Only results of the same question about the same
    picture are written over; where another file has the name, NAME gets a number. An image that cannot be read is
    reported and the others are still done. Several images also get gallery.dave.html (a page of all with their maps,
    1000 at most) and gallery.dave.png (a contact sheet, 200 at most), named by the same rules.
    """
    from dave_vit.data.images import find_images
    from dave_vit.explain.classes import Explainer
    from dave_vit.explain.gallery import Gallery

    options = method.options()
    if animate:
        options = {"chunk": _frame_samples(method), **options}
    target = ",".join(targets or ["top1"])
    sources = find_images(images)
    with output.progress(len(sources), "loading the model") as progress:
        explainer = Explainer(kinds.load(model), method.name, weights=model.weights, against=method.against, **options)
        output.advise(explainer.model)
        if kinds.wanted(explainer.model):
            output.json(explain_kinds(explainer, sources, kinds, target, Results(out, sources), output))
            return
        folder, gallery, records = Results(out, sources), Gallery(together.order), []
        asked = _Asked(target, figure, animate, look)
        for result, files, record in _explain_all(explainer, sources, asked, folder, output, progress):
            gallery.add(result, files["overlay.png"], record)
            records.append(record)
    if together.gallery and len(records) > 1:
        made = folder.write_gallery(records, gallery.files(), gallery.record(), asked.words(explainer))
        output.print("all together", *(f"  {path}" for path in made["files"]))
    output.json(records)
    if len(records) < len(sources):
        raise typer.Exit(2)


@dataclass(frozen=True)
class _Asked:
    """What is wanted of each image: the classes, and kinds of pictures."""

    target: str
    figure: str
    animate: str | None
    look: DrawingOptions

    def words(self, explainer: Explainer) -> list[str]:
        """Of the question, for names of files."""
        return ["" if self.target == "top1" else self.target, method_word(explainer), self.look.word]


def _explain_all(
    explainer: Explainer,
    sources: Sequence[str],
    asked: _Asked,
    folder: Results,
    output: Output,
    progress: Progress,
) -> Iterator[tuple[ClassExplanation, dict[str, bytes], dict[str, Any]]]:
    """ClassExplanation, files and record of each image that could be read, after they are written."""
    for number, source in enumerate(sources):
        progress.update(done=number, text=escape_unprintable(Path(source).name))
        try:
            results = _results(explainer, source, asked.target, output, partial(_move, progress, number))
        except ImageError as error:
            output.error(str(error))
            continue
        last, files = results[-1], _files(results, asked.figure, asked.animate, asked.look)
        record = {"source": escape_unprintable(source), **last.record()}
        whole = {**question(explainer, asked.target), "look": asdict(asked.look)}
        record = folder.write(last.classified.picture, whole, files, record, asked.words(explainer))
        yield last, files, _report(last, record, output)


def _move(progress: Progress, number: int, part: float) -> None:
    progress.update(done=number + part)


def _frame_samples(method: MethodOptions) -> int:
    """Samples between two frames of an animation, for about 24 of them."""
    from dave_vit.methods import METHODS
    from dave_vit.methods.options import max_samples

    if not hasattr(METHODS[method.name], "refine"):
        raise OptionError(f"method {method.name!r} does not refine sample by sample; leave out --animate")
    return max(1, max_samples(method.name, method.options()) // 24)


def _results(
    explainer: Explainer, source: str, target: str, output: Output, report: Callable[[float], None]
) -> list[ClassExplanation]:
    """The result after each chunk of samples; the share of them that is done is reported."""
    from dave_vit.data.images import read_image
    from dave_vit.explain.classes import classify

    picture = read_image(source)
    for note in picture.notes:
        output.note(f"{source}: {note}")
    classified = classify(explainer.model, picture)
    total = explainer.max_samples
    results = []
    for result in explainer.refine(classified, classified.pick(target)):
        results.append(result)
        report(result.explanation.samples / total)
    return results


def _files(results: list[ClassExplanation], figure: str, animate: str | None, look: DrawingOptions) -> dict[str, bytes]:
    """Contents by the ending of the file's name."""
    files = results[-1].files(figure, view=look.view, scales=look.scales)
    if animate:
        from dave_vit.viz import AnimationStep
        from dave_vit.viz import animate as animated

        stages = [(result.explanation.samples, result.panels[0]) for result in results]
        steps = [AnimationStep(samples, panel.map, panel.sureness) for samples, panel in stages]
        files[animate] = animated(results[-1].image, steps, animate)
    return files


def _report(result: ClassExplanation, record: dict[str, Any], output: Output) -> dict[str, Any]:
    """Tells what was found, and returns its record."""
    for note in result.notes[len(result.classified.picture.notes) :]:
        output.note(f"{record['source']}: {note}")
    explained = [target.index for target in result.targets]
    shown = list(result.classified.top5)
    shown += [target for target in result.targets if target not in shown]
    output.print(f"{record['source']}  ({result.seconds:.1f} s)")
    for prediction in shown:
        mark = "  <- explained" if prediction.index in explained else ""
        output.print(f"  {prediction.probability:6.1%}  {prediction.name} ({prediction.index}){mark}")
    output.print(*(f"  {path}" for path in record["files"]))
    return record
