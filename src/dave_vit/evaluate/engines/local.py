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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

import torch

from dave_vit.errors import DaveError, OptionError, OutOfMemory
from dave_vit.evaluate.dispatch import MemoryRetries
from dave_vit.evaluate.engines.base import ENGINES, EngineOptions, Finished
from dave_vit.evaluate.job import EvalJob
from dave_vit.evaluate.store import RunFolder
from dave_vit.evaluate.tasks import EvalTask
from dave_vit.evaluate.worker import Worker
from dave_vit.models.loading import resolve_device

_WAIT, _LONGEST = 0.2, 5.0  # seconds between looks at what others do: at first, and where nothing changes
MOST_WORKERS = 1024  # each is a process with a model of its own
_LIVES = 3  # how often a process that was killed is started again
_SHARED = 0.9  # of a GPU's memory, by processes that share it; the rest is for CUDA itself
_ROOM = 10.0  # seconds at least until a task that found no memory is tried again


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

    def run(self, job: EvalJob, folder: RunFolder, tasks: Sequence[EvalTask], finished: Finished) -> None:
        """Computes all tasks that are not done; returns when all are, whoever did them."""
        left = len(tasks) - len(folder.present(task.file for task in tasks))
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
            resolve_device(device)
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
    job: EvalJob,
    folder: RunFolder,
    tasks: Sequence[EvalTask],
    device: str,
    *,
    start: int = 0,
    finished: Finished | None = None,
) -> None:
    """Goes round the tasks, from ``start`` on, until all are done; those that others have claimed are left to them."""
    made: list[Worker] = []  # when there is work
    patience = MemoryRetries()
    pending, pause = [*tasks[start:], *tasks[:start]], _WAIT
    try:
        while pending:
            busy, there = [], folder.present(task.file for task in pending)
            for number, task in enumerate(pending):
                if task.file not in there:
                    made = made or [Worker(job, device)]
                    if not _attempt(made[0], folder, task, patience, islice(pending, number + 1, None)):
                        busy.append(task)
                        continue
                if finished:
                    finished(task)
            pause = _WAIT if len(busy) < len(pending) else min(2 * pause, _LONGEST)
            pending = busy
            if pending:
                for worker in made:
                    worker.rest()
                time.sleep(max(pause, _ROOM) if patience.tried(pending) else pause)
    finally:
        for worker in made:
            worker.close()


def _attempt(
    worker: Worker, folder: RunFolder, task: EvalTask, patience: MemoryRetries, later: Iterable[EvalTask]
) -> bool:
    """Whether the task is done now; false where another process is at it, or memory does not suffice yet."""
    with folder.claim(task.name) as mine:
        if mine and not (folder / task.file).exists():
            folder.clear_remains(task.file)
            worker.ahead(_likely(folder, task, later))
            try:
                files = worker.compute(patience.now(task))
            except OutOfMemory as error:
                patience.failed(task, error)
                return False
            folder.write(files)
        return mine


def _likely(folder: RunFolder, task: EvalTask, later: Iterable[EvalTask]) -> EvalTask | None:
    """The first of later tasks that has other images and is not done; another process may still take it."""
    return next((one for one in later if one.images != task.images and not (folder / one.file).exists()), None)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Torch with so many threads, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Member:
    """A process of a team, and the line on which it tells what is done."""

    device: str
    start: int
    process: Any
    line: Connection
    lives: int = _LIVES


class _Team:
    """One process per device, started again where one is killed."""

    def __init__(self, job: EvalJob, folder: RunFolder, tasks: Sequence[EvalTask], devices: Sequence[str]) -> None:
        self.job, self.folder, self.tasks, self.devices = job, folder, list(tasks), devices
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork

    def run(self, finished: Finished) -> None:
        pending = {task.file: task for task in self.tasks}
        crew: list[_Member] = []
        try:
            for number, device in enumerate(self.devices):  # apart from each other: neighbours share their images
                crew.append(self._started(device, number * len(self.tasks) // len(self.devices)))
            while pending:
                for file in self._heard(crew) or self.folder.present(pending):  # silent where others are at work
                    if task := pending.pop(file, None):
                        finished(task)
        finally:
            for member in crew:
                member.process.terminate()
                member.process.join()

    def _heard(self, crew: list[_Member]) -> list[str]:
        """Files that members tell of, after some seconds at most; those that died are started again."""
        if not crew:  # all have seen all tasks done, or in other hands
            time.sleep(_WAIT)
        ready = wait([member.line for member in crew], timeout=_LONGEST)
        files = []
        for place, member in reversed(list(enumerate(crew))):
            if member.line in ready:
                said = _received(member.line)
                if isinstance(said, OutOfMemory) and len(crew) > 1:  # those that have room do its work
                    del crew[place]
                    continue
                if isinstance(said, BaseException):
                    raise said
                files += [said] if said else []
                if said is None:
                    crew[place : place + 1] = self._after(member)
        return files

    def _after(self, member: _Member) -> list[_Member]:
        """Who takes the place of a member that ended: nobody where its work was done."""
        member.process.join()
        if member.process.exitcode == 0:
            return []
        if member.lives == 1:
            raise RuntimeError(f"a worker on {member.device} died {_LIVES} times ({member.process.exitcode})")
        return [replace(self._started(member.device, member.start), lives=member.lives - 1)]

    def _started(self, device: str, start: int) -> _Member:
        here, there = self._context.Pipe(duplex=False)
        share = 1 / self.devices.count(device)
        arguments = (self.job, str(self.folder.path), self.tasks, device, start, there, share)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        there.close()
        return _Member(device, start, process, here)


def _serve(
    job: EvalJob, folder: str, tasks: Sequence[EvalTask], device: str, start: int, line: Connection, share: float
) -> None:
    """The life of a process of a team, which has a share of the device's memory; an error goes to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the team
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(job.threads or 1)
        if device.startswith("cuda") and share < 1:  # else one would hold on to what the others need
            torch.cuda.set_per_process_memory_fraction(_SHARED * share, torch.device(device).index or 0)
        work(job, RunFolder(folder), tasks, device, start=start, finished=lambda task: line.send(task.file))
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


def _received(line: Connection) -> str | BaseException | None:
    """What a member says: a file that is there, or what went wrong; None where it has ended."""
    try:
        said: str | BaseException = line.recv()
    except EOFError:
        return None
    return said
