"""`dave explain` for anything but classes: scores by name, boxes of detectors, words of models that write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dave_vit.cli.common import Output
from dave_vit.cli.files import Results, method_word, question
from dave_vit.cli.options import ModelOptions, pick_device
from dave_vit.errors import OptionError, escape_unprintable

if TYPE_CHECKING:
    from dave_vit.data.images import LoadedImage
    from dave_vit.explain.classes import Explainer
    from dave_vit.explain.clips import ClipExplanation
    from dave_vit.explain.scores import BoxesExplanation, ScoreExplanation
    from dave_vit.explain.sentences import SentenceExplanation
    from dave_vit.explain.words import WordExplanation
    from dave_vit.models import Adapter

Made = tuple[str, str, "ScoreExplanation | BoxesExplanation | WordExplanation | ClipExplanation | SentenceExplanation"]
"""What was asked, in the name of files; what is said of it; the maps themselves."""

Score = Annotated[
    str | None,
    typer.Option(
        "--score",
        metavar="SCORE",
        help="Explain a score of the output: query:N:CLASS, box:x0,y0,x1,y1:CLASS, region:x0,y0,x1,y1:CLASS (in pixels "
        "of the photograph), similarity:FILE, value, token:WORD.",
    ),
]
Boxes = Annotated[bool, typer.Option("--boxes", help="One map for each box that a detector finds, and all together.")]
Threshold = Annotated[float, typer.Option("--threshold", help="The least probability of a box.")]
Prompt = Annotated[
    str | None,
    typer.Option("--prompt", metavar="TEXT", help="For models that take one: a question, what to find, a sentence."),
]
Words = Annotated[
    str | None,
    typer.Option("--words", metavar="N,N,...", help="Words of its answer to explain, from 1.", show_default="all"),
]


@dataclass(frozen=True)
class KindOptions:
    """What is explained where it is no class."""

    score: Score = None
    boxes: Boxes = False
    threshold: Threshold = 0.5
    prompt: Prompt = None
    words: Words = None

    def load(self, model: ModelOptions) -> Adapter:
        """The model, which may need the prompt to be made."""
        from dave_vit.models import load_model
        from dave_vit.models.families import FAMILIES
        from dave_vit.models.loading import parse_spec

        if self.prompt is None or not FAMILIES[parse_spec(model.spec)[0]].zero_shot:
            return model.load()
        device = pick_device(model.device)
        return load_model(model.spec, model.weights, device, classes=model.classes, prompts=[self.prompt])

    def wanted(self, model: Adapter) -> bool:
        """Whether something else than a class is explained."""
        from dave_vit.models.prompted import PromptedModel
        from dave_vit.models.tasks import TaskModel
        from dave_vit.models.video import VideoModel

        said = self.score is not None or self.boxes or self.prompt is not None
        return said or isinstance(model, PromptedModel | TaskModel | VideoModel)

    def chosen(self) -> list[int] | None:
        """Numbers of the words."""
        if self.words is None or self.words.strip() == "all":
            return None
        parts = [part.strip() for part in self.words.split(",")]
        if not all(part.isdigit() for part in parts):
            raise OptionError(f"--words {self.words}; expected numbers with commas between, such as 3,5")
        return [int(part) for part in parts]


def explain_kinds(
    explainer: Explainer,
    sources: Sequence[str],
    kinds: KindOptions,
    target: str,
    folder: Results,
    output: Output,
) -> list[dict[str, Any]]:
    """One record a map, after its files are written.

    Args:
        explainer: holds the model.
        sources: the photographs, or clips.
        kinds: what is explained of each.
        target: the class of clips.
        folder: of the files.
        output: where words go.
    """
    from dave_vit.explain.scores import BoxesExplanation
    from dave_vit.models.video import VideoModel

    records = []
    for source in sources:
        still = not isinstance(explainer.model, VideoModel)
        for word, what, made in _made(explainer, source, kinds) if still else _filmed(explainer, source, target):
            record, words = {"source": escape_unprintable(source), **made.record()}, [word, method_word(explainer)]
            asked = {**question(explainer, made.name), "prompt": kinds.prompt}
            record = folder.write(made.picture, asked, made.files(), record, words)
            output.print(f"{source}: {what}", *(f"  {path}" for path in record["files"]))
            if not isinstance(made, BoxesExplanation):  # which shows what has its records already
                records.append(record)
    return records


def _filmed(explainer: Explainer, source: str, target: str) -> Iterator[Made]:
    from dave_vit.explain.clips import explain_clip

    made = explain_clip(explainer, source, target)
    best = made.result.targets[0]
    yield "" if target == "top1" else target, f"{best.name} {best.probability:.1%}", made


def _made(explainer: Explainer, source: str, kinds: KindOptions) -> Iterator[Made]:
    from dave_vit.data.images import read_image
    from dave_vit.explain.scores import BoxesExplanation, explain_boxes, explain_score
    from dave_vit.explain.sentences import explain_match
    from dave_vit.explain.words import explain_words
    from dave_vit.models.text_generation import TextGenerator
    from dave_vit.models.zero_shot import ZeroShotAdapter

    picture, model = read_image(source), explainer.model
    if isinstance(model, ZeroShotAdapter) and kinds.score is None:
        matched = explain_match(explainer, picture, model)
        yield kinds.prompt or "", matched.line, matched
        return
    if isinstance(model, TextGenerator) and kinds.score is None:
        written = explain_words(explainer, picture, kinds.prompt, kinds.chosen())
        yield "", written.asked.answer, written
        return
    explainer = _asked(explainer, picture, kinds.prompt)
    score = kinds.score or ("boxes" if kinds.boxes else _usual(explainer.model))
    if score != "boxes":
        made = explain_score(explainer, picture, score)
        yield score, f"{score}, {made.value:.4g}", made
        return
    found = []
    for number, (box, scored) in enumerate(explain_boxes(explainer, picture, kinds.threshold), 1):
        found.append((box, scored))
        yield f"box{number}", f"{box.name} {box.probability:.1%}, {scored.value:.4g}", scored
    boxes, maps = zip(*found, strict=True)
    yield "boxes", "all of them together", BoxesExplanation(boxes, maps)


def _asked(explainer: Explainer, picture: LoadedImage, prompt: str | None) -> Explainer:
    """The explainer of a model that has got its prompt, where it takes one."""
    from dave_vit.models.prompted import PromptedModel
    from dave_vit.models.text_generation import TextGenerator

    model = explainer.model
    if isinstance(model, TextGenerator):
        return explainer.on(model.with_prompt(picture.image, prompt, answer=""))
    if isinstance(model, PromptedModel):
        return explainer.on(model.with_prompt(picture.image, prompt))
    if prompt is not None:
        raise OptionError(f"{model.spec} takes no prompt; leave --prompt out")
    return explainer


def _usual(model: Adapter) -> str:
    from dave_vit.models.tasks import TaskModel

    usual = model.task.default_score if isinstance(model, TaskModel) else None
    if usual is None:
        raise OptionError(f"{model.spec} is no classifier; say what is explained, such as --score query:3:CLASS")
    return usual
