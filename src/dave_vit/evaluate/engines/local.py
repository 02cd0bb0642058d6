"""The engine of one machine: this process, or one process for each device.

A second command on the same folder helps the first one: each claims the tasks that it computes, and the claims of a
killed command are free again.
"""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

import torch

from dave_vit.errors import OptionError
from dave_vit.evaluate.dispatch import Cluster, Dispatcher, TaskServer, WorkerLost
from dave_vit.evaluate.engines import ENGINES, EngineOptions, TaskCallback
from dave_vit.evaluate.job import EvalJob
from dave_vit.evaluate.store import RunFolder
from dave_vit.evaluate.tasks import EvalTask
from dave_vit.evaluate.worker import Files, Worker
from dave_vit.models.loading import resolve_device

_POLL_SECONDS = 5.0  # between checks of processes
_MEMORY_SHARE = 0.9  # of a GPU's memory for processes that share it; the rest is for CUDA itself
_Call = tuple[EvalTask, EvalTask | None] | None
MAX_WORKERS = 1024  # each is a process with its own model


@dataclass(frozen=True)
class LocalEngine(AbstractContextManager[Any]):
    """Runs tasks on this machine.

    Attributes:
        devices: one process for each; a single one is used by this process itself.
    """

    devices: Sequence[str] = ("cpu",)

    def __exit__(self, *failure: object) -> None:
        """Nothing to close: no process outlives a call of ``run``."""

    def run(self, job: EvalJob, folder: RunFolder, tasks: Sequence[EvalTask], finished: TaskCallback) -> None:
        """Compute all tasks that are not done; return when all are, also those that other processes compute."""
        left = len(tasks) - len(folder.find_existing(task.file for task in tasks))
        devices = self.devices[: max(left, 1)]
        cluster: Cluster = _ThisProcess(job, devices[0]) if len(devices) == 1 else _WorkerProcesses(job, devices)
        with closing(cluster):
            Dispatcher(cluster, folder, finished).run(tasks)


@ENGINES.register("local")
def _create_local(options: EngineOptions) -> LocalEngine:
    if options.address is not None:
        raise OptionError("--address names a Ray cluster; add --engine ray")
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


class _ThisProcess:
    """A cluster of one worker in this process, which computes a task when its result is asked for.

    Args:
        job: what is computed.
        device: device of the worker.
    """

    def __init__(self, job: EvalJob, device: str) -> None:
        self._worker, self._threads = Worker(job, device), job.threads
        self.close = self._worker.close

    def count_workers(self) -> int:
        """Return 1."""
        return 1

    def start_worker(self) -> tuple[Worker, _Call]:
        """Return the worker, which needs no time to begin."""
        return self._worker, None

    def submit(self, worker: Worker, task: EvalTask, following: EvalTask | None) -> _Call:
        """Return the arguments of the computation, which are the call."""
        return task, following

    def wait(self, calls: Sequence[_Call]) -> Sequence[_Call]:
        """Return all calls: none runs by itself."""
        return calls

    def result(self, call: _Call) -> Files:
        """Compute the task of a call."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        try:
            return self._worker.compute(*call) if call else {}
        finally:
            torch.set_num_threads(before)

    def release_memory(self, worker: Worker) -> None:
        """Free what the worker does not need while it waits."""
        worker.release_memory()


@dataclass(eq=False)
class _WorkerProcess:
    """A process with a worker, and the pipe to it; its own call, since it has one at a time."""

    device: str
    process: Any
    pipe: Connection

    def send(self, message: _Call) -> None:
        """Send tasks, or None to free memory."""
        with suppress(OSError):  # a process that has died is noticed when its answer is read
            self.pipe.send(message)


class _WorkerProcesses:
    """A cluster of one process per device.

    Args:
        job: what is computed.
        devices: device of each process.
    """

    def __init__(self, job: EvalJob, devices: Sequence[str]) -> None:
        self._job, self._devices, self._free = job, devices, list(devices)
        self._workers: list[_WorkerProcess] = []
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork

    def count_workers(self) -> int:
        """Return the number of devices."""
        return len(self._devices)

    def start_worker(self) -> tuple[_WorkerProcess, _WorkerProcess]:
        """Start a process on a device that has one too few."""
        device = self._free.pop(0)
        here, there = self._context.Pipe()
        arguments = (self._job, device, there, 1 / self._devices.count(device))
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        there.close()
        worker = _WorkerProcess(device, process, here)
        self._workers.append(worker)
        return worker, worker

    def submit(self, worker: _WorkerProcess, task: EvalTask, following: EvalTask | None) -> _WorkerProcess:
        """Send a task to a process."""
        worker.send((task, following))
        return worker

    def wait(self, calls: Sequence[_WorkerProcess]) -> Sequence[_WorkerProcess]:
        """Return the processes that have answered or died."""
        ready = wait([call.pipe for call in calls], timeout=_POLL_SECONDS)
        return [call for call in calls if call.pipe in ready]

    def result(self, call: _WorkerProcess) -> Files | Exception:
        """Return the answer of a process."""
        try:
            answer: Files | Exception = call.pipe.recv()
        except (EOFError, OSError) as error:
            call.process.join()
            self._free.append(call.device)
            raise WorkerLost(f"exit code {call.process.exitcode}, on {call.device}") from error
        return answer

    def release_memory(self, worker: _WorkerProcess) -> None:
        """Tell a process to free what it does not need while it waits."""
        worker.send(None)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.process.terminate()
            worker.process.join()


def _serve(job: EvalJob, device: str, pipe: Connection, share: float) -> None:
    """Compute the tasks that the parent sends, in a process with a share of the device's memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the pool
    Thread(target=_exit_with_parent, daemon=True).start()
    if device.startswith("cuda") and share < 1:  # else one process would keep what the others need
        torch.cuda.set_per_process_memory_fraction(_MEMORY_SHARE * share, torch.device(device).index or 0)
    worker = TaskServer(job, device)
    pipe.send(worker.ready())
    with suppress(EOFError, OSError):  # of the pipe: the parent is gone
        while True:
            message = pipe.recv()
            if message is None:
                worker.release_memory()
            else:
                pipe.send(worker.compute(*message))


def _exit_with_parent() -> None:
    """Wait for the end of the parent, for whatever reason, and exit: nobody would use later results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
