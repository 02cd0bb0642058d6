"""What the worker does for requests: classify an image, explain it step by step, return files."""

import secrets
import shlex
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn

from dave_vit._internal.registry import suggest_names
from dave_vit.data.geometry import Geometry
from dave_vit.data.images import LoadedImage
from dave_vit.errors import DaveError, OptionError, UnknownName
from dave_vit.explanations.base import ImageExplanation, locate_inputs
from dave_vit.explanations.classes import ClassExplanation, ClassifiedImage, classify, refine_classes
from dave_vit.explanations.evidence import find_evidence
from dave_vit.explanations.explainer import Explainer, chunk_for_stages
from dave_vit.explanations.words import refine_words
from dave_vit.methods import METHODS
from dave_vit.methods.options import filter_options
from dave_vit.models import Adapter, Prepare
from dave_vit.models.prepare import Fit
from dave_vit.models.text_generation import TextGenerator
from dave_vit.viz.figures import Drawing, draw_grid, image_cell
from dave_vit.viz.panels import panel_cells
from dave_vit.viz.rendering import Scales, View, as_image, to_pillow
from dave_vit.web import schema
from dave_vit.web.images import file_name, png_text, read_picture
from dave_vit.web.options import ExplainQuery, command_arguments, method_options
from dave_vit.web.work_queue import Check, Work

CLASS_FILES = ("panels.png", "overlay.png", "npz", "json")
WORD_FILES = ("words.png", "npz", "json")
_CHUNK = 4  # views per pass of other methods: a cancelled request stops between two passes
_KEPT_PIXELS = 60_000_000  # kept results hold their images


class ResultExpired(DaveError):
    """A result was dropped for later ones."""


@dataclass(frozen=True)
class ServedModel:
    """A model that the server was started with.

    Of a local folder only the last part stays in the model's spec, which records and figures show.

    Attributes:
        model: from `load_model`.
        weights: whether they came from a file; its name stays on the server.
        classes: whether the names of the classes came from a file.
    """

    model: Adapter
    weights: bool = False
    classes: bool = False

    def __post_init__(self) -> None:
        family, colon, name = self.model.spec.rpartition(":")
        if Path(name).exists() or Path(name).is_absolute():
            self.model.spec = f"{family}{colon}{Path(name).name}"

    def with_fit(self, fit: Fit) -> "ServedModel":
        """Return the same model that fits photographs into its input in another way; the weights are shared."""
        if isinstance(self.model, TextGenerator):
            raise OptionError("a model that writes sees the image as it was trained to; leave fit out")
        model, prepare = copy(self.model), self.model.prepare or Prepare()
        model.preprocessing, model.prepare = Prepare(fit=fit).of(model.preprocessing), replace(prepare, fit=fit)
        return replace(self, model=model)

    def command(self, query: ExplainQuery) -> str:
        """Return the command line that makes the same result, with FILE for the server's own files."""
        arguments = ["dave", "explain", file_name(query.name)]
        arguments += ["--model", self.model.spec] if self.model.spec != "builtin" else []
        arguments += ["--weights", "FILE"] if self.weights else []
        arguments += ["--classes", "FILE"] if self.classes else []
        arguments += self.model.prepare.flags if self.model.prepare else []
        return shlex.join([*arguments, *command_arguments(query)])


