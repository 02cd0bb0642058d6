"""`dave explain`: explain what a model saw in pictures and clips."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dave_vit.cli.common import Output, command
from dave_vit.cli.options import DrawingOptions, MethodOptions, ModelOptions, OptionGroup, Out, Plugins, flag, option
from dave_vit.errors import ImageError, OptionError

if TYPE_CHECKING:
    from dave_vit.explanations.base import ImageExplanation
    from dave_vit.explanations.explainer import Question


Images = Annotated[
    list[str], typer.Argument(metavar="IMAGE", help="Files, folders, or - for standard input.", show_default=False)
]


class QuestionOptions(OptionGroup):
    """What is explained."""

    target: list[str] | None = option(
        "--target -t CLASS",
        "Explain this class: its name, part of the name or index, top1 to top5, or all-top5; several with "
        "commas or repeated.",
        "top1",
    )
    score: str | None = option(
        "--score SCORE", "Explain a score of the output, with boxes in pixels of the photograph: {scores}."
    )
    boxes: bool = option("--boxes", "Explain each box that a detector finds, and all boxes at once.", default=False)
    threshold: float | None = option("--threshold P", "Least probability of a box.", "0.5")
    prompt: str | None = option("--prompt TEXT", "Ask the model this: a question, what to find, a sentence.")
    words: str | None = option(
        "--words WORD,...", "Explain these words of the answer: numbers from 1, or texts.", "all"
    )
    answer: str | None = option("--answer TEXT", "Explain the words of this answer.", "the model's own")
    max_tokens: int | None = option("--max-tokens N", "Largest number of tokens of a generated answer.", "32", min=1)

    together: bool = option(
        "--together", "Ask about all images in one prompt, where <image> may say where each comes.", default=False
    )

    def create(self, sources: list[str]) -> Question:
        """Return the question of the pipeline, with the sources that belong to the first one."""
        from dave_vit.explanations.explainer import Question

        target, words = ",".join(self.target) if self.target else None, None
        if self.words is not None and self.words.strip() != "all":
            parts = [part.strip() for part in self.words.split(",")]
            if not all(parts):
                how = "expected words or their numbers separated by commas, such as 3,5"
                raise OptionError(f"--words {self.words}; {how}")
            words = tuple(int(part) if part.isdigit() else part for part in parts)
        together = tuple(sources[1:]) if self.together else None
        return Question(**{**vars(self), "target": target, "words": words, "together": together})


class StyleOptions(DrawingOptions):
    """How results are drawn."""

    figure_format: Literal["png", "svg", "pdf"] = option(
        "--format", "Format of the side-by-side figure.", default="png"
    )
    animation: Literal["gif", "webp"] | None = option(
        "--animate", "Also show how the map refines, as an animation.", "none"
    )


class GalleryOptions(OptionGroup):
    """The page that shows all pictures of one command."""

    gallery: bool = option(
        "--gallery/--no-gallery", "Write a page and a contact sheet where there are several images.", default=True
    )
    order: Literal["confidence", "certainty", "name"] = option(
        "--sort", "Sort the gallery; the most confident or the most certain first.", default="confidence"
    )


@command(
    "dave explain cat.jpg",
    "dave explain photos/ --target all-top5 --out results",
    "dave explain cat.jpg --target tabby --against 'tiger cat'",
    "dave explain cat.jpg --model timm:vit_base_patch16_224 --target tabby --method smoothgrad",
    "dave explain photo.jpg --model hf:FOLDER --prompt 'What is on the table?' --words 3,5",
    "dave explain before.jpg after.jpg --together --model hf:FOLDER --prompt 'What changed?'",
)
def explain(
    *,
    images: Images,
    model: ModelOptions,
    subject: QuestionOptions,
    method: MethodOptions,
    out: Out = Path("dave-out"),
    drawing: StyleOptions,
    page: GalleryOptions,
    plugins: Plugins = None,
    verbose: Annotated[bool, flag("--verbose -v", "Print classes, notes and files of each image.")] = False,
    output: Output,
) -> None:
    """Explain what the model saw in images.

    For each image NAME the folder gets NAME.dave.png (map over image), NAME.dave.panels.png (image, map and certainty
    side by side), NAME.dave.npz (raw numbers) and NAME.dave.json (classes, options, versions). A target, contrast,
    score or method of your own goes into the name (NAME.tabby.dave.png). Only results of the same question about
    the same picture are written over; where another file has the name, NAME gets a number. An image that cannot be
    read is reported and the others are still done. Several images also get gallery.dave.html (a page of all with
    their maps, 1000 at most) and gallery.dave.png (a contact sheet, 200 at most), named by the same rules.
    """
    from dave_vit.data.images import find_images
    from dave_vit.explanations.explainer import Explainer, chunk_for_stages
    from dave_vit.explanations.output_files import Gallery, OutputFolder
    from dave_vit.explanations.pipeline import FigureStyle, Pipeline

    sources = find_images(images)
    options, question = method.options(), subject.create(sources)
    if drawing.animation:
        options = {"chunk": chunk_for_stages(method.name, options), **options}
    folder = OutputFolder(out, sources)
    sources = sources[:1] if subject.together else sources
    with output.progress(len(sources), "loading the model") as update:
        loaded = model.load() if question.prompt is None else model.load(question.prompt)
        output.advise(loaded)
        explainer = Explainer(loaded, method.name, weights=model.weights, against=method.against, **options)
        explainer.on_slow, explainer.maps = output.note, len(sources)
        pipeline = Pipeline(explainer, question, FigureStyle(**vars(drawing)), folder, Gallery(page.order))
        print_result = _print_result if verbose or len(sources) == 1 else _print_line
        for result in pipeline.run(sources, lambda done, name: update(completed=done, description=name)):
            if isinstance(result, ImageError):
                output.error(str(result))
            else:
                print_result(*result, output)
    gallery = pipeline.write_gallery(len(sources) - pipeline.failures) if page.gallery else None
    if gallery is not None:
        output.print("gallery", *(f"  {path}" for path in gallery["files"]))
    output.json(pipeline.records)
    if pipeline.failures:
        raise typer.Exit(2)


def _print_line(explanation: ImageExplanation, record: dict[str, Any], output: Output) -> None:
    """Print one line of an image among several."""
    explained = ", ".join(dict.fromkeys(panel.target for panel in explanation.panels))
    notes = ", notes with -v" if explanation.notes else ""
    output.print(f"{record['source']}  {explained}  ({explanation.seconds:.1f} s{notes})")


def _print_result(explanation: ImageExplanation, record: dict[str, Any], output: Output) -> None:
    for note in explanation.notes:
        output.note(f"{record['source']}: {note}")
    output.print(f"{record['source']}  ({explanation.seconds:.1f} s)", *explanation.summary)
    output.print(*(f"  {path}" for path in record["files"]))
