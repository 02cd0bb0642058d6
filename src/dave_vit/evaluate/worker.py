"""A worker: computes tasks one after the other, and keeps the model and the images that the next one shares."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dave_vit._internal.atomic_files import npz_bytes
from dave_vit._internal.content_hash import hash_content
from dave_vit._internal.environment import device_name, format_facts, synchronized_time
from dave_vit._internal.registry import import_plugins
from dave_vit.data import Item, open_dataset
from dave_vit.data.batches import Batch, BatchPrefetcher
from dave_vit.data.grids import compose_grids
from dave_vit.engine.forward import count_passes
from dave_vit.errors import DaveError, ImageError, OutOfMemory, is_out_of_memory
from dave_vit.evaluate.job import EvalJob, EvaluatedModel, software_versions
from dave_vit.evaluate.scoring import KnownMaps, MapMaker, Scorer, compute_evidence
from dave_vit.evaluate.statistics.rows import Row, ScannedImage, pack_rows
from dave_vit.evaluate.tasks import EvalTask
from dave_vit.methods.pass_size import PassSize, clean_logits
from dave_vit.metrics import Case, GridMetric

Files = dict[str, bytes]


@dataclass(frozen=True)
class _ScoringBatch:
    """Inputs to score.

    Attributes:
        inputs: images or grids, ``[B, C, H, W]``.
        target: explained classes, ``[B]`` or ``[B, K]``.
        regions: True at the objects, ``[B, H, W]``.
        rows: an incomplete row for each map.
        positions: rising positions of the inputs among all images or grids of the run, ``[B]``.
    """

    inputs: Tensor
    target: Tensor
    regions: Tensor
    rows: list[Row]
    positions: list[int]

    def slice(self, start: int, stop: int) -> "_ScoringBatch":
        """Return some of the inputs."""
        maps = len(self.rows) // len(self.inputs)
        inputs, target, regions = (part[start:stop] for part in (self.inputs, self.target, self.regions))
        rows, positions = self.rows[start * maps : stop * maps], self.positions[start:stop]
        return _ScoringBatch(inputs, target, regions, rows, positions)


@dataclass
class _Output:
    """What a task has computed so far: rows, and names with maps ``[maps, H, W]``."""

    rows: list[Row] = field(default_factory=list)
    maps: list[tuple[Sequence[str], Tensor]] = field(default_factory=list)

    def files(self, task: EvalTask) -> Files:
        """Return the files of a task, maps first: the file of rows says that it is done."""
        maps = {f"maps/{task.name}.npz": pack_maps(self.maps)} if self.maps else {}
        return {**maps, task.file: pack_rows(self.rows)}


class Worker:
    """Computes tasks on one device.

    Args:
        job: what is computed.
        device: such as "cpu" or "cuda:1".
    """

    def __init__(self, job: EvalJob, device: str) -> None:
        import_plugins(job.plan.plugins)  # a new process does not have them yet
        for name, version in software_versions().items():
            job.check_provenance("software", name, version)
        self.plan, self.job, self.device = job.plan, job, torch.device(device)
        self.data = open_dataset(job.plan.data, job.plan.limit)
        self._prefetcher = BatchPrefetcher(self.data, job.plan.batch)
        self._following: EvalTask | None = None
        self._model: tuple[int, EvaluatedModel] | None = None
        self._maker: tuple[tuple[int, int], MapMaker] | None = None
        self._metrics = [(entry, entry.create()) for entry in job.plan.metrics]
        distinct = {hash_content([entry.metric, dict(entry.options)]) for entry in job.plan.metrics}
        self._repeats_metrics = len(distinct) < len(self._metrics)

    def close(self) -> None:
        """Stop the threads that read images."""
        self._prefetcher.close()

    def release_memory(self) -> None:
        """Free memory for other processes while there is nothing to do."""
        self._prefetcher.clear()
        self._maker = None
        torch.cuda.empty_cache()

    def compute(self, task: EvalTask, following: EvalTask | None = None) -> Files:
        """Return the files of a task in the order in which they must be written; raises `OutOfMemory`.

        Args:
            task: what is computed.
            following: likely a later task on other images, which are read meanwhile.
        """
        self._following = following
        compute: Callable[[EvalTask], Files] = getattr(self, f"_compute_{task.kind}")
        try:
            with torch.inference_mode(False):  # maps need gradients, whatever the caller has set
                return compute(task)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self.release_memory()  # outside of the handler, so that what failed is freed first
        raise OutOfMemory(
            f"{self.device} is out of memory at {task.name}; close other programs that use it, or take fewer workers "
            "or a smaller batch; the same command continues with the remaining images"
        )

    def _compute_scan(self, task: EvalTask) -> Files:
        model, images = self._load_model(task), []
        for batch in self._batches(task):
            for index, reason in batch.failures:
                item = self.data[index]
                images.append(ScannedImage(index, item.name, _unit(item), None, None, None, reason))
            if batch.indices:
                top = clean_logits(model.model, batch.inputs, PassSize(len(batch.inputs))).float().softmax(1).max(1)
                rows = zip(batch.indices, batch.items, top.indices.tolist(), top.values.tolist(), strict=True)
                for index, item, predicted, confidence in rows:
                    label = None if item.label is None else model.classes.get(item.label)
                    dropped = "class is not one of the model's" if label is None and item.label is not None else None
                    images.append(ScannedImage(index, item.name, _unit(item), label, predicted, confidence, dropped))
        return {task.file: pack_rows(sorted(images, key=lambda one: one.index), ScannedImage)}

    def _compute_images(self, task: EvalTask) -> Files:
        output = _Output()
        target_of = dict(zip(task.images, task.targets, strict=True))
        position_of = {index: task.start + number for number, index in enumerate(task.images)}
        for batch in self._batches(task):
            for index, reason in batch.failures:  # it could be read when the run began
                item = self.data[index]
                row = self._start_row(task, item.name, _unit(item), target_of[index])
                output.rows += self._drop(task, [row], [position_of[index]], reason)
            if batch.indices:
                pairs = zip(batch.indices, batch.items, strict=True)
                rows = [self._start_row(task, item.name, _unit(item), target_of[index]) for index, item in pairs]
                positions = [position_of[index] for index in batch.indices]
                target = self._targets(task, batch)
                self._score(task, _ScoringBatch(batch.inputs, target, batch.regions, rows, positions), output)
        return output.files(task)

    def _compute_grids(self, task: EvalTask) -> Files:
        options = next(metric.options for _, metric in self._metrics if isinstance(metric, GridMetric))
        output, cells, images = _Output(), options.cells**2, self._read_grid_images(task)
        step = cells * max(1, self.plan.batch // cells)
        for start in range(0, len(task.images), step):
            indices, targets = task.images[start : start + step], task.targets[start : start + step]
            stacked = torch.stack([images[index][1] for index in indices]).unflatten(0, (-1, cells))
            inputs = compose_grids(stacked, options.cell)  # [B,C,H,W]
            positions = [task.start + start // cells + number for number in range(len(inputs))]
            rows = []
            for i, target in enumerate(targets):
                unit, first = f"grid-{positions[i // cells]:05d}", i - i % cells
                pictures = [_unit(images[index][0]) for index in indices[first : first + cells]]
                rows.append(replace(self._start_row(task, f"{unit}/{i % cells}", unit, target), pictures=pictures))
            grid_targets = torch.tensor(targets, device=self.device).view(-1, cells)
            no_regions = torch.zeros_like(inputs[:, 0], dtype=torch.bool)
            self._score(task, _ScoringBatch(inputs, grid_targets, no_regions, rows, positions), output)
        return output.files(task)

    def _start_row(self, task: EvalTask, image: str, unit: str, target: int) -> Row:
        """Return the row of a map that is not computed yet."""
        return Row(
            model=self.plan.models[task.model].label,
            method=self.plan.methods[task.method].label,
            image=image,
            unit=unit,
            target=target,
            seed=task.seed,
            versions=format_facts(software_versions()),
            device=device_name(self.device),
        )

    def _read_grid_images(self, task: EvalTask) -> dict[int, tuple[Item, Tensor]]:
        """Return the images of grids by index; all could be read when the grids were built."""
        images: dict[int, tuple[Item, Tensor]] = {}
        for batch in self._batches(task):
            for _, reason in batch.failures:
                raise ImageError(f"an image of the grids can no longer be read: {reason}")
            images |= zip(batch.indices, zip(batch.items, batch.inputs, strict=True), strict=True)
        return images

    def _score(self, task: EvalTask, batch: _ScoringBatch, output: _Output) -> None:
        """Add the rows of a batch under all metrics of its kind; split it in halves if it does not fit into memory."""
        count = len(batch.inputs)
        for part in PassSize(count).run_chunks(
            lambda start, stop: self._score_or_drop(task, batch.slice(start, stop)), count
        ):
            output.rows += part.rows
            output.maps += part.maps

    def _score_or_drop(self, task: EvalTask, batch: _ScoringBatch) -> _Output:
        """Return the rows of a batch; at the last attempt, one image that does not fit into memory has no value."""
        try:
            return self._score_batch(task, batch)
        except (RuntimeError, MemoryError) as error:
            if not (task.is_last_attempt and len(batch.inputs) == 1 and is_out_of_memory(error)):
                raise
        self.release_memory()
        return _Output(self._drop(task, batch.rows, batch.positions, f"out of memory on {self.device}"))

    def _score_batch(self, task: EvalTask, batch: _ScoringBatch) -> _Output:
        """Return the rows of a batch, whose maps are computed once, and the maps if they are kept."""
        model, maker, output = self._load_model(task), self._load_maker(task), _Output()
        started = synchronized_time(batch.inputs.device)
        try:
            with count_passes() as count:
                raw = maker.raw(model.model, batch.inputs, batch.target)
        except DaveError as error:  # such as a method that does not support this model
            return _Output(self._drop(task, batch.rows, batch.positions, str(error)))
        seconds = (synchronized_time(batch.inputs.device) - started) / len(batch.rows)
        rows = [replace(row, passes=count.passes / len(batch.inputs), map_seconds=seconds) for row in batch.rows]
        if self.plan.save_maps:
            maps = maker.smooth(model.model, raw).flatten(0, -3).cpu()
            output.maps.append(([row.image for row in rows], maps))
        known: KnownMaps | None = [] if self._repeats_metrics else None
        for scorer in self._scorers(task):
            if some := scorer.count_images(batch.positions):
                smoothed = MapMaker(maker.entry, scorer.smoothing, maker.seed, known)
                maps, part = smoothed.smooth(model.model, raw[:some]), batch.slice(0, some)
                case = Case(model.model, part.inputs, part.target, maps, part.regions, smoothed.maps, model.black)
                output.rows += scorer.score(case, rows[: len(part.rows)])
        return output

    def _drop(self, task: EvalTask, rows: Sequence[Row], positions: Sequence[int], reason: str) -> list[Row]:
        """Return rows without a value for all metrics of the task."""
        maps = len(rows) // len(positions)
        scorers = ((scorer, scorer.count_images(positions) * maps) for scorer in self._scorers(task))
        return [row for scorer, some in scorers for row in scorer.drop(rows[:some], reason)]

    def _scorers(self, task: EvalTask) -> Iterator[Scorer]:
        plan = self.plan
        for entry, metric in self._metrics:
            if isinstance(metric, GridMetric) == (task.kind == "grids"):
                smoothing = entry.smoothing or plan.smoothing
                settings = [plan.methods[task.method].options, smoothing, plan.target, plan.min_confidence]
                options = hash_content([*map(str, settings), entry.metric, dict(entry.options)])[:12]
                yield Scorer(entry.label, metric, options, smoothing)

    def _compute_examples(self, task: EvalTask) -> Files:
        model, maker = self._load_model(task), self._load_maker(task)
        arrays: dict[str, Any] = {}
        for batch in self._batches(task):
            maps = maker.maps(model.model, batch.inputs, self._targets(task, batch)).float().cpu().numpy()
            for i, index in enumerate(batch.indices):
                arrays[f"map-{index}"] = maps[i]
                arrays[f"region-{index}"] = batch.regions[i].cpu().numpy()
                arrays[f"image-{index}"] = model.to_pixels(batch.inputs[i : i + 1])[0]
        return {task.file: npz_bytes(arrays)}

    def _compute_evidence(self, task: EvalTask) -> Files:
        model, maker = self._load_model(task), self._load_maker(task)
        parts: list[dict[str, Any]] = []
        for batch in self._batches(task):
            if batch.indices:
                target = self._targets(task, batch)
                maps = maker.maps(model.model, batch.inputs, target)
                own = compute_evidence(model.model, batch.inputs, maps, batch.regions)
                parts.append({"index": np.array(batch.indices), "target": target.cpu().numpy(), **own})
        if not parts:
            raise ImageError(f"the images of {task.name} can no longer be read")
        return {task.file: npz_bytes({name: np.concatenate([one[name] for one in parts]) for name in parts[0]})}

    def _load_maker(self, task: EvalTask) -> MapMaker:
        """Return the method of a task, the same object while tasks have the same method, so that it draws once."""
        key = task.method, task.seed
        if self._maker is None or self._maker[0] != key:
            self._maker = key, MapMaker(self.plan.methods[task.method], self.plan.smoothing, task.seed)
        return self._maker[1]

    def _load_model(self, task: EvalTask) -> EvaluatedModel:
        if self._model is None or self._model[0] != task.model:
            self._model = self._maker = None  # free the old one before the new one is loaded
            self._prefetcher.clear()  # its images go through the old one's preprocessing
            model = self.job.load(self.plan.models[task.model], str(self.device))
            self._model = (task.model, EvaluatedModel(model, self.data))
        return self._model[1]

    def _batches(self, task: EvalTask) -> Iterator[Batch]:
        """Yield the images of a task on the device."""
        model = self._load_model(task)
        following, self._following = self._following, None
        ahead = following.images if following and following.model == task.model else ()
        for batch in self._prefetcher.batches(task.images, model.geometries, ahead):
            yield batch.to(self.device)

    def _targets(self, task: EvalTask, batch: Batch) -> Tensor:
        """Return the explained classes of a batch, ``[B]``."""
        target_of = dict(zip(task.images, task.targets, strict=True))
        return torch.tensor([target_of[index] for index in batch.indices], device=self.device)


def pack_maps(parts: Sequence[tuple[Sequence[str], Tensor]]) -> bytes:
    """Return a file of maps in half precision, each divided by its largest magnitude, which is stored beside it."""
    names = [name for part, _ in parts for name in part]
    maps = torch.cat([part for _, part in parts]).float()
    scale = maps.abs().flatten(1).amax(1).nan_to_num(1.0, 1.0, 1.0)
    scale = torch.where(scale > 0, scale, 1.0)
    halves = (maps / scale[:, None, None]).half().numpy()
    return npz_bytes({"names": np.array(names), "maps": halves, "scale": scale.numpy()})


def _unit(item: Item) -> str:
    return item.picture or item.name
