"""A worker: computes tasks one after the other, and keeps the model and the images that the next one shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.atomic import npz_bytes
from dave_vit.bench.numbers.rows import Row, Scanned, pack
from dave_vit.bench.plan import ModelEntry, Plan, digest
from dave_vit.bench.scoring import MapMaker, Scorer, clock
from dave_vit.bench.tasks import Task
from dave_vit.data import Dataset, Item, open_dataset
from dave_vit.data.batches import Batch, load_batch
from dave_vit.data.classes import class_map
from dave_vit.data.grids import compose
from dave_vit.data.placement import Placements
from dave_vit.environment import device_name, listed, versions
from dave_vit.errors import DaveError, ImageError, UnsupportedOperator
from dave_vit.methods import create_method
from dave_vit.metrics import Case, GridMetric

Files = dict[str, bytes]
Loader = Callable[[ModelEntry, str], nn.Module]
_READERS = 4  # threads that decode images


@dataclass(frozen=True)
class Job:
    """What all workers of a run share; it travels to other processes.

    Attributes:
        plan: what is computed.
        loader: from an entry of the plan and a device to a model.
        threads: of torch in each worker on the CPU; the sums of some operations depend on it.
    """

    plan: Plan
    loader: Loader = ModelEntry.load
    threads: int | None = None


class Subject:
    """A model, and what its preprocessing does to classes, places and colours.

    Args:
        model: has ``preprocess`` and ``class_names``, as ``load_model`` gives it.
        data: what it is evaluated on.
    """

    def __init__(self, model: Any, data: Dataset) -> None:
        self.model: nn.Module = model
        self.placements = Placements(model.preprocess)
        self.classes = class_map(data.class_names, model.class_names)
        self.black, self.white = (self._colour(grey) for grey in (0, 255))

    def label(self, label: int | None) -> int | None:
        """A label of the data set as a class of the model."""
        return None if label is None else self.classes.get(label)

    def picture(self, inputs: Tensor) -> npt.NDArray[np.uint8]:
        """Preprocessed images as the model sees them, [B,H,W,3]."""
        black, white = (torch.tensor(colour[:3]).view(1, 3, 1, 1) for colour in (self.black, self.white))
        shown = (inputs[:, :3].detach().float().cpu() - black) / (white - black)
        return np.asarray((shown.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy())

    def _colour(self, grey: int) -> list[float]:
        """A black or white pixel after preprocessing, one number per channel."""
        shown = self.placements.preprocess(Image.new("RGB", (64, 64), (grey, grey, grey)))
        shown = shown.reshape(shown.shape[-3:]).float()  # [C,H,W]
        centre: list[float] = shown[:, shown.shape[1] // 2, shown.shape[2] // 2].tolist()
        return centre


def check(job: Job, data: Dataset) -> None:
    """Loads each model of a plan and makes each method for it once, so that what cannot work is said at once."""
    for entry in job.plan.models:
        subject = Subject(job.loader(entry, "cpu"), data)
        for method in job.plan.methods:
            with suppress(UnsupportedOperator):  # its images are dropped, with the reason
                create_method(method.method, subject.model, **method.options)


@dataclass(frozen=True)
class _Part:
    """A batch on its way to rows: inputs [B,C,H,W], target [B] or [B,K], regions [B,H,W], and a row for each map."""

    inputs: Tensor
    target: Tensor
    regions: Tensor
    rows: list[Row]


@dataclass
class _Shard:
    """What a task has made so far."""

    rows: list[Row] = field(default_factory=list)
    maps: list[tuple[Sequence[str], Tensor]] = field(default_factory=list)
    done: int = 0

    def files(self, task: Task) -> Files:
        """Maps first: the rows say that the task is done."""
        maps = {task.maps_file: pack_maps(self.maps)} if self.maps else {}
        return {**maps, task.file: pack(self.rows)}


class Worker:
    """Computes tasks on one device.

    Args:
        job: what is computed.
        device: such as "cpu" or "cuda:1".
    """

    def __init__(self, job: Job, device: str) -> None:
        self.plan, self.loader, self.device = job.plan, job.loader, torch.device(device)
        self.data = open_dataset(job.plan.data, job.plan.limit)
        self._readers = ThreadPoolExecutor(_READERS)
        self._subject: tuple[int, Subject] | None = None
        self._images: tuple[Any, list[Batch]] | None = None
        self._metrics = [(entry, entry.create()) for entry in job.plan.metrics]

    def close(self) -> None:
        """Ends the threads that read images."""
        self._readers.shutdown(wait=False)

    def compute(self, task: Task) -> Files:
        """The files of a task, in the order in which they must be written."""
        kinds = {"scan": self._scan, "images": self._image_rows, "grids": self._grid_rows, "examples": self._examples}
        with torch.inference_mode(False):  # maps need gradients, whatever the caller has set
            return kinds[task.kind](task)

    def _scan(self, task: Task) -> Files:
        subject = self._model(task)
        scanned: list[Scanned] = []
        for batch in self._batches(task):
            scanned += [self._unread(index, reason) for index, reason in batch.failures]
            if batch.indices:
                with torch.no_grad():
                    top = subject.model(batch.inputs).float().softmax(1).max(1)
                rows = zip(batch.indices, batch.items, top.indices.tolist(), top.values.tolist(), strict=True)
                scanned += [self._known(subject, *row) for row in rows]
        return {task.file: pack(sorted(scanned, key=lambda one: one.index), Scanned)}

    def _unread(self, index: int, reason: str) -> Scanned:
        item = self.data[index]
        return Scanned(index, item.name, _unit(item), None, None, None, reason)

    def _known(self, subject: Subject, index: int, item: Item, predicted: int, confidence: float) -> Scanned:
        label = subject.label(item.label)
        dropped = "class is not one of the model's" if item.label is not None and label is None else None
        return Scanned(index, item.name, _unit(item), label, predicted, confidence, dropped)

    def _image_rows(self, task: Task) -> Files:
        shard = _Shard()
        wanted = dict(zip(task.images, task.targets, strict=True))
        for batch in self._batches(task):
            for index, reason in batch.failures:  # it could be read when the run began
                item = self.data[index]
                shard.rows += self._dropped(task, [self._row(task, item.name, _unit(item), wanted[index])], reason)
            if batch.indices:
                targets = [wanted[index] for index in batch.indices]
                pairs = zip(batch.items, targets, strict=True)
                rows = [self._row(task, item.name, _unit(item), target) for item, target in pairs]
                target = torch.tensor(targets, device=self.device)
                self._score(task, _Part(batch.inputs, target, batch.regions, rows), shard)
        return shard.files(task)

    def _grid_rows(self, task: Task) -> Files:
        options = next(metric.options for _, metric in self._metrics if isinstance(metric, GridMetric))
        shard, cells, tensors = _Shard(), options.cells**2, self._tensors(task)
        step = cells * max(1, self.plan.batch // cells)
        for at in range(0, len(task.images), step):
            numbers, targets = task.images[at : at + step], task.targets[at : at + step]
            stacked = torch.stack([tensors[index] for index in numbers]).unflatten(0, (-1, cells))
            inputs = compose(stacked, options.cell)  # [B,C,H,W]
            units = [f"grid-{task.start + (at + i) // cells:05d}" for i in range(len(numbers))]
            rows = [self._row(task, f"{unit}/{i % cells}", unit, targets[i]) for i, unit in enumerate(units)]
            shown = [_unit(self.data[index]) for index in numbers]
            rows = [replace(row, pictures=shown[i - i % cells :][:cells]) for i, row in enumerate(rows)]
            target = torch.tensor(targets, device=self.device).view(-1, cells)
            self._score(task, _Part(inputs, target, torch.zeros_like(inputs[:, 0], dtype=torch.bool), rows), shard)
        return shard.files(task)

    def _row(self, task: Task, image: str, unit: str, target: int) -> Row:
        """What is known of a map before it is made."""
        return Row(
            model=self.plan.models[task.model].label,
            method=self.plan.methods[task.method].label,
            image=image,
            unit=unit,
            target=target,
            seed=task.seed,
            versions=listed(versions()),
            device=device_name(self.device),
        )

    def _tensors(self, task: Task) -> dict[int, Tensor]:
        """The images of grids; all could be read when the grids were built."""
        tensors: dict[int, Tensor] = {}
        for batch in self._batches(task):
            for _, reason in batch.failures:
                raise ImageError(f"an image of the grids can no longer be read: {reason}")
            tensors |= dict(zip(batch.indices, batch.inputs, strict=True))
        return tensors

    def _score(self, task: Task, part: _Part, shard: _Shard) -> None:
        """Adds the rows of a batch under all metrics of its kind; its maps are made once."""
        subject, maker = self._model(task), self._maker(task)
        started = clock(part.inputs)
        try:
            maps = maker.maps(subject.model, part.inputs, part.target)
        except DaveError as error:  # such as a method that finds nothing in this model
            shard.rows += self._dropped(task, part.rows, str(error))
            return
        seconds = (clock(part.inputs) - started) / len(part.rows)
        rows = [replace(row, map_seconds=seconds) for row in part.rows]
        case = Case(subject.model, part.inputs, part.target, maps, part.regions, maker.maps, subject.black)
        if self.plan.save_maps:
            shard.maps.append(([row.image for row in rows], maps.flatten(0, -3).cpu()))
        place = task.start + shard.done
        shard.done += len(part.inputs)
        for scorer in self._scorers(task):
            count = len(part.inputs) if scorer.metric.images is None else max(0, scorer.metric.images - place)
            if count:
                shard.rows += scorer.rows(_first(case, count), rows[: count * part.target[0].numel()])

    def _maker(self, task: Task) -> MapMaker:
        return MapMaker(self.plan.methods[task.method], self.plan.smoothing, task.seed)

    def _dropped(self, task: Task, rows: Sequence[Row], reason: str) -> list[Row]:
        """Rows without a value for all metrics of the task."""
        return [row for scorer in self._scorers(task) for row in scorer.dropped(rows, reason)]

    def _scorers(self, task: Task) -> list[Scorer]:
        plan = self.plan
        how = [plan.methods[task.method].options, plan.smoothing, plan.target, plan.min_confidence]
        return [
            Scorer(entry.label, metric, digest([*map(str, how), entry.metric, dict(entry.options)])[:12])
            for entry, metric in self._metrics
            if isinstance(metric, GridMetric) == (task.kind == "grids")
        ]

    def _examples(self, task: Task) -> Files:
        subject, maker = self._model(task), self._maker(task)
        wanted = dict(zip(task.images, task.targets, strict=True))
        arrays: dict[str, Any] = {}
        for batch in self._batches(task):
            target = torch.tensor([wanted[index] for index in batch.indices], device=self.device)
            maps = maker.maps(subject.model, batch.inputs, target).float().cpu().numpy()
            for i, index in enumerate(batch.indices):
                arrays[f"map-{index}"] = maps[i]
                arrays[f"region-{index}"] = batch.regions[i].cpu().numpy()
                arrays[f"image-{index}"] = subject.picture(batch.inputs[i : i + 1])[0]
        return {task.file: npz_bytes(arrays)}

    def _model(self, task: Task) -> Subject:
        if self._subject is None or self._subject[0] != task.model:
            self._subject = None  # the old one goes before the new one comes
            model = self.loader(self.plan.models[task.model], str(self.device))
            self._subject = (task.model, Subject(model, self.data))
        return self._subject[1]

    def _batches(self, task: Task) -> Iterator[Batch]:
        """The images of a task on the device; those of the last task are still here."""
        key = (task.model, task.images)
        subject = self._model(task)
        if self._images is None or self._images[0] != key:
            self._images = None
            numbers = list(dict.fromkeys(task.images))
            parts = [numbers[at : at + self.plan.batch] for at in range(0, len(numbers), self.plan.batch)]
            self._images = (key, [load_batch(self.data, part, subject.placements, self._readers) for part in parts])
        for batch in self._images[1]:
            yield batch.to(self.device)


def pack_maps(kept: Sequence[tuple[Sequence[str], Tensor]]) -> bytes:
    """Maps in half precision: each over its largest magnitude, which is beside it."""
    names = [name for part, _ in kept for name in part]
    maps = torch.cat([part for _, part in kept]).float()
    scale = maps.abs().flatten(1).amax(1).nan_to_num(1.0, 1.0, 1.0)
    scale = torch.where(scale > 0, scale, 1.0)
    halved = (maps / scale[:, None, None]).half().numpy()
    return npz_bytes({"names": np.array(names), "maps": halved, "scale": scale.numpy()})


def _first(case: Case, count: int) -> Case:
    if count >= len(case.inputs):
        return case
    cut = {name: getattr(case, name)[:count] for name in ("inputs", "target", "maps", "regions")}
    return replace(case, **cut)


def _unit(item: Item) -> str:
    return item.picture or item.name
