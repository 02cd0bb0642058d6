"""Explain the same images again and again while a model is trained, and log the maps.

Example:
    >>> log_maps(model, step, images, target=labels, every=500, folder="maps")  # in the training loop
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit._internal.atomic_files import image_bytes, json_bytes, write_files
from dave_vit.engine.forward import evaluation_mode
from dave_vit.engine.score_registry import Box
from dave_vit.engine.targets import TargetLike
from dave_vit.errors import OptionError, import_optional
from dave_vit.methods import Explanation, create_method
from dave_vit.methods.base import check_at_least_one
from dave_vit.metrics import energypg
from dave_vit.viz.pages import render
from dave_vit.viz.rendering import overlay, to_pillow


def log_maps(
    model: nn.Module,
    step: int,
    inputs: Tensor,
    *,
    target: TargetLike = None,
    regions: Tensor | Sequence[Box] | None = None,
    every: int = 1,
    method: str = "dave",
    writers: Sequence[Any] = (),
    folder: str | Path | None = None,
    **options: Any,
) -> dict[str, float]:
    """Explain images with a model that is being trained, log maps and numbers, and return the numbers.

    The model is explained in evaluation mode and left as it was; no random number of the training is drawn.

    Args:
        model: maps inputs to logits.
        step: of the training.
        inputs: preprocessed images ``[B, C, H, W]``.
        target: as for every method; give the labels, or the explained class changes with the prediction.
        regions: where the objects are: masks ``[B, H, W]``, or a box (left, top, right, bottom) for each image, both in
            pixels of the inputs. The share of the maps inside of them is logged as ``mass_on_object``.
        every: steps between two explanations; at other steps nothing is done.
        method: name of the method.
        writers: a TensorBoard ``SummaryWriter``, a run of Weights & Biases, or the module ``mlflow``.
        folder: gets the maps, ``scalars.json`` and ``index.html``, a page with the maps over time.
        options: of the method.
    """
    if step % check_at_least_one("every", every):
        return {}
    with evaluation_mode(model):
        explanation = create_method(method, model, **options).explain(inputs.to(next(model.parameters())), target)
    numbers, pictures = _score(explanation, regions), draw_overlays(explanation)
    for writer in writers:
        write(writer, step, {f"dave/{name}": value for name, value in numbers.items()}, pictures)
    if folder is not None:
        save_step(Path(folder), step, numbers, pictures)
    return numbers


class ExplanationCallback:
    """Base of callbacks that explain images at the start and every so many steps.

    Args:
        inputs: preprocessed images ``[B, C, H, W]``.
        every: steps between two explanations.
        writers: as for `log_maps`.
        options: the other arguments of `log_maps`.
    """

    def __init__(self, inputs: Tensor, *, every: int = 100, writers: Sequence[Any] = (), **options: Any) -> None:
        self.writers = writers
        self._log = partial(log_maps, inputs=inputs, every=every, **options)


def callback_finder(callback: type[ExplanationCallback], find_base: Callable[[], type]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module whose one class is a callback that is also one of a library.

    Args:
        callback: has the methods that the library calls; the class is named as it is, without the underscore.
        find_base: imports the library's base class.
    """

    @cache
    def find(name: str) -> Any:
        if name != callback.__name__.lstrip("_"):
            raise AttributeError(f"module {callback.__module__!r} has no attribute {name!r}")
        return type(name, (callback, find_base()), {"__doc__": callback.__doc__, "__module__": callback.__module__})

    return find


def _score(explanation: Explanation, regions: Tensor | Sequence[Box] | None) -> dict[str, float]:
    numbers = {}
    if regions is not None:
        masks = regions if isinstance(regions, Tensor) else _draw_boxes(regions, explanation.map)
        shares = energypg(explanation.map, masks.to(explanation.map.device, torch.bool))
        numbers["mass_on_object"] = float(shares.nan_to_num().mean())  # a map without positive values has none of it
    if explanation.noise_share is not None:
        numbers["noise_share"] = float(explanation.noise_share.mean())
    return numbers


def draw_overlays(explanation: Explanation) -> list[Image.Image]:
    """Return each image of an explanation with its map over it."""
    if explanation.subject is None:
        return []
    pairs = zip(explanation.subject.pictures, explanation.map, strict=True)
    return [to_pillow(overlay(picture, values)) for picture, values in pairs]


def write(writer: Any, step: int, numbers: Mapping[str, float], pictures: Sequence[Image.Image]) -> None:
    """Log numbers and pictures to TensorBoard, Weights & Biases or MLflow, whichever the writer is of."""
    if hasattr(writer, "add_image"):  # TensorBoard
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        for number, picture in enumerate(pictures):
            writer.add_image(f"dave/{number}", np.asarray(picture), step, dataformats="HWC")
    elif hasattr(writer, "log_image"):  # MLflow
        writer.log_metrics(dict(numbers), step=step)
        for number, picture in enumerate(pictures):
            writer.log_image(picture, key=f"dave-{number}", step=step)
    elif hasattr(writer, "log"):  # Weights & Biases
        images = [import_optional("wandb").Image(picture) for picture in pictures]
        writer.log({**numbers, "dave/maps": images}, step=step)
    else:
        how = "give a SummaryWriter of TensorBoard, a run of Weights & Biases, or the module mlflow"
        raise OptionError(f"a writer is of type {type(writer).__name__}; {how}")


def save_step(folder: Path, step: int, numbers: Mapping[str, float], pictures: Sequence[Image.Image]) -> None:
    """Write the maps of a step into a folder, and its page of all steps anew; another run needs another folder."""
    record = folder / "scalars.json"
    rows = json.loads(record.read_text()) if record.is_file() else []
    rows = [row for row in rows if row["step"] != step] + [{"step": step, **numbers}]
    rows.sort(key=lambda row: row["step"])
    names = [[f"{row['step']:08d}-{number}.png" for row in rows] for number in range(len(pictures))]
    page = render("maps.html", title="Maps over time", facts=[], notes=[], rows=rows, names=names)
    files = {folder / f"{step:08d}-{number}.png": image_bytes(picture) for number, picture in enumerate(pictures)}
    write_files({record: json_bytes(rows), folder / "index.html": page.encode(), **files})


def _draw_boxes(boxes: Sequence[Box], maps: Tensor) -> Tensor:
    if len(boxes) != len(maps):
        raise OptionError(f"{len(boxes)} boxes for {len(maps)} images; give one for each image")
    masks = torch.zeros(maps.shape, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[round(top) : round(bottom), round(left) : round(right)] = True
    return masks
