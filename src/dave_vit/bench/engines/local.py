"""The engine of one machine: this process, or one process for each device.

Processes share nothing but the run's folder: each claims a task, computes it and writes it. So a second command on the
same folder helps the first one, and what a killed process had claimed is free again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import torch

from dave_vit.bench.engines.base import ENGINES, EngineOptions, Finished
from dave_vit.bench.job import Job
from dave_vit.bench.store import RunFolder
from dave_vit.bench.tasks import Task
from dave_vit.bench.worker import Worker
from dave_vit.errors import DaveError, OptionError
from dave_vit.models.loading import checked_device

_WAIT = 0.2  # seconds between looks at what others do
MOST_WORKERS = 1024  # each is a process with a model of its own
_LIVES = 3  # how often a process that was killed is started again


@dataclass(frozen=True)
class LocalEngine:
    """Runs tasks on this machine.

    Attributes:
        devices: one process for each; a single one is served by this process itself.
    """

    devices: Sequence[str] = ("cpu",)

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *failure: object) -> None:
        """Nothing outlives a call of ``run``."""

    def run(self, job: Job, folder: RunFolder, tasks: Sequence[Task], finished: Finished) -> None:
        """Computes all tasks that are not done; returns when all are, whoever did them."""
        left = sum(not (folder / task.file).exists() for task in tasks)
        devices = self.devices[: max(left, 1)]
        if len(devices) == 1:
            with threads(job.threads):
                work(job, folder, tasks, devices[0], finished=finished)
        else:
            _Team(job, folder, tasks, devices).run(finished)


@ENGINES.register("local")
def _local(options: EngineOptions) -> LocalEngine:
    if options.address is not None:
        raise OptionError("--address is of a Ray cluster; add --engine ray")
    devices = pick_devices(options.device, options.workers)
    if options.device != "auto":
        for device in dict.fromkeys(devices):
            checked_device(device)
    return LocalEngine(devices)


def pick_devices(device: str, workers: int | None = None) -> list[str]:
    """The devices of a run.

    Args:
        device: "auto" (all GPUs of the machine, else the CPU), one, or several with commas between.
        workers: processes; one per device where nothing is said.
    """
    if device == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [f"cuda:{i}" for i in range(count)] or ["cpu"]
    else:
        names = [name.strip() for name in device.split(",") if name.strip()]
    if not names or (workers is not None and not 1 <= workers <= MOST_WORKERS):
        raise OptionError(f"device {device!r} and {workers} workers; expected a device and 1 to {MOST_WORKERS} workers")
    return [names[i % len(names)] for i in range(workers or len(names))]


def work(
    job: Job, folder: RunFolder, tasks: Sequence[Task], device: str, *, start: int = 0, finished: Finished | None = None
) -> None:
    """Goes round the tasks, from ``start`` on, until all are done; those that others have claimed are left to them."""
    made: list[Worker] = []  # when there is work
    pending = [*tasks[start:], *tasks[:start]]
    try:
        while pending:
            busy = []
            for task in pending:
                if not (folder / task.file).exists():
                    made = made or [Worker(job, device)]
                    if not _attempt(made[0], folder, task):
                        busy.append(task)
                        continue
                if finished:
                    finished(task)
            pending = busy
            if pending:
                time.sleep(_WAIT)
    finally:
        for worker in made:
            worker.close()


def _attempt(worker: Worker, folder: RunFolder, task: Task) -> bool:
    """Whether the task is done now; false where another process is at it."""
    with folder.claim(task.name) as mine:
        if mine and not (folder / task.file).exists():
            folder.clear_remains(task.file)
            folder.write(worker.compute(task))
        return mine


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Torch with so many threads, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Team:
    """One process per device, started again where one is killed."""

    def __init__(self, job: Job, folder: RunFolder, tasks: Sequence[Task], devices: Sequence[str]) -> None:
        self.job, self.folder, self.tasks, self.devices = job, folder, list(tasks), devices
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork

    def run(self, finished: Finished) -> None:
        lives = [_LIVES] * len(self.devices)
        crew = [self._start(i) for i in range(len(self.devices))]
        pending = self.tasks
        try:
            while pending:
                pending = self._report(pending, finished)
                for i, (process, line) in enumerate(crew):
                    if process.exitcode in (None, 0):
                        continue
                    _raise_from(line)
                    lives[i] -= 1
                    if not lives[i]:
                        raise RuntimeError(f"a worker on {self.devices[i]} died {_LIVES} times ({process.exitcode})")
                    crew[i] = self._start(i)
                time.sleep(_WAIT)
        finally:
            for process, _ in crew:
                process.terminate()
                process.join()

    def _start(self, number: int) -> tuple[Any, Connection]:
        here, there = self._context.Pipe(duplex=False)
        start = number * len(self.tasks) // len(self.devices)  # apart from each other: neighbours share their images
        arguments = (self.job, str(self.folder.path), self.tasks, self.devices[number], start, there)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        there.close()
        return process, here

    def _report(self, pending: list[Task], finished: Finished) -> list[Task]:
        done = [task for task in pending if (self.folder / task.file).exists()]
        for task in done:
            finished(task)
        return [task for task in pending if task not in set(done)] if done else pending


def _serve(job: Job, folder: str, tasks: Sequence[Task], device: str, start: int, line: Connection) -> None:
    """The life of a process of a team; an error goes to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the team
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(job.threads or 1)
        work(job, RunFolder(folder), tasks, device, start=start)
    except (DaveError, OSError) as error:  # of the user, of the disk
        line.send(error)
        raise SystemExit(1) from error
    except Exception as error:
        line.send(RuntimeError(f"a worker failed:\n{traceback.format_exc()}"))
        raise SystemExit(1) from error


def _end_with_parent() -> None:
    """Waits for the end of the parent, however it comes about: nobody would use what is computed afterwards."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _raise_from(line: Connection) -> None:
    try:
        if line.poll():
            raise line.recv()
    except EOFError:
        return
