"""Models and pictures that analyses look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dave_vit.analysis.base import flag
from dave_vit.analysis.catalog import method_entry
from dave_vit.data import open_dataset
from dave_vit.data.classes import map_classes
from dave_vit.data.images import read_image
from dave_vit.engine.forward import logits_of
from dave_vit.errors import DataError, ImageError, OptionError
from dave_vit.evaluate import ModelEntry, Smoothing
from dave_vit.evaluate.scoring import MapMaker
from dave_vit.models import Adapter


@dataclass(frozen=True)
class AnalysisOptions:
    """Options of an analysis of models.

    Attributes:
        models: one or several.
        data: spec of a data set.
        images: files instead of the data set.
        n: pictures to take of the data set.
        device: of the models.
        seed: of everything that is drawn.
        show: whether figures show the pictures themselves beside their maps.
    """

    models: tuple[ModelEntry, ...] = (ModelEntry("builtin", label="builtin"),)
    data: str = flag("builtin", "Pictures: builtin, imagenet:DIR, folder:DIR ...", metavar="SPEC")
    images: tuple[str, ...] = ()
    n: int = 16
    device: str = "cpu"
    seed: int = 0
    show: bool = True

    def __post_init__(self) -> None:
        if self.n < 1:
            raise OptionError(f"{self.n} pictures; expected 1 or more")

    def load(self) -> Iterator[tuple[str, Adapter]]:
        """The models, one after the other, under their labels."""
        for entry in self.models:
            yield entry.label, entry.load(self.device)

    def facts(self, **more: Any) -> dict[str, Any]:
        """What captions tell, without folders."""
        shown = {"models": " + ".join(entry.label for entry in self.models), "data": shown_data(self.data)}
        if self.images:
            shown["data"] = f"{len(self.images)} files"
        return {**shown, **more, "seed": self.seed}


@dataclass(frozen=True)
class MapAnalysisOptions(AnalysisOptions):
    """Options of an analysis of maps.

    Attributes:
        samples: views of each picture.
    """

    samples: int = flag(50, "Views of each picture.", least=1, metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1:
            raise OptionError(f"{self.samples} samples; expected 1 or more")

    def maker(self, method: str) -> MapMaker:
        """What makes maps; for a label of `dave_vit.analysis.catalog`."""
        return MapMaker(method_entry(method, self.samples), Smoothing(), self.seed)


def image_count_flag(default: int) -> int:
    """The field `n` of options, as a flag."""
    return flag(default, "Pictures.", least=1, metavar="N")


def image_files_flag() -> tuple[str, ...]:
    """The field `images` of options, as a flag."""
    return flag((), "Files instead of --data.", metavar="IMAGE", positional=True)


def method_flag() -> str:
    """A field for a method, as a flag."""
    return flag("dave", "One of `dave methods`, dave-paper or dave-official.", metavar="NAME")


def shown_data(spec: str) -> str:
    """The spec of a data set without the folders above it."""
    kind, colon, rest = spec.partition(":")
    return f"{kind}{colon}{rest.rstrip('/').rsplit('/', 1)[-1]}"


@dataclass(frozen=True)
class ImageBatch:
    """Pictures as a model takes them.

    Attributes:
        inputs: preprocessed, [n,C,H,W].
        target: explained classes, [n].
        titles: name of the class and its probability, for each.
        colours: as the model sees them, in [0, 1], [n,3,H,W].
        skipped: how many were passed over, because they are not recognised or cannot be read.
    """

    inputs: Tensor
    target: Tensor
    titles: list[str]
    colours: Tensor
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass
class _Kept:
    inputs: list[Tensor] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    skipped: int = 0


def load_images(model: Adapter, setting: AnalysisOptions, *, recognised: bool = True) -> ImageBatch:
    """The files of a setting, or the first n pictures of its data set.

    Args:
        model: that sees them; the class that it predicts is explained.
        setting: which pictures.
        recognised: take only those that the model classifies correctly.
    """
    kept = _Kept()
    candidates = _files(model, setting.images) if setting.images else _dataset(model, setting.data, kept)
    wanted = len(setting.images) or setting.n
    for inputs, label in candidates:
        probability, predicted = logits_of(model, inputs)[0].softmax(0).max(0)
        if recognised and label is not None and label != int(predicted):
            kept.skipped += 1
            continue
        kept.inputs.append(inputs)
        kept.target.append(int(predicted))
        kept.titles.append(f"{_short(model.class_names[int(predicted)])} ({float(probability):.0%})")
        if len(kept.inputs) == wanted:
            break
    if not kept.inputs:
        raise DataError(f"{setting.data}: the model recognises none of {kept.skipped} pictures; check data and model")
    inputs = torch.cat(kept.inputs)
    target = torch.tensor(kept.target, device=inputs.device)
    return ImageBatch(inputs, target, kept.titles, model.preprocessing.picture(inputs), kept.skipped)


def _files(model: Adapter, paths: Sequence[str]) -> Iterator[tuple[Tensor, None]]:
    for path in paths:
        yield model.preprocess(read_image(path).image), None


def _dataset(model: Adapter, spec: str, kept: _Kept) -> Iterator[tuple[Tensor, int | None]]:
    """Inputs and labels, as classes of the model; pictures of other classes are passed over."""
    data = open_dataset(spec)
    classes = map_classes(data.class_names, model.class_names)
    for index in range(len(data)):
        label = data[index].label
        try:
            if label is None or label in classes:
                yield model.preprocess(data.image(index)), None if label is None else classes[label]
        except ImageError:
            kept.skipped += 1


def _short(name: str) -> str:
    return name.split(",")[0]


def batches(shown: ImageBatch, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, some at a time."""
    return zip(shown.inputs.split(size), shown.target.split(size), strict=True)
