"""The engine of one machine: this process, or one process for each device.

Processes share only the run's folder: each claims a task, computes it and writes it. So a second command on the same
folder helps the first one, and the claims of a killed process are free again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

import torch

from dave_vit.errors import DaveError, OptionError, OutOfMemory
from dave_vit.evaluate.dispatch import MemoryRetries
from dave_vit.evaluate.engines.base import ENGINES, EngineOptions, TaskCallback
from dave_vit.evaluate.job import EvalJob
from dave_vit.evaluate.store import RunFolder
from dave_vit.evaluate.tasks import EvalTask
from dave_vit.evaluate.worker import Worker
from dave_vit.models.loading import resolve_device

_MIN_PAUSE, _MAX_PAUSE = 0.2, 5.0  # seconds between checks of what other processes have done
_MEMORY_PAUSE = 10.0  # seconds at least until a task that ran out of memory is retried
_MEMORY_SHARE = 0.9  # of a GPU's memory for processes that share it; the rest is for CUDA itself
_MAX_STARTS = 3  # of a process that is killed
MAX_WORKERS = 1024  # each is a process with its own model


@dataclass(frozen=True)
class LocalEngine:
    """Runs tasks on this machine.

    Attributes:
        devices: one process for each; a single one is used by this process itself.
    """

    devices: Sequence[str] = ("cpu",)

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *failure: object) -> None:
        """Nothing to close: no process outlives a call of ``run``."""

    def run(self, job: EvalJob, folder: RunFolder, tasks: Sequence[EvalTask], finished: TaskCallback) -> None:
        """Compute all tasks that are not done; return when all are, also those that other processes compute."""
        left = len(tasks) - len(folder.find_existing(task.file for task in tasks))
        devices = self.devices[: max(left, 1)]
        if len(devices) == 1:
            with torch_threads(job.threads):
                compute_tasks(job, folder, tasks, devices[0], finished)
        else:
            _WorkerPool(job, folder, tasks, devices).run(finished)


@ENGINES.register("local")
def _create_local(options: EngineOptions) -> LocalEngine:
    if options.address is not None:
        raise OptionError("--address is of a Ray cluster; add --engine ray")
    devices = pick_devices(options.device, options.workers)
    if options.device != "auto":
        for device in dict.fromkeys(devices):
            resolve_device(device)
    return LocalEngine(devices)


def pick_devices(device: str, workers: int | None = None) -> list[str]:
    """Return the device of each process of a run.

    Args:
        device: "auto" (all GPUs of the machine, else the CPU), one, or several with commas between.
        workers: number of processes; one per device by default.
    """
    if device == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [f"cuda:{i}" for i in range(count)] or ["cpu"]
    else:
        names = [name.strip() for name in device.split(",") if name.strip()]
    if not names or (workers is not None and not 1 <= workers <= MAX_WORKERS):
        raise OptionError(f"device {device!r} and {workers} workers; expected a device and 1 to {MAX_WORKERS} workers")
    return [names[i % len(names)] for i in range(workers or len(names))]


def compute_tasks(
    job: EvalJob, folder: RunFolder, tasks: Sequence[EvalTask], device: str, finished: TaskCallback = lambda task: None
) -> None:
    """Go round the tasks until all are done; skip those that other processes have claimed."""
    pending, pause, retries = list(tasks), _MIN_PAUSE, MemoryRetries()
    with closing(Worker(job, device)) as worker:
        while pending:
            skipped, existing = [], folder.find_existing(task.file for task in pending)
            for number, task in enumerate(pending):
                later = islice(pending, number + 1, None)
                if task.file in existing or _try_task(worker, folder, task, retries, later):
                    finished(task)
                else:
                    skipped.append(task)
            pause = _MIN_PAUSE if len(skipped) < len(pending) else min(2 * pause, _MAX_PAUSE)
            pending = skipped
            if pending:
                worker.release_memory()
                time.sleep(max(pause, _MEMORY_PAUSE) if retries.has_failed(pending) else pause)


def _try_task(
    worker: Worker, folder: RunFolder, task: EvalTask, retries: MemoryRetries, later: Iterable[EvalTask]
) -> bool:
    """Return whether the task is done now; False if another process has it, or it ran out of memory."""
    with folder.claim(task.name) as is_mine:
        if is_mine and not (folder / task.file).exists():
            folder.remove_partial_files(task.file)
            following = (one for one in later if one.images != task.images and not (folder / one.file).exists())
            worker.prefetch(next(following, None))  # another process may still take it
            try:
                files = worker.compute(retries.next_attempt(task))
            except OutOfMemory as error:
                retries.record_failure(task, error)
                return False
            folder.write(files)
        return is_mine


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set the number of torch threads within a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _WorkerProcess:
    """A process of a pool, and the pipe on which it reports its files and errors."""

    device: str
    tasks: Sequence[EvalTask]
    process: Any
    pipe: Connection
    starts: int = 1


class _WorkerPool:
    """One process per device, restarted if it is killed."""

    def __init__(self, job: EvalJob, folder: RunFolder, tasks: Sequence[EvalTask], devices: Sequence[str]) -> None:
        self.job, self.folder, self.tasks, self.devices = job, folder, list(tasks), devices
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork

    def run(self, finished: TaskCallback) -> None:
        pending = {task.file: task for task in self.tasks}
        workers: list[_WorkerProcess] = []
        try:
            for number, device in enumerate(self.devices):  # apart from each other: neighbours share their images
                start = number * len(self.tasks) // len(self.devices)
                workers.append(self._start(device, [*self.tasks[start:], *self.tasks[:start]]))
            while pending:  # without messages, other commands may have finished tasks
                for file in self._receive_files(workers) or self.folder.find_existing(pending):
                    if task := pending.pop(file, None):
                        finished(task)
        finally:
            for worker in workers:
                worker.process.terminate()
                worker.process.join()

    def _receive_files(self, workers: list[_WorkerProcess]) -> list[str]:
        """Return files that processes report, after some seconds at most; restart those that were killed."""
        if not workers:  # all tasks are done or claimed by other commands
            time.sleep(_MIN_PAUSE)
        ready = wait([worker.pipe for worker in workers], timeout=_MAX_PAUSE)
        files = []
        for place, worker in reversed(list(enumerate(workers))):
            if worker.pipe in ready:
                try:
                    message = worker.pipe.recv()
                except EOFError:
                    workers[place : place + 1] = self._restart(worker)
                    continue
                if isinstance(message, str):
                    files.append(message)
                elif isinstance(message, OutOfMemory) and len(workers) > 1:  # the others do its work
                    del workers[place]
                else:
                    raise message
        return files

    def _restart(self, worker: _WorkerProcess) -> list[_WorkerProcess]:
        """Return the replacement of a process that ended; none if its work was done."""
        worker.process.join()
        if worker.process.exitcode == 0:
            return []
        if worker.starts == _MAX_STARTS:
            raise RuntimeError(f"a worker on {worker.device} died {_MAX_STARTS} times ({worker.process.exitcode})")
        return [replace(self._start(worker.device, worker.tasks), starts=worker.starts + 1)]

    def _start(self, device: str, tasks: Sequence[EvalTask]) -> _WorkerProcess:
        receiver, sender = self._context.Pipe(duplex=False)
        share = 1 / self.devices.count(device)
        arguments = (self.job, self.folder, tasks, device, sender, share)
        process = self._context.Process(target=_run_process, args=arguments, daemon=True)
        process.start()
        sender.close()
        return _WorkerProcess(device, tasks, process, receiver)


def _run_process(
    job: EvalJob, folder: RunFolder, tasks: Sequence[EvalTask], device: str, pipe: Connection, share: float
) -> None:
    """Compute tasks in a process of a pool with a share of the device's memory; errors are sent to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the pool
    Thread(target=_exit_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(job.threads or 1)
        if device.startswith("cuda") and share < 1:  # else one process would keep what the others need
            torch.cuda.set_per_process_memory_fraction(_MEMORY_SHARE * share, torch.device(device).index or 0)
        compute_tasks(job, folder, tasks, device, lambda task: pipe.send(task.file))
    except (DaveError, OSError) as error:  # of the user, of the disk
        pipe.send(error)
        raise SystemExit(1) from error
    except Exception as error:
        pipe.send(RuntimeError(f"a worker failed:\n{traceback.format_exc()}"))
        raise SystemExit(1) from error


def _exit_with_parent() -> None:
    """Wait for the end of the parent, for whatever reason, and exit: nobody would use later results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
