"""A worker: computes tasks one after the other, and keeps the model and the images that the next one shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit._internal.atomic_files import npz_bytes
from dave_vit._internal.environment import device_name, format_facts
from dave_vit._internal.registry import import_plugins
from dave_vit.data import Item, open_dataset
from dave_vit.data.batches import Batch
from dave_vit.data.grids import compose_grids
from dave_vit.engine.forward import count_passes
from dave_vit.errors import DaveError, ImageError, OutOfMemory, is_out_of_memory
from dave_vit.evaluate.job import EvalJob, EvaluatedModel
from dave_vit.evaluate.plan_entries import hash_content
from dave_vit.evaluate.prefetch import BatchPrefetcher
from dave_vit.evaluate.provenance import software
from dave_vit.evaluate.scoring import MapCache, MapMaker, Scorer, clock
from dave_vit.evaluate.statistics.rows import Row, ScannedImage, pack
from dave_vit.evaluate.tasks import EvalTask
from dave_vit.methods.pass_size import PassSize
from dave_vit.metrics import Case, GridMetric

Files = dict[str, bytes]


@dataclass(frozen=True)
class _Part:
    """A batch on its way to rows.

    Attributes:
        inputs: [B,C,H,W].
        target: [B] or [B,K].
        regions: [B,H,W].
        rows: one for each map.
        places: of the inputs among all images or grids of the run, rising, [B].
    """

    inputs: Tensor
    target: Tensor
    regions: Tensor
    rows: list[Row]
    places: list[int]

    def cut(self, start: int, stop: int) -> _Part:
        """Some of its inputs."""
        each = len(self.rows) // len(self.inputs)
        inputs, target, regions = (part[start:stop] for part in (self.inputs, self.target, self.regions))
        return _Part(inputs, target, regions, self.rows[start * each : stop * each], self.places[start:stop])


@dataclass
class _Shard:
    """What a task has made so far."""

    rows: list[Row] = field(default_factory=list)
    maps: list[tuple[Sequence[str], Tensor]] = field(default_factory=list)

    def files(self, task: EvalTask) -> Files:
        """Maps first: the rows say that the task is done."""
        maps = {task.maps_file: pack_maps(self.maps)} if self.maps else {}
        return {**maps, task.file: pack(self.rows)}


class Worker:
    """Computes tasks on one device.

    Args:
        job: what is computed.
        device: such as "cpu" or "cuda:1".
    """

    def __init__(self, job: EvalJob, device: str) -> None:
        import_plugins(job.plan.plugins)  # of which a process of its own knows nothing yet
        for name, found in software().items():
            job.compare("software", name, found)
        self.plan, self.job, self.device = job.plan, job, torch.device(device)
        self.data = open_dataset(job.plan.data, job.plan.limit)
        self._reading = BatchPrefetcher(self.data, job.plan.batch)
        self._likely: EvalTask | None = None
        self._subject: tuple[int, EvaluatedModel] | None = None
        self._made: tuple[tuple[int, int], MapMaker] | None = None
        self._metrics = [(entry, entry.create()) for entry in job.plan.metrics]
        self._twice = len({hash_content([one.metric, dict(one.options)]) for one in job.plan.metrics}) < len(
            self._metrics
        )

    def close(self) -> None:
        """Ends the threads that read images."""
        self._reading.close()

    def rest(self) -> None:
        """Leaves memory to others while there is nothing to do."""
        self._reading.forget()
        self._made = None
        torch.cuda.empty_cache()

    def ahead(self, task: EvalTask | None) -> None:
        """Says which task is likely to follow the next one: its images are read while that one is computed."""
        self._likely = task

    def compute(self, task: EvalTask) -> Files:
        """The files of a task, in the order in which they must be written; raises `OutOfMemory` where there is none."""
        kinds = {"scan": self._scan, "images": self._image_rows, "grids": self._grid_rows, "examples": self._examples}
        try:
            with torch.inference_mode(False):  # maps need gradients, whatever the caller has set
                return kinds[task.kind](task)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self.rest()  # outside of the handler, so that what failed is freed first
        raise OutOfMemory(
            f"{self.device} is out of memory at {task.name}; end what else uses it, or take fewer workers or a smaller "
            "batch; the same command goes on with what is left"
        )

    def _scan(self, task: EvalTask) -> Files:
        subject = self._model(task)
        scanned: list[ScannedImage] = []
        for batch in self._batches(task):
            scanned += [self._unread(index, reason) for index, reason in batch.failures]
            if batch.indices:
                with torch.no_grad():
                    top = _logits(subject.model, batch.inputs).softmax(1).max(1)
                rows = zip(batch.indices, batch.items, top.indices.tolist(), top.values.tolist(), strict=True)
                scanned += [self._known(subject, *row) for row in rows]
        return {task.file: pack(sorted(scanned, key=lambda one: one.index), ScannedImage)}

    def _unread(self, index: int, reason: str) -> ScannedImage:
        item = self.data[index]
        return ScannedImage(index, item.name, _unit(item), None, None, None, reason)

    def _known(
        self, subject: EvaluatedModel, index: int, item: Item, predicted: int, confidence: float
    ) -> ScannedImage:
        label = subject.label(item.label)
        dropped = "class is not one of the model's" if item.label is not None and label is None else None
        return ScannedImage(index, item.name, _unit(item), label, predicted, confidence, dropped)

    def _image_rows(self, task: EvalTask) -> Files:
        shard = _Shard()
        wanted = dict(zip(task.images, task.targets, strict=True))
        place = {index: task.start + number for number, index in enumerate(task.images)}
        for batch in self._batches(task):
            for index, reason in batch.failures:  # it could be read when the run began
                item = self.data[index]
                row = self._row(task, item.name, _unit(item), wanted[index])
                shard.rows += self._dropped(task, [row], [place[index]], reason)
            if batch.indices:
                targets = [wanted[index] for index in batch.indices]
                pairs = zip(batch.items, targets, strict=True)
                rows = [self._row(task, item.name, _unit(item), target) for item, target in pairs]
                target = torch.tensor(targets, device=self.device)
                places = [place[index] for index in batch.indices]
                self._score(task, _Part(batch.inputs, target, batch.regions, rows, places), shard)
        return shard.files(task)

    def _grid_rows(self, task: EvalTask) -> Files:
        options = next(metric.options for _, metric in self._metrics if isinstance(metric, GridMetric))
        shard, cells, known = _Shard(), options.cells**2, self._readable(task)
        step = cells * max(1, self.plan.batch // cells)
        for at in range(0, len(task.images), step):
            numbers, targets = task.images[at : at + step], task.targets[at : at + step]
            stacked = torch.stack([known[index][1] for index in numbers]).unflatten(0, (-1, cells))
            inputs = compose_grids(stacked, options.cell)  # [B,C,H,W]
            units = [f"grid-{task.start + (at + i) // cells:05d}" for i in range(len(numbers))]
            rows = [self._row(task, f"{unit}/{i % cells}", unit, targets[i]) for i, unit in enumerate(units)]
            shown = [_unit(known[index][0]) for index in numbers]
            rows = [replace(row, pictures=shown[i - i % cells :][:cells]) for i, row in enumerate(rows)]
            target = torch.tensor(targets, device=self.device).view(-1, cells)
            nowhere = torch.zeros_like(inputs[:, 0], dtype=torch.bool)
            places = [task.start + at // cells + i for i in range(len(inputs))]
            self._score(task, _Part(inputs, target, nowhere, rows, places), shard)
        return shard.files(task)

    def _row(self, task: EvalTask, image: str, unit: str, target: int) -> Row:
        """What is known of a map before it is made."""
        return Row(
            model=self.plan.models[task.model].label,
            method=self.plan.methods[task.method].label,
            image=image,
            unit=unit,
            target=target,
            seed=task.seed,
            versions=format_facts(software()),
            device=device_name(self.device),
        )

    def _readable(self, task: EvalTask) -> dict[int, tuple[Item, Tensor]]:
        """The images of grids; all could be read when the grids were built."""
        known: dict[int, tuple[Item, Tensor]] = {}
        for batch in self._batches(task):
            for _, reason in batch.failures:
                raise ImageError(f"an image of the grids can no longer be read: {reason}")
            known |= zip(batch.indices, zip(batch.items, batch.inputs, strict=True), strict=True)
        return known

    def _score(self, task: EvalTask, part: _Part, shard: _Shard) -> None:
        """Adds the rows of a batch under all metrics of its kind; in halves where memory does not suffice for it."""
        count = len(part.inputs)
        for made in PassSize(count).run_chunks(
            lambda start, stop: self._scored_or_dropped(task, part.cut(start, stop)), count
        ):
            shard.rows += made.rows
            shard.maps += made.maps

    def _scored_or_dropped(self, task: EvalTask, part: _Part) -> _Shard:
        """The rows of a batch; of one image for which memory does not suffice, at the last try, without a value."""
        try:
            return self._scored(task, part)
        except (RuntimeError, MemoryError) as error:
            if not (task.last and len(part.inputs) == 1 and is_out_of_memory(error)):
                raise
        self.rest()
        return _Shard(self._dropped(task, part.rows, part.places, f"out of memory on {self.device}"))

    def _scored(self, task: EvalTask, part: _Part) -> _Shard:
        """The rows of a batch, whose maps are made once, and the maps where they are kept."""
        subject, maker, made = self._model(task), self._maker(task), _Shard()
        started = clock(part.inputs)
        try:
            with count_passes() as count:
                raw = maker.raw(subject.model, part.inputs, part.target)
        except DaveError as error:  # such as a method that finds nothing in this model
            made.rows += self._dropped(task, part.rows, part.places, str(error))
            return made
        seconds = (clock(part.inputs) - started) / len(part.rows)
        passes = count.passes / len(part.inputs)
        rows = [replace(row, passes=passes, map_seconds=seconds) for row in part.rows]
        if self.plan.save_maps:
            kept = maker.smoothed(subject.model, raw)
            made.maps.append(([row.image for row in rows], kept.flatten(0, -3).cpu()))
        recall = MapCache() if self._twice else None
        for scorer in self._scorers(task):
            if some := scorer.count(part.places):
                case = _case(subject, part.cut(0, some), raw[:some], maker.with_smoothing(scorer.smoothing, recall))
                made.rows += scorer.rows(case, rows[: some * part.target[0].numel()])
        return made

    def _maker(self, task: EvalTask) -> MapMaker:
        """Kept while tasks have the same method, so that it draws once."""
        way = task.method, task.seed
        if self._made is None or self._made[0] != way:
            self._made = way, MapMaker(self.plan.methods[task.method], self.plan.smoothing, task.seed)
        return self._made[1]

    def _dropped(self, task: EvalTask, rows: Sequence[Row], places: Sequence[int], reason: str) -> list[Row]:
        """Rows without a value for all metrics of the task."""
        each = len(rows) // len(places)
        made = ((scorer, scorer.count(places) * each) for scorer in self._scorers(task))
        return [row for scorer, some in made for row in scorer.dropped(rows[:some], reason)]

    def _scorers(self, task: EvalTask) -> list[Scorer]:
        plan = self.plan
        made = []
        for entry, metric in self._metrics:
            if isinstance(metric, GridMetric) == (task.kind == "grids"):
                smoothing = entry.smoothing or plan.smoothing
                how = [plan.methods[task.method].options, smoothing, plan.target, plan.min_confidence]
                options = hash_content([*map(str, how), entry.metric, dict(entry.options)])[:12]
                made.append(Scorer(entry.label, metric, options, smoothing))
        return made

    def _examples(self, task: EvalTask) -> Files:
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

    def _model(self, task: EvalTask) -> EvaluatedModel:
        if self._subject is None or self._subject[0] != task.model:
            self._subject = self._made = None  # the old one goes before the new one comes
            model = self.job.load(self.plan.models[task.model], str(self.device))
            self._subject = (task.model, EvaluatedModel(model, self.data))
        return self._subject[1]

    def _batches(self, task: EvalTask) -> Iterator[Batch]:
        """The images of a task on the device."""
        subject = self._model(task)
        likely, self._likely = self._likely, None
        for batch in self._reading.batches(task, subject.geometries, likely):
            yield batch.to(self.device)


def pack_maps(kept: Sequence[tuple[Sequence[str], Tensor]]) -> bytes:
    """Maps in half precision: each over its largest magnitude, which is beside it."""
    names = [name for part, _ in kept for name in part]
    maps = torch.cat([part for _, part in kept]).float()
    scale = maps.abs().flatten(1).amax(1).nan_to_num(1.0, 1.0, 1.0)
    scale = torch.where(scale > 0, scale, 1.0)
    halved = (maps / scale[:, None, None]).half().numpy()
    return npz_bytes({"names": np.array(names), "maps": halved, "scale": scale.numpy()})


def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """[B,classes]; in parts where memory does not suffice for the batch."""
    parts = PassSize(len(inputs)).run_chunks(lambda start, stop: model(inputs[start:stop]).float(), len(inputs))
    return torch.cat(parts)


def _case(subject: EvaluatedModel, part: _Part, raw: Tensor, maker: MapMaker) -> Case:
    """What a metric looks at."""
    maps = maker.smoothed(subject.model, raw)
    return Case(subject.model, part.inputs, part.target, maps, part.regions, maker.maps, subject.black)


def _unit(item: Item) -> str:
    return item.picture or item.name
