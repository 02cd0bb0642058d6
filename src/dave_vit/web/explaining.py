"""What the worker does for a request: look at an image, explain it step by step, hand out the files."""

from __future__ import annotations

import secrets
import shlex
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from dave_vit._internal.registry import suggest_names
from dave_vit.data.images import LoadedImage
from dave_vit.errors import DaveError, OptionError, UnknownName
from dave_vit.explain.classes import ClassExplanation, Explainer, classify
from dave_vit.explain.words import WordExplanation
from dave_vit.methods import METHODS
from dave_vit.methods.options import declared_options, filter_options, max_samples
from dave_vit.models import Adapter
from dave_vit.viz import Drawing, Scales, View, draw_grid, image_cell, panel_cells, scale_map, to_pillow
from dave_vit.viz.rendering import as_image, as_map
from dave_vit.web.images import file_name, png_text, read_picture
from dave_vit.web.jobs import Check, Work
from dave_vit.web.schema import Answer, AskQuery, ExplainQuery, Finished, Limits, Look, LookQuery, Step, plane
from dave_vit.web.writing import answer, word_of

ENDINGS = ("panels.png", "overlay.png", "npz", "json")
ENDINGS_OF_WORDS = ("words.png", "npz", "json")
_STEPS = 24  # of a map that refines
_CHUNK = 4  # views in a pass of other methods: a request that goes away ends between two passes
_KEPT_PIXELS = 60_000_000  # results hold their images


class NotKept(DaveError):
    """A result has made room for later ones."""


@dataclass(frozen=True)
class Served:
    """A model that the server was started with.

    Of a local folder only the last part stays in the model's spec, which records and figures show.

    Attributes:
        model: of `load_model`.
        weights: whether they came from a file; which one stays on the server.
        classes: whether the names of the classes came from a file.
    """

    model: Adapter
    weights: bool = False
    classes: bool = False

    def __post_init__(self) -> None:
        family, colon, name = self.model.spec.rpartition(":")
        if Path(name).exists() or Path(name).is_absolute():
            self.model.spec = f"{family}{colon}{Path(name).name}"

    @property
    def name(self) -> str:
        """The model's spec."""
        return self.model.spec


class _Kept:
    """A result, whose files are made when the first of them is asked for."""

    def __init__(self, picture: LoadedImage, result: ClassExplanation | WordExplanation) -> None:
        self.picture, self.result = picture, result

    @cached_property
    def files(self) -> dict[str, bytes]:
        return self.result.files()