class ExplainService:
    """Does the work of requests; the queue runs one at a time.

    Args:
        models: at least one.
        limits: of one request.
    """

    def __init__(self, models: Sequence[ServedModel], limits: schema.Limits) -> None:
        names = [served.model.spec for served in models]
        if not names or len(set(names)) < len(names):
            raise OptionError(f"models {names}; expected at least one, and each name once")
        self.models = dict(zip(names, models, strict=True))
        self.limits = limits
        self._with_fit = cache(ServedModel.with_fit)  # kept, since what is recorded of a model belongs to the module
        # results with their files, which are encoded when the first of them is requested
        self._kept: OrderedDict[str, tuple[ImageExplanation, Callable[[], dict[str, bytes]]]] = OrderedDict()

    def find_model(self, name: str | None, fit: Fit | None = None) -> ServedModel:
        """Return a model by its name, the first one for None; with `fit` it prepares photographs in another way."""
        names = list(self.models)
        if name is not None and name not in names:
            hint = suggest_names(name, names) or f"; this server has: {', '.join(names)}"
            raise UnknownName(f"no model {name!r}{hint}")
        served = self.models[names[0] if name is None else name]
        return served if fit is None else self._with_fit(served, fit)

    def classify(self, check: Check, data: bytes, query: schema.ClassifyQuery) -> schema.Classification:
        """Predict the classes of an image."""
        model = self.find_model(query.model, query.fit).model
        picture = read_picture(data, query.name, self.limits.pixels)
        check()
        classified, geometry = classify(model, picture), Geometry.measure(model.preprocessing, picture.image.size)
        # where the model's input lies in the photograph, in parts of its width and height
        x, y = ([round(axis.to_photo(end)) / axis.photo for end in (0, axis.size)] for axis in (geometry.x, geometry.y))
        return schema.Classification(
            name=picture.name,
            top5=list(classified.top5),
            also=[prediction for prediction in classified.predictions[5:] if prediction.index in query.also],
            picture=png_text(_draw_seen(classified, model)),
            crop=(x[0], y[0], x[1], y[1]),
            notes=list(picture.notes),
        )

    def answer(self, check: Check, data: bytes, query: schema.AnswerQuery) -> schema.Answer:
        """Let a model write about an image."""
        model = self._find_generator(query.model)
        picture = read_picture(data, query.name, self.limits.pixels)
        with check_before_passes(model.model, check):
            prompted = model.with_prompt(picture.image, query.prompt or None)
        return schema.Answer(
            name=picture.name,
            answer=prompted.answer,
            words=[word.text for word in prompted.words],
            picture=png_text(picture.image.convert("RGB").resize(schema.display_size(picture.image.size))),
            notes=list(picture.notes),
        )

    def trace(self, check: Check, data: bytes, query: schema.SourcesQuery) -> list[schema.TracedWord]:
        """Compute where each word of an answer comes from, all in the same forward passes."""
        model = self._find_generator(query.model)
        picture = read_picture(data, query.name, self.limits.pixels)
        with check_before_passes(model.model, check):
            answered = model.with_prompt(picture.image, query.prompt or None, answer=query.answer)
            return schema.traced_words(answered, find_evidence(answered, answered.scores(range(len(answered.words)))))

    def _find_generator(self, name: str | None) -> TextGenerator:
        model = self.find_model(name).model
        if not isinstance(model, TextGenerator):
            raise OptionError("this model writes no text; a prompt is for models that do")
        return model

    def explain(self, data: bytes, query: ExplainQuery) -> Work[schema.ExplainStep]:
        """Compute the map of an image after more and more samples; the last step tells where the files are."""
        served, explains_class = self.find_model(query.model, query.fit), query.word is None
        options = method_options(query, self.limits.samples)
        against = query.against if explains_class else None
        explainer = Explainer(served.model, query.method, against=against, **options | _small_chunk(query, options))

        def work(check: Check) -> Generator[schema.ExplainStep, None, None]:
            # a model that writes runs its inner model, once for each word
            with check_before_passes(served.model if explains_class else served.model.model, check):
                picture = read_picture(data, query.name, self.limits.pixels)
                check()  # decoding takes a while, and so does preprocessing
                if explains_class:
                    step, result, explained = yield from _explain_class(explainer, picture, query)
                else:
                    step, result, explained = _explain_word(explainer, picture, query)
            token = self._keep(result)
            files = {name: f"/api/results/{token}/{name}" for name in (CLASS_FILES if explains_class else WORD_FILES)}
            finished = schema.Finished(token=token, files=files, command=served.command(explained))
            yield step.model_copy(update={"finished": finished})

        return work

    def read_file(self, token: str, ending: str) -> tuple[str, bytes]:
        """Return name and content of a file of an earlier result."""
        result, files = self._find_result(token)
        return f"{result.picture.name}.{ending}", files()[ending]

    def draw_both(self, first: str, second: str, view: View, scales: Scales) -> tuple[str, bytes]:
        """Return name and content of a figure with the maps of two results."""
        results = [self._find_result(token)[0] for token in (first, second)]
        if not all(isinstance(result, ClassExplanation) for result in results):
            raise OptionError("the maps of words cannot be drawn in one figure; download each word's own figure")
        return f"{results[0].picture.name}.both.png", _draw_maps(results, view, scales).to_bytes("png")

    def _find_result(self, token: str) -> tuple[ImageExplanation, Callable[[], dict[str, bytes]]]:
        kept = self._kept.get(token)  # once: the thread that explains may drop it meanwhile
        if kept is None:
            raise ResultExpired("this result is no longer kept; compute it again")
        return kept

    def _keep(self, result: ImageExplanation) -> str:
        token = secrets.token_urlsafe(12)
        self._kept[token] = result, cache(result.files)
        pixels = [kept.picture.image.width * kept.picture.image.height for kept, _ in self._kept.values()]
        while len(self._kept) > 1 and (len(self._kept) > self.limits.results or sum(pixels) > _KEPT_PIXELS):
            self._kept.popitem(last=False)
            del pixels[0]
        return token


