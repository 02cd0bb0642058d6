"""Registry of analyses, and the options, models, images and methods that they share.

An analysis is a function from options to a section of a report.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from dave_vit._internal.registry import Registry
from dave_vit.data import Dataset, open_dataset
from dave_vit.data.classes import map_classes
from dave_vit.data.images import read_image
from dave_vit.engine.forward import compute_logits
from dave_vit.errors import DataError, ImageError, OptionError
from dave_vit.evaluate import MethodEntry, ModelEntry, Smoothing
from dave_vit.evaluate.scoring import MapMaker
from dave_vit.methods.options import filter_options
from dave_vit.models import Adapter
from dave_vit.viz.report_section import Section

T = TypeVar("T")
Run = Callable[[Any], Section]


@dataclass(frozen=True)
class Flag:
    """How the command line shows an option; see `flag`."""

    help: str
    least: float | None = None
    most: float | None = None
    metavar: str | None = None
    positional: bool = False


def flag(default: T, text: str, **settings: Any) -> T:
    """Declare a field of an analysis's options that is also a flag of `dave analyze`.

    Args:
        default: default value.
        text: help text.
        settings: further fields of `Flag`.
    """
    return field(default=default, metadata={"flag": Flag(text, **settings)})


@dataclass(frozen=True)
class Analysis:
    """A registered analysis.

    Attributes:
        name: name of the command and of the files.
        summary: one sentence, the first of the function's docstring.
        options: a frozen dataclass; all fields have defaults.
        run: function from options to a section.
        first_model: whether a suite of several models runs it for the first one only.
    """

    name: str
    summary: str
    options: type[Any]
    run: Run
    first_model: bool = False


ANALYSES: Registry[Analysis] = Registry("analysis")


def analysis(name: str, *, first_model: bool = False) -> Callable[[Run], Run]:
    """Register a function from options to a section as an analysis.

    Args:
        name: name of the analysis.
        first_model: whether a suite of several models runs it for the first one only.
    """

    def register(run: Run) -> Run:
        summary = (run.__doc__ or "").partition("\n")[0]
        ANALYSES.register(name)(Analysis(name, summary, get_type_hints(run)["options"], run, first_model))
        return run

    return register


@dataclass(frozen=True)
class AnalysisOptions:
    """Options of an analysis of models.

    Attributes:
        models: one or several.
        data: spec of a data set.
        images: files to use instead of the data set.
        n: number of images of the data set.
        device: device of the models.
        seed: seed of all random draws.
        show: whether figures show the images beside their maps.
    """

    models: tuple[ModelEntry, ...] = (ModelEntry("builtin", label="builtin"),)
    data: str = flag("builtin", "Data set of the images: builtin, imagenet:DIR, folder:DIR ...", metavar="SPEC")
    images: tuple[str, ...] = ()
    n: int = 16
    device: str = "cpu"
    seed: int = 0
    show: bool = True

    def __post_init__(self) -> None:
        if self.n < 1:
            raise OptionError(f"{self.n} images; expected 1 or more")

    def load(self) -> Iterator[tuple[str, Adapter]]:
        """Load the models one after the other, with their labels."""
        for entry in self.models:
            yield entry.label, entry.load(self.device)

    def load_with_images(self, *, recognised: bool = True) -> "Iterator[tuple[str, Adapter, ImageBatch]]":
        """Load the models one after the other, with their labels and images; see `load_images`."""
        for label, model in self.load():
            yield label, model, load_images(model, self, recognised=recognised)

    def facts(self, **more: Any) -> dict[str, Any]:
        """Return what captions state about a run, without names of folders."""
        data = f"{len(self.images)} files" if self.images else hide_folders(self.data)
        return {"models": " + ".join(entry.label for entry in self.models), "data": data, **more, "seed": self.seed}


@dataclass(frozen=True)
class MapAnalysisOptions(AnalysisOptions):
    """Options of an analysis of maps.

    Attributes:
        samples: samples of each image.
    """

    samples: int = flag(50, "Samples of each image.", least=1, metavar="N")

    def maker(self, method: str) -> MapMaker:
        """Return the map maker of a label of `dave_vit.analysis.inputs`."""
        return MapMaker(method_entry(method, self.samples), Smoothing(), self.seed)


def count_flag(default: int) -> int:
    """Declare the field `n` of options as a flag."""
    return flag(default, "Number of images.", least=1, metavar="N")


def files_flag() -> tuple[str, ...]:
    """Declare the field `images` of options as arguments."""
    return flag((), "Image files to use instead of --data.", metavar="IMAGE", positional=True)


def method_flag() -> str:
    """Declare a field for a method as a flag."""
    return flag("dave", "One of `dave methods`, dave-paper or dave-official.", metavar="NAME")


def hide_folders(spec: str) -> str:
    """Return the spec of a data set without the folders above it."""
    kind, colon, rest = spec.partition(":")
    return f"{kind}{colon}{rest.rstrip('/').rsplit('/', 1)[-1]}"


@dataclass(frozen=True)
class ImageBatch:
    """Images as a model takes them.

    Attributes:
        inputs: preprocessed, [n,C,H,W].
        target: explained classes, [n].
        titles: class name and probability of each.
        colours: the same images in [0, 1], [n,3,H,W].
    """

    inputs: Tensor
    target: Tensor
    titles: list[str]
    colours: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    @classmethod
    def build(cls, model: Adapter, inputs: list[Tensor], target: list[int], titles: list[str]) -> "ImageBatch":
        """Join images [1,C,H,W] and their targets."""
        joined = torch.cat(inputs)
        return cls(joined, torch.tensor(target, device=joined.device), titles, model.preprocessing.picture(joined))

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets in batches."""
        return zip(self.inputs.split(size), self.target.split(size), strict=True)