class Desk:
    """Takes requests for the models of a server. What it returns runs in the worker, so that one thing happens at once.

    Args:
        models: at least one.
        limits: of one request.
    """

    def __init__(self, models: Sequence[Served], limits: Limits) -> None:
        self.models = {served.name: served for served in models}
        if not models or len(self.models) < len(models):
            raise OptionError(f"models {[served.name for served in models]}; expected at least one, and each name once")
        self.limits = limits
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def served(self, name: str | None) -> Served:
        """A model by its name; the first one for None."""
        names = list(self.models)
        if name is not None and name not in names:
            hint = suggest_names(name, names) or f"; this server has: {', '.join(names)}"
            raise UnknownName(f"no model {name!r}{hint}")
        return self.models[names[0] if name is None else name]

    def look(self, data: bytes, query: LookQuery) -> Work[Look]:
        """What the model takes an image for."""
        model = self.served(query.model).model

        def work(check: Check) -> Generator[Look, None, None]:
            picture = read_picture(data, query.name, self.limits.pixels)
            check()
            classified = classify(model, picture)
            shown = to_pillow(as_image(model.preprocessing.picture(classified.inputs)[0]))
            others = [guess for guess in classified.predictions[5:] if guess.index in query.also]
            yield Look(
                name=picture.name,
                top5=list(classified.top5),
                also=others,
                picture=png_text(shown),
                notes=list(picture.notes),
            )

        return work

    def explain(self, data: bytes, query: ExplainQuery) -> Work[Step]:
        """The map of an image after more and more samples; the last step tells where the files are."""
        served = self.served(query.model)
        options = method_options(query, self.limits.samples)
        explainer = Explainer(served.model, query.method, against=query.against, **options)

        def work(check: Check) -> Generator[Step, None, None]:
            with _watched(served.model, check):
                picture = read_picture(data, query.name, self.limits.pixels)
                check()  # decoding takes a while, and so does preprocessing
                classified = classify(explainer.model, picture)
                targets = classified.pick(query.target)
                if len(targets) > 1:
                    raise OptionError(f"target {query.target!r} means {len(targets)} classes; ask for one at a time")
                for result in explainer.refine(classified, targets):
                    step = _step(result)
                    yield step
            said = ["--target", str(targets[0].index)] + (["--against", query.against] if query.against else [])
            token = self._keep(_Kept(picture, result))
            finished = Finished(
                token=token, files=_addresses(token, ENDINGS), command=command(served, query, said, explainer)
            )
            yield step.model_copy(update={"finished": finished, "notes": list(result.notes)})

        return work

    def ask(self, data: bytes, query: AskQuery) -> Work[Answer]:
        """What a model writes about an image."""
        model = self.served(query.model).model

        def work(check: Check) -> Generator[Answer, None, None]:
            with _watched(model.model, check):
                yield answer(model, read_picture(data, query.name, self.limits.pixels), query)

        return work

    def explain_word(self, data: bytes, query: ExplainQuery) -> Work[Step]:
        """The map of a word of an answer."""
        served = self.served(query.model)
        explainer = Explainer(served.model, query.method, **method_options(query, self.limits.samples))

        def work(check: Check) -> Generator[Step, None, None]:
            picture = read_picture(data, query.name, self.limits.pixels)
            with _watched(served.model.model, check):
                written, step = word_of(explainer, picture, query)
            said = ["--prompt", query.prompt] if query.prompt else []
            said += ["--words", str(query.word)]
            token = self._keep(_Kept(picture, written))
            finished = Finished(
                token=token, files=_addresses(token, ENDINGS_OF_WORDS), command=command(served, query, said, explainer)
            )
            yield step.model_copy(update={"finished": finished})

        return work

    def file(self, token: str, ending: str) -> Work[tuple[str, bytes]]:
        """Name and content of a file of an earlier result."""

        def work(check: Check) -> Generator[tuple[str, bytes], None, None]:
            kept = self._find(token)
            yield f"{kept.picture.name}.{ending}", kept.files[ending]

        return work

    def both(self, first: str, second: str, view: View, scales: Scales) -> Work[tuple[str, bytes]]:
        """Name and content of a figure with the maps of two results."""

        def work(check: Check) -> Generator[tuple[str, bytes], None, None]:
            kept = [self._find(token) for token in (first, second)]
            results = [one.result for one in kept if isinstance(one.result, ClassExplanation)]
            if len(results) < 2:
                raise OptionError("words have no figure of both; take the one of each")
            yield f"{kept[0].picture.name}.both.png", joint(results, view, scales).to_bytes("png")

        return work

    def _find(self, token: str) -> _Kept:
        kept = self._kept.get(token)
        if kept is None:
            raise NotKept("this result is no longer kept; make it again")
        return kept

    def _keep(self, kept: _Kept) -> str:
        token = secrets.token_urlsafe(12)
        self._kept[token] = kept
        while len(self._kept) > 1 and (len(self._kept) > self.limits.results or self._pixels() > _KEPT_PIXELS):
            self._kept.popitem(last=False)
        return token

    def _pixels(self) -> int:
        sizes = [kept.picture.image.size for kept in list(self._kept.values())]
        return sum(width * height for width, height in sizes)