Outcome = tuple[schema.ExplainStep, ImageExplanation, ExplainQuery]
"""The last step, its result, and the request with its target resolved."""


def _explain_class(
    explainer: Explainer, picture: LoadedImage, query: ExplainQuery
) -> Generator[schema.ExplainStep, None, Outcome]:
    classified = classify(explainer.model, picture)
    targets = classified.pick(query.target)
    if len(targets) > 1:
        raise OptionError(f"target {query.target!r} means {len(targets)} classes; ask for one at a time")
    for result in refine_classes(explainer, classified, targets):
        step = schema.class_step(result)
        yield step
    resolved = query.model_copy(update={"target": str(targets[0].index), "prompt": ""})
    return step.model_copy(update={"notes": list(result.notes)}), result, resolved


def _explain_word(explainer: Explainer, picture: LoadedImage, query: ExplainQuery) -> Outcome:
    """Explain a word of the answer that the request repeats, so that the model need not write it again."""
    assert query.word is not None
    *_, result = refine_words(explainer, picture, query.prompt or None, [query.word], answer=query.answer)
    return schema.word_step(result), result, query.model_copy(update={"target": "", "against": None})


def _draw_seen(classified: ClassifiedImage, model: Adapter) -> Image.Image:
    """Draw the model's input; of tiles the whole photograph, in the size of its map."""
    if len(classified.inputs) > 1:
        return locate_inputs(model, classified.picture).resize().image
    return to_pillow(as_image(model.preprocessing.picture(classified.inputs)[0]))


def _small_chunk(query: ExplainQuery, options: dict[str, Any]) -> dict[str, Any]:
    """Return options for few views per pass, so that there are many steps; the numbers stay the same."""
    if hasattr(METHODS[query.method], "refine"):
        return {"chunk": chunk_for_stages(query.method, options)}
    return filter_options(query.method, chunk=_CHUNK)


def _draw_maps(results: Sequence[ImageExplanation], view: View, scales: Scales) -> Drawing:
    """Draw the maps of some results beside each other; only those of one unit can share a scale."""
    units = {result.unit or result.explainer.name for result in results}
    panels = [
        replace(panel, target=f"{panel.target}\n{result.explainer.name}, {result.explainer.model.spec}")
        for result in results
        for panel in result.panels[:1]
    ]
    cells = panel_cells(panels, view=view, scales=scales if len(units) == 1 else "own")
    return draw_grid([[image_cell(results[0].image), *cells]], title=results[0].picture.name)


@contextmanager
def check_before_passes(model: nn.Module, check: Check) -> Iterator[None]:
    """Check before every pass of the model, for methods that take many passes and return one map."""
    handle = model.register_forward_pre_hook(lambda module, inputs: check())
    try:
        yield
    finally:
        handle.remove()
