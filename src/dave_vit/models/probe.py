"""Train a linear probe: one layer on the features of a frozen backbone (appendix B: DINO)."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit._internal.atomic_files import replace_atomically
from dave_vit.data.base import Dataset
from dave_vit.engine.forward import HoldDraws
from dave_vit.errors import DataError, OptionError
from dave_vit.models.adapter import Adapter
from dave_vit.models.loading import backbone, resolve_device

_FORWARD = 32  # images in one forward pass


@dataclass(frozen=True)
class Training:
    """Training options of a probe; the defaults are those of the paper.

    Attributes:
        epochs: passes over the training images.
        rate: learning rate at the start of the cosine schedule.
        momentum: of stochastic gradient descent.
        batch: images in one step.
        views: random crops of each image, half of them flipped, whose features are cached; epochs use them in turn.
        seed: the same seed gives the same probe.
    """

    epochs: int = 100
    rate: float = 0.001
    momentum: float = 0.9
    batch: int = 128
    views: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch, self.views) < 1 or self.rate <= 0:
            raise OptionError(
                f"epochs {self.epochs}, batch {self.batch}, views {self.views}, rate {self.rate}; all must be positive"
            )


@dataclass(frozen=True)
class Probe:
    """A trained probe.

    Attributes:
        model: backbone and head as one classifier.
        accuracy: on the validation images.
        training_accuracy: on the training images without random crops.
        images: number of training images.
        validation_images: number of validation images.
    """

    model: Adapter
    accuracy: float
    training_accuracy: float
    images: int
    validation_images: int

    def save(self, path: str | Path) -> None:
        """Write backbone and head into one safetensors file that ``load_model`` takes as weights."""
        from safetensors.torch import save_file

        state = {key: value.detach().cpu().contiguous() for key, value in self.model.model.state_dict().items()}
        metadata = {
            "format": "pt",
            "architecture": self.model.spec.partition(":")[2],
            "class_names": json.dumps(self.model.class_names),
            "accuracy": f"{self.accuracy:.4f}",
        }
        with replace_atomically(Path(path)) as temporary:
            save_file(state, temporary, metadata)


def train_probe(
    spec: str,
    training: Dataset,
    validation: Dataset | None = None,
    *,
    weights: str | None = None,
    device: str | torch.device = "cpu",
    settings: Training | None = None,
    split: float = 0.2,
    report: Callable[[float], None] | None = None,
) -> Probe:
    """Train a linear layer on the features of a backbone.

    Args:
        spec: a timm: or hf: model; its own pooling gives the features, the class token for DINO.
        training: images with labels and class names.
        validation: the same for scoring; by default a part of each class is held out.
        weights: a local file of the backbone's weights instead of a download.
        device: where the backbone runs.
        settings: training options.
        split: fraction of the images held out where there is no validation set.
        report: called with the fraction of forward passes that are done; they are most of the work.
    """
    settings = settings or Training()
    names = _check_class_names(training, validation)
    model, head = backbone(spec, weights, names)
    model.to(resolve_device(device))
    fits, tests = _split(training, validation, split, settings.seed)
    model.model.set_submodule(head, nn.Identity())
    progress = _Progress(report, (settings.views + 1) * len(fits) + len(tests))
    with HoldDraws(settings.seed):  # torchvision's transforms take no generator
        views = [_extract_features(model, fits, progress, _augmentation(model)) for _ in range(settings.views)]
    augmented = torch.stack(views)  # [V, n, D]
    clean, scored = _extract_features(model, fits, progress), _extract_features(model, tests, progress)
    layer = _train_head(augmented, _labels(fits, names), len(names), settings)
    validated = _accuracy(layer, scored, _labels(tests, names))
    trained = _accuracy(layer, clean, _labels(fits, names))
    model.model.set_submodule(head, layer.to(device))
    return Probe(model.eval(), validated, trained, len(fits), len(tests))


_Samples = list[tuple[Dataset, int]]


def _check_class_names(training: Dataset, validation: Dataset | None) -> list[str]:
    names = list(training.class_names)
    if len(names) < 2:
        raise DataError(f"{len(names)} classes to train on; put the images of each class into their own folder")
    unknown = sorted(set(validation.class_names) - set(names)) if validation is not None else []
    if unknown:
        raise DataError(f"validation class {unknown[0]!r} is not among the training classes")
    return names


def _split(training: Dataset, validation: Dataset | None, split: float, seed: int) -> tuple[_Samples, _Samples]:
    """Return training and validation samples."""
    labelled = [index for index in range(len(training)) if training[index].label is not None]
    if validation is not None:
        tests = [(validation, index) for index in range(len(validation)) if validation[index].label is not None]
        return [(training, index) for index in labelled], tests
    if not 0 < split < 1:
        raise OptionError(f"split is {split}; give the part of the images to hold back, between 0 and 1")
    order = torch.randperm(len(labelled), generator=torch.Generator().manual_seed(seed)).tolist()
    by_class: dict[int | None, list[int]] = {}
    for place in order:
        by_class.setdefault(training[labelled[place]].label, []).append(labelled[place])
    held_out = {index for members in by_class.values() for index in members[: max(1, round(split * len(members)))]}
    remaining = [(training, index) for index in labelled if index not in held_out]
    if {training[index].label for _, index in remaining} != by_class.keys():
        raise DataError(
            "a class has a single image, so none is left to score on; add images or name a validation folder"
        )
    return remaining, [(training, index) for index in sorted(held_out)]


def _labels(part: _Samples, names: list[str]) -> Tensor:
    return torch.tensor([names.index(data.class_names[data[index].label or 0]) for data, index in part])


class _Progress:
    def __init__(self, report: Callable[[float], None] | None, total: int) -> None:
        self.report, self.total, self.done = report, total, 0

    def add(self, count: int) -> None:
        self.done += count
        if self.report is not None:
            self.report(self.done / self.total)


def _augmentation(model: Adapter) -> Callable[[Image.Image], Tensor]:
    """Return random resized crop and horizontal flip, with the model's size and normalisation."""
    from torchvision.transforms import v2

    size = model.preprocess(Image.new("RGB", (64, 64))).shape[-2:]
    colours = model.preprocessing
    steps: list[Any] = [
        v2.RandomResizedCrop(list(size), interpolation=v2.InterpolationMode.BICUBIC),
        v2.RandomHorizontalFlip(),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(list(colours.mean), list(colours.std)),
    ]
    return v2.Compose(steps)  # type: ignore[no-any-return]