def takes(method: str) -> list[str]:
    """The options of requests that a method takes."""
    known = declared_options(method)
    whole = ("samples", "seed", "preset")
    single = ("reducer", "noise", "noise_level") if "noise" in known else ()  # points that a preset has settled
    return [name for name in (*whole, *single) if name in known]


def method_options(query: ExplainQuery, most: int) -> dict[str, Any]:
    """The options of the method that a request asks for."""
    taken = takes(query.method)
    given = query.model_dump(include={"samples", "preset", "reducer", "noise", "noise_level"}, exclude_none=True)
    for name in given:
        if name not in taken:
            raise OptionError(f"method {query.method!r} takes no {name}; leave it out")
    if given.get("samples", 0) > most:
        raise OptionError(f"{given['samples']} samples; this server takes at most {most}")
    return given | filter_options(query.method, seed=query.seed) | _chunk(query.method, given)


def _chunk(method: str, options: dict[str, Any]) -> dict[str, int]:
    """Few views in a pass, for many steps; the numbers stay the same."""
    if hasattr(METHODS[method], "refine"):
        return {"chunk": max(1, max_samples(method, options) // _STEPS)}
    return filter_options(method, chunk=_CHUNK)


def _addresses(token: str, endings: Sequence[str]) -> dict[str, str]:
    return {ending: f"/api/results/{token}/{ending}" for ending in endings}


def command(served: Served, query: ExplainQuery, said: Sequence[str], explainer: Explainer) -> str:
    """The command line that makes the same result; names of the server's own files are left open.

    Args:
        served: the model.
        query: the request.
        said: the options that say what is explained.
        explainer: holds the options of the method.
    """
    file = file_name(query.name)
    words = ["dave", "explain", file]
    words += ["--model", served.name] if served.name != "builtin" else []
    words += ["--weights", "FILE"] if served.weights else []
    words += ["--classes", "FILE"] if served.classes else []
    words += served.model.prepare.flags if served.model.prepare else []
    words += [*said, "--method", query.method]
    for name, value in explainer.options.items():
        if name in ("samples", "preset", "seed"):
            words += [f"--{name}", str(value)]
        elif name != "chunk":
            words += ["--set", f"{name}={value}"]
    return shlex.join(words)


def joint(results: Sequence[ClassExplanation], view: View, scales: Scales) -> Drawing:
    """The maps of some results beside each other; those of one unit can share a scale."""
    units = {result.unit or result.explainer.name for result in results}
    panels = [replace(result.panels[0], target=_titled(result)) for result in results]
    cells = panel_cells(panels, view=view, scales=scales if len(units) == 1 else "own")
    return draw_grid([[image_cell(results[0].image), *cells]], title=results[0].classified.picture.name)


def _titled(result: ClassExplanation) -> str:
    return f"{result.panels[0].target}\n{result.explainer.name}, {result.explainer.model.spec}"


@contextmanager
def _watched(model: nn.Module, check: Check) -> Iterator[None]:
    """Checks before every pass of the model, for methods that take many passes and give one map."""
    handle = model.register_forward_pre_hook(lambda module, inputs: check())
    try:
        yield
    finally:
        handle.remove()


def _step(result: ClassExplanation) -> Step:
    panel, against = result.panels[0], result.against
    values = as_map(panel.map)  # [H, W]
    error, signed = panel.standard_error, values if panel.signed is None else panel.signed
    return Step(
        target=result.targets[0],
        against=against["name"] if isinstance(against, dict) else against,
        method=result.explainer.name,
        samples=result.explanation.samples,
        total=result.explainer.max_samples if error is not None else 1,
        seconds=round(result.seconds, 3),
        width=values.shape[1],
        height=values.shape[0],
        unit=panel.unit,
        map=plane(values, scale_map(values)),
        signed=plane(signed, scale_map(signed, signed=True)),
        standard_error=None if error is None else plane(error, scale_map(error)),
        sureness=None if panel.sureness is None else plane(panel.sureness, scale_map(panel.sureness)),
    )
