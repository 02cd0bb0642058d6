"""Distributes the tasks of a run over workers, wherever they run: a cluster starts, calls and ends them."""

import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from dave_vit.errors import DaveError, OutOfMemory
from dave_vit.evaluate.job import EvalJob
from dave_vit.evaluate.store import RunFolder
from dave_vit.evaluate.tasks import EvalTask
from dave_vit.evaluate.worker import Files, Worker

_MAX_DEATHS = 3  # of workers at one task, or of new workers before they are ready
_MAX_ATTEMPTS = 6  # at a task that runs out of memory, which others may have used
_MIN_PAUSE, _MAX_PAUSE = 0.2, 5.0  # seconds between checks of what other commands have done
MEMORY_PAUSE = 10.0  # seconds at least until a task that ran out of memory is retried


class WorkerLost(Exception):
    """The worker of a call has died."""


class TaskServer:
    """A worker of another process: errors are its answer, since raised ones would arrive inside a long traceback.

    Args:
        job: what is computed.
        device: device of the worker, which is created for the first task.
    """

    def __init__(self, job: EvalJob, device: str) -> None:
        torch.set_num_threads(job.threads or 1)
        self._job, self._device = job, device
        self._worker: Worker | None = None

    def ready(self) -> Files:
        """Return no files when the process has started."""
        return {}

    def compute(self, task: EvalTask, following: EvalTask | None) -> Files | Exception:
        """Return the files of a task, or what went wrong; read the images of the following one meanwhile."""
        try:
            self._worker = self._worker or Worker(self._job, self._device)
            return self._worker.compute(task, following)
        except (DaveError, OSError) as error:  # of the user, of the disk
            return error
        except Exception:
            return RuntimeError(f"a worker failed:\n{traceback.format_exc()}")

    def release_memory(self) -> None:
        """Free memory for other processes while there is nothing to do."""
        if self._worker is not None:
            self._worker.release_memory()


class Cluster(Protocol):
    """Where workers run; a worker has one call at a time."""

    def count_workers(self) -> int:
        """Return how many workers it should have now."""

    def start_worker(self) -> tuple[Any, Hashable]:
        """Start a worker; return it and a call that ends when it is ready."""

    def submit(self, worker: Any, task: EvalTask, following: EvalTask | None) -> Hashable:
        """Start the computation of a task; images of the following one, likely the next, may be read meanwhile."""

    def wait(self, calls: Sequence[Any]) -> Sequence[Any]:
        """Return calls that have ended, after some seconds at most."""

    def result(self, call: Any) -> Files | Exception:
        """Return the files of a call that has ended, or what went wrong; raises `WorkerLost`."""

    def release_memory(self, worker: Any) -> None:
        """Free what a worker does not need while it waits."""

    def close(self) -> None:
        """End all workers, whatever they do."""


class TaskQueue:
    """Tasks that no worker computes yet; a worker gets tasks on the images that it has read, as long as there are any.

    Args:
        tasks: in their order.
    """

    def __init__(self, tasks: Iterable[EvalTask]) -> None:
        self._chunks: dict[Any, deque[EvalTask]] = {}
        self._readers: Counter[Any] = Counter()
        for task in tasks:
            self._chunks.setdefault(task.chunk, deque()).append(task)

    def __bool__(self) -> bool:
        return any(self._chunks.values())

    def pop(self, last_chunk: Any = None) -> EvalTask | None:
        """Return a task on the same images as the last one, else on images that the fewest workers have read."""
        chunk = last_chunk if self._chunks.get(last_chunk) else self._select_chunk()
        self._readers[chunk] += chunk != last_chunk
        return self._chunks[chunk].popleft() if chunk else None

    def peek_other(self, chunk: Any) -> EvalTask | None:
        """Return the next task on other images, which stays in the queue."""
        other = self._select_chunk(chunk)
        return self._chunks[other][0] if other else None

    def put_first(self, task: EvalTask) -> None:
        """Put a task back before the others on its images."""
        self._chunks[task.chunk].appendleft(task)

    def _select_chunk(self, excluded: Any = None) -> Any:
        left = [chunk for chunk, tasks in self._chunks.items() if tasks and chunk != excluded]
        return min(left, key=lambda one: self._readers[one], default=None)


@dataclass
class _Member:
    """A worker: its handle, the images that it read last, and its task with the claim of it."""

    handle: Any
    chunk: Any = None
    task: EvalTask | None = None
    claim: ExitStack = field(default_factory=ExitStack)