def load_images(model: Adapter, options: AnalysisOptions, *, recognised: bool = True) -> ImageBatch:
    """Load the files of the options, or the first n images of their data set.

    Args:
        model: predicts the class to explain.
        options: name the images.
        recognised: use only images that the model classifies correctly.
    """
    chosen: list[tuple[Tensor, int, str]] = []
    candidates = 0
    for image, label in _iter_candidates(model, options):
        candidates += 1
        if image is None:
            continue
        probability, predicted = compute_logits(model, image)[0].softmax(0).max(0)
        if recognised and label not in (None, int(predicted)):
            continue
        chosen.append((image, int(predicted), f"{_short_name(model, int(predicted))} ({float(probability):.0%})"))
        if len(chosen) == (len(options.images) or options.n):
            break
    if not chosen:
        raise DataError(f"{options.data}: the model recognises none of {candidates} images; check data and model")
    return ImageBatch.build(model, *map(list, zip(*chosen, strict=True)))


def _preprocess(model: Adapter, data: Dataset, index: int) -> Tensor | None:
    """Return image ``index`` of a data set as the model takes it, [1,C,H,W]; None if it cannot be read."""
    try:
        return model.preprocess(data.image(index))
    except ImageError:
        return None


def _short_name(model: Adapter, label: int) -> str:
    """Return the name of a class without its synonyms."""
    return model.class_names[label].split(",")[0]


def _iter_candidates(model: Adapter, options: AnalysisOptions) -> Iterator[tuple[Tensor | None, int | None]]:
    """Yield images and their labels as classes of the model, without images of other classes; None if unreadable."""
    for path in options.images:
        yield model.preprocess(read_image(path).image), None
    if options.images:
        return
    data = open_dataset(options.data)
    classes = map_classes(data.class_names, model.class_names)
    for index in range(len(data)):
        label = data[index].label
        if label is None or label in classes:
            yield _preprocess(model, data, index), None if label is None else classes[label]


_CLASSES = 3  # number of classes where none are named


def load_classes(model: Adapter, spec: str, count: int, labels: Sequence[int] = ()) -> dict[int, ImageBatch]:
    """Load recognised images of some classes, by class of the model.

    Args:
        model: has to recognise them.
        spec: names a data set.
        count: most images of a class.
        labels: classes; by default those with the most images.
    """
    data = open_dataset(spec)
    sheets: dict[int, ImageBatch] = {}
    needed = len(labels) or _CLASSES
    for label, indices in _find_candidates(model, data, count + 1, labels).items():
        images = [image for index in indices if (image := _preprocess(model, data, index)) is not None]
        images = [image for image in images if int(compute_logits(model, image)[0].argmax()) == label][:count]
        if images:
            titles = [_short_name(model, label)] * len(images)
            sheets[label] = ImageBatch.build(model, images, [label] * len(images), titles)
        # A sheet of one image shows nothing that recurs.
        if sum(len(sheet) >= min(2, count) for sheet in sheets.values()) == needed:
            break
    if not sheets:
        raise DataError(f"{hide_folders(spec)}: the model recognises no image of these classes; name others")
    return dict(sorted(sheets.items(), key=lambda sheet: -len(sheet[1]))[:needed])


def _find_candidates(model: Adapter, data: Dataset, count: int, labels: Sequence[int]) -> dict[int, list[int]]:
    """Return indices of images by class, most images first; stops when enough classes have ``count`` of them."""
    classes = map_classes(data.class_names, model.class_names)
    candidates: dict[int, list[int]] = {label: [] for label in labels}
    classes_needed, classes_full = len(labels) or _CLASSES, 0
    for index in range(len(data)):
        own = data[index].label
        label = None if own is None else classes.get(own)
        if label is None or (labels and label not in candidates) or len(candidates.get(label, [])) == count:
            continue
        candidates.setdefault(label, []).append(index)
        classes_full += len(candidates[label]) == count
        if classes_full == classes_needed:
            break
    return dict(sorted(candidates.items(), key=lambda candidate: -len(candidate[1])))


_PRESETS = {"dave-paper": "paper", "dave-official": "official"}


def method_entry(label: str, samples: int) -> MethodEntry:
    """Return the plan's entry for a label; methods that take samples or steps get that many.

    Args:
        label: name of a method, or "dave-paper" and "dave-official" for DAVE with that preset.
        samples: the paper's T.
    """
    preset = {"preset": _PRESETS[label]} if label in _PRESETS else {}
    name = "dave" if preset else label
    return MethodEntry(name, {**filter_options(name, samples=samples, steps=samples), **preset}, label)
