"""A worker reads the images of the task that comes next while it computes the present one."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from threading import Event, current_thread

import pytest
from torch import nn

from dave_vit.data import batches as reading
from dave_vit.data.base import FileDataset
from dave_vit.data.batches import load_batch
from dave_vit.data.grids import Grid
from dave_vit.errors import ImageError
from dave_vit.evaluate import dispatch, scoring
from dave_vit.evaluate.engines.local import LocalEngine
from dave_vit.evaluate.job import EvalJob
from dave_vit.evaluate.statistics.rows import ScannedImage
from dave_vit.evaluate.store import RunFolder
from dave_vit.evaluate.tasks import EvalTask, TaskBuilder
from dave_vit.evaluate.worker import Worker
from evaluation_fixtures import build_plan, load, paint, read_rows

SOON = 10  # seconds until a test fails that would wait for ever


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> Path:
    return paint(tmp_path_factory.mktemp("squares") / "data")


class ObservedModel(nn.Module):
    """A model that calls a function before each pass."""

    def __init__(self, model: nn.Module, on_pass) -> None:
        super().__init__()
        self.model, self.on_pass = model, on_pass
        self.preprocess, self.class_names = model.preprocess, model.class_names

    def forward(self, x):
        self.on_pass()
        return self.model(x)


def build_tasks(squares: Path, on_pass=lambda: None, **settings) -> tuple[EvalJob, list[EvalTask]]:
    """Three tasks of four images each, in batches of two; each once for each method."""
    usual = {"metrics": ["energypg"], "methods": ["input_x_gradient"], "shard": 4, "batch": 2}
    plan = build_plan(squares, **{**usual, **settings})
    images = [ScannedImage(i, str(i), str(i), 0, 0, 1.0, None) for i in range(12)]
    tasks = TaskBuilder(plan, plan.document("x")).images(0, images)
    return EvalJob(plan, lambda entry, device: ObservedModel(load(entry, device), on_pass), threads=1), tasks


@pytest.fixture
def reads(monkeypatch) -> Counter:
    """How often each image is read; ``reads.before`` is called first, with its number."""
    counter, image = Counter(), FileDataset.image
    counter.before = lambda index: None

    def record_call(self, index):
        counter[index] += 1
        counter.before(index)
        return image(self, index)

    monkeypatch.setattr(FileDataset, "image", record_call)
    return counter


def test_images_of_the_next_task_are_read_while_the_present_one_is_computed(squares, reads):
    started, came = Event(), []
    job, tasks = build_tasks(squares, lambda: came.append(started.wait(SOON)))
    reads.before = lambda index: started.set() if index == tasks[1].images[0] else None
    worker = Worker(job, "cpu")
    worker.compute(tasks[0], following=tasks[1])
    worker.compute(tasks[1])
    worker.close()
    assert all(came)
    assert reads == dict.fromkeys(range(8), 1)  # and nothing of the third


def test_the_first_batch_is_computed_before_the_second_is_read(squares, reads):
    computing, came = Event(), []
    job, tasks = build_tasks(squares, computing.set)
    reads.before = lambda index: came.append(computing.wait(SOON)) if index in tasks[0].images[2:] else None
    worker = Worker(job, "cpu")
    worker.compute(tasks[0])
    worker.close()
    assert came == [True, True]


def test_a_run_reads_each_image_once_and_its_rows_are_the_same(squares, reads, tmp_path):
    job, tasks = build_tasks(squares, methods=["input_x_gradient", {"method": "input_x_gradient", "label": "again"}])
    ahead, alone = RunFolder(tmp_path / "ahead"), RunFolder(tmp_path / "alone")
    LocalEngine().run(job, ahead, tasks, lambda task: None)
    assert reads == dict.fromkeys(range(12), 1)
    worker = Worker(job, "cpu")
    for task in tasks:
        alone.write(worker.compute(task))
    worker.close()
    assert read_rows(ahead.path) == read_rows(alone.path)
    assert len(read_rows(ahead.path)) == 24


def test_the_thread_that_computes_leaves_the_data_set_alone(squares, monkeypatch):
    threads, item = set(), FileDataset.__getitem__

    def record_call(self, index):
        threads.add(current_thread().name.rsplit("_")[0])
        return item(self, index)

    monkeypatch.setattr(FileDataset, "__getitem__", record_call)
    job, image_tasks = build_tasks(squares, metrics=["energypg", "gridpg"])
    (grid_task,) = TaskBuilder(job.plan, job.plan.document("x")).grids(0, [Grid((0, 1, 2, 3), (0, 1, 0, 1))])
    worker = Worker(job, "cpu")
    for task in (image_tasks[0], grid_task):
        worker.compute(task)
        assert threads == {"dave-reader"}
    worker.close()


def test_a_method_is_made_once_for_tasks_that_follow_each_other(squares, monkeypatch):
    calls, create = [], scoring.create_method
    monkeypatch.setattr(scoring, "create_method", lambda name, *model: calls.append(name) or create(name, *model))
    job, tasks = build_tasks(squares)
    worker = Worker(job, "cpu")
    for task in tasks:
        worker.compute(task)
    worker.close()
    assert calls == ["input_x_gradient"]


def test_what_goes_wrong_ahead_is_raised_by_its_own_task(squares, reads):
    job, tasks = build_tasks(squares)
    worker, failed = Worker(job, "cpu"), Event()

    def fail(index):
        if index == tasks[1].images[0]:
            failed.set()
            raise RuntimeError("the file server is gone")

    reads.before = fail
    worker.compute(tasks[0], following=tasks[1])
    assert failed.wait(SOON)
    with pytest.raises(RuntimeError, match="file server"):
        worker.compute(tasks[1])
    reads.before = lambda index: None
    assert worker.compute(tasks[1])  # it is back, and nothing of the failure is kept
    worker.close()


def test_an_image_that_cannot_be_read_ahead_is_a_row_without_a_value(squares, reads, tmp_path):
    job, tasks = build_tasks(squares)
    folder = RunFolder(tmp_path)

    def fail(index):
        if index == tasks[1].images[1]:
            raise ImageError("5.png: cut off")

    reads.before = fail
    LocalEngine().run(job, folder, tasks, lambda task: None)
    rows = read_rows(folder.path)
    assert len(rows) == 12
    assert [row["dropped"] for row in rows if row["value"] is None] == ["5.png: cut off"]


def test_a_task_that_another_process_takes_is_left_to_it(squares, tmp_path, monkeypatch):
    job, tasks = build_tasks(squares)
    folder, computed, compute = RunFolder(tmp_path), [], Worker.compute
    monkeypatch.setattr(
        Worker, "compute", lambda self, task, other: computed.append(task.name) or compute(self, task, other)
    )
    with ExitStack() as other:
        assert other.enter_context(folder.claim(tasks[1].name))
        files = compute(Worker(job, "cpu"), tasks[1])

        def finish(seconds):
            folder.write(files)
            other.close()

        monkeypatch.setattr(dispatch.time, "sleep", finish)
        LocalEngine().run(job, folder, tasks, lambda task: None)
    assert computed == [tasks[0].name, tasks[2].name]
    assert (folder / tasks[1].file).read_bytes() == files[tasks[1].file]


def test_a_worker_holds_two_tasks_at_most(squares, monkeypatch):
    """However many are prefetched; images that were read in vain are freed before others are read."""
    job, tasks = build_tasks(squares)
    read: list[weakref.ref] = []

    def record_call(*arguments):
        batch = load_batch(*arguments)
        read.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(reading, "load_batch", record_call)
    worker = Worker(job, "cpu")
    for present, likely in [(0, 1), (2, 0), (1, 2)]:
        worker.compute(tasks[present], following=tasks[likely])
        assert 2 <= sum(batch() is not None for batch in read) <= 4
    worker.close()
