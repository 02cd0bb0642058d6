"""`dave probe`: a class head for a backbone that has none."""

from __future__ import annotations

from dataclasses import MISSING, asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dave_vit.cli.common import Output, command
from dave_vit.cli.options import Device, OptionGroup, Seed, Weights, flag, option, pick_device
from dave_vit.errors import OptionError

if TYPE_CHECKING:
    from dave_vit.models.probe import Probe


class BackboneOptions(OptionGroup):
    """A model without a class head, and its device."""

    spec: str = option("--model -m SPEC", "Backbone: a timm: or hf: model.", default=MISSING)
    weights: Weights = None
    device: Device = "auto"


class TrainingOptions(OptionGroup):
    """The fields of `Training` that have a flag."""

    views: int = option("--views N", "Number of random crops of each image.", min=1, default=10)
    epochs: int = option("--epochs N", "Number of passes over the features.", min=1, default=100)
    rate: float = option("--rate", "Learning rate at the start of the cosine schedule.", default=0.001)
    batch: int = option("--batch N", "Images per training step.", min=1, default=128)
    seed: Seed = 0


@command(
    "dave probe photos/train --model timm:vit_base_patch16_224.dino --out probe.safetensors",
    "dave probe photos/train --val photos/val --model vit_small_patch14_dinov2 --weights dinov2.pth",
    "dave explain cat.jpg --model timm:vit_base_patch16_224.dino --weights probe.safetensors",
)
def probe(
    *,
    images: Annotated[str, typer.Argument(metavar="DIR", help="Training images, one folder for each class.")],
    model: BackboneOptions,
    validation: Annotated[str | None, flag("--val DIR", "Validation images, in folders of the same names.")] = None,
    split: Annotated[
        float, flag("--split PART", "Part of each class to hold back for validation where there is no --val.")
    ] = 0.2,
    training: TrainingOptions,
    out: Annotated[Path, flag("--out -o FILE", "File for the backbone and its head.")] = Path("probe.safetensors"),
    output: Output,
) -> None:
    """Train a linear layer on a frozen backbone, such as DINO, and save both as weights.

    Features of random crops are computed once and kept; then the layer is trained on them in seconds: cross-entropy,
    stochastic gradient descent with momentum 0.9 and a cosine schedule. The default rate is the paper's, for ImageNet;
    a small set of images may want a higher one.
    """
    from dave_vit.data.sets.folder import Folder
    from dave_vit.models.probe import Training, train_probe

    if model.weights and out.resolve() == Path(model.weights).resolve():
        raise OptionError(f"--out {out} is the file of --weights; give another name")
    with output.progress(1.0, "features") as update:
        trained = train_probe(
            model.spec,
            Folder(images),
            Folder(validation) if validation is not None else None,
            weights=model.weights,
            device=pick_device(model.device),
            settings=Training(**asdict(training)),
            split=split,
            report=lambda part: update(completed=part),
        )
    trained.save(out)
    _print_result(output, trained, out)


def _print_result(output: Output, trained: Probe, out: Path) -> None:
    output.print(
        f"accuracy {trained.accuracy:.1%} on {trained.validation_images} validation images "
        f"({trained.training_accuracy:.1%} on the {trained.images} training images)",
        f"saved {out}; use it with --model {trained.model.spec} --weights {out}",
    )
    numbers = {name: value for name, value in vars(trained).items() if name != "model"}
    output.json({"model": trained.model.spec, "classes": trained.model.class_names, **numbers, "file": str(out)})