@dataclass
class Dispatcher:
    """Gives tasks to workers one at a time, and writes their files.

    If a worker or its node dies, only its running task is computed again. Tasks that another command has claimed are
    left to it.

    Attributes:
        cluster: where workers run.
        folder: folder of the run.
        finished: called with each task whose files exist.
    """

    cluster: Cluster
    folder: RunFolder
    finished: Callable[[EvalTask], None]
    _calls: dict[Any, _Member] = field(default_factory=dict)
    _idle: list[_Member] = field(default_factory=list)
    _resting: list[_Member] = field(default_factory=list)  # out of memory: the others first
    _postponed: list[EvalTask] = field(default_factory=list)
    _deaths: Counter[str] = field(default_factory=Counter)
    _memory_failures: Counter[str] = field(default_factory=Counter)

    def run(self, tasks: Sequence[EvalTask]) -> None:
        """Return when the files of all tasks exist, also of those that other commands compute."""
        pending, pause = list(tasks), _MIN_PAUSE
        try:
            while pending:
                before, pending = len(pending), self._compute_available(pending)
                pause = _MIN_PAUSE if len(pending) < before else min(2 * pause, _MAX_PAUSE)
                if pending:
                    self._pause(pause, pending)
        finally:
            for member in self._calls.values():
                member.claim.close()

    def _compute_available(self, tasks: Sequence[EvalTask]) -> list[EvalTask]:
        """Compute tasks; return those that other commands have claimed, and those that ran out of memory."""
        existing = self.folder.find_existing(task.file for task in tasks)
        for task in tasks:
            if task.file in existing:
                self.finished(task)
        queue, self._postponed = TaskQueue(task for task in tasks if task.file not in existing), []
        while queue or self._is_computing():
            members, self._idle = self._idle, []
            if not self._is_computing():
                members, self._resting = members + self._resting, []
            for member in members:
                self._assign(member, queue)
            if queue:
                self._start_workers()
            if queue or self._is_computing():
                for call in self.cluster.wait(list(self._calls)):
                    self._handle(call, queue)
        return self._postponed

    def _is_computing(self) -> bool:
        return any(member.task for member in self._calls.values())

    def _pause(self, seconds: float, pending: Sequence[EvalTask]) -> None:
        for member in (*self._idle, *self._resting):
            self.cluster.release_memory(member.handle)
        has_failed = any(self._memory_failures[task.name] for task in pending)
        time.sleep(max(seconds, MEMORY_PAUSE) if has_failed else seconds)

    def _start_workers(self) -> None:
        """Start missing workers: a new node has room for some, a dead worker is replaced."""
        for _ in range(self.cluster.count_workers() - len(self._calls) - len(self._idle) - len(self._resting)):
            worker, ready = self.cluster.start_worker()
            self._calls[ready] = _Member(worker)

    def _assign(self, member: _Member, queue: TaskQueue) -> None:
        """Give a worker the next task that no other command has; without one it is idle."""
        while task := queue.pop(member.chunk):
            if self._claim(task, member.claim):
                member.task, member.chunk = task, task.chunk
                is_last = self._memory_failures[task.name] >= _MAX_ATTEMPTS - 1
                attempt, following = replace(task, is_last_attempt=is_last), queue.peek_other(task.chunk)
                self._calls[self.cluster.submit(member.handle, attempt, following)] = member
                return
        self._idle.append(member)

    def _claim(self, task: EvalTask, claim: ExitStack) -> bool:
        """Return whether a task is to be computed here; if so, it is claimed until the stack is closed."""
        if claim.enter_context(self.folder.claim(task.name)):
            if not (self.folder / task.file).exists():
                self.folder.remove_partial_files(task.file)
                return True
            self.finished(task)
        else:
            self._postponed.append(task)
        claim.close()
        return False

    def _handle(self, call: Any, queue: TaskQueue) -> None:
        """Write the files of a call that has ended, or decide what happens after its failure."""
        member = self._calls.pop(call)
        task, member.task = member.task, None
        with member.claim:
            try:
                files = self.cluster.result(call)
                if isinstance(files, Exception):
                    raise files
            except WorkerLost as error:
                self._handle_loss(task, error, queue)
                return
            except OutOfMemory as error:
                self._handle_full_memory(task, error)
                self._resting.append(member)
                return
            if task is not None:
                self.folder.write(files)
                self.finished(task)
        self._deaths["start"] = 0
        self._assign(member, queue)

    def _handle_loss(self, task: EvalTask | None, error: WorkerLost, queue: TaskQueue) -> None:
        name = task.name if task else "start"
        self._deaths[name] += 1
        if self._deaths[name] == _MAX_DEATHS:
            what = f"workers die at {name}" if task else "no worker could start"
            how = "if memory is too small, take a smaller batch in another folder"
            raise RuntimeError(f"{what}, {_MAX_DEATHS} times ({error}); {how}") from error
        if task is not None:
            queue.put_first(task)

    def _handle_full_memory(self, task: EvalTask | None, error: OutOfMemory) -> None:
        """Postpone a task; raise the error if it was the last attempt, as for a model that does not fit."""
        if task is None:
            raise error
        self._memory_failures[task.name] += 1
        if self._memory_failures[task.name] >= _MAX_ATTEMPTS:
            raise error
        self._postponed.append(task)