def _extract_features(
    model: Adapter, part: _Samples, progress: _Progress, transform: Callable[[Image.Image], Tensor] | None = None
) -> Tensor:
    """Compute features ``[n, D]`` of images, on the CPU."""
    parts = []
    place = next(model.parameters())
    for start in range(0, len(part), _FORWARD):
        pictures = [data.image(index) for data, index in part[start : start + _FORWARD]]
        if transform is None:
            inputs = torch.cat([model.preprocess(picture) for picture in pictures])
        else:
            inputs = torch.stack([transform(picture) for picture in pictures]).to(place)
        with torch.no_grad():
            parts.append(model(inputs).float().cpu())
        progress.add(len(pictures))
    return torch.cat(parts)


def _train_head(features: Tensor, labels: Tensor, classes: int, settings: Training) -> nn.Linear:
    """Train the head on cached features ``[views, n, D]``, with the next view in each epoch."""
    draw = torch.Generator().manual_seed(settings.seed)
    layer = nn.Linear(features.shape[-1], classes)
    with torch.no_grad():
        layer.weight.normal_(0, 0.01, generator=draw)
        layer.bias.zero_()
    optimizer = torch.optim.SGD(layer.parameters(), settings.rate, settings.momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs)
    for epoch in range(settings.epochs):
        for chosen in torch.randperm(len(labels), generator=draw).split(settings.batch):
            with torch.enable_grad():
                loss = nn.functional.cross_entropy(layer(features[epoch % len(features), chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return layer.requires_grad_(requires_grad=False)


def _accuracy(layer: nn.Linear, features: Tensor, labels: Tensor) -> float:
    return float((layer(features).argmax(1) == labels).float().mean())
