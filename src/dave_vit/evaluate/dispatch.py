"""Distributes tasks over the actors of a cluster, which come and go; independent of Ray."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dave_vit.errors import OutOfMemory
from dave_vit.evaluate.tasks import EvalTask

_MAX_DEATHS = 3  # of actors at one task, or of new actors before they are ready
_MAX_ATTEMPTS = 6  # at a task that runs out of memory, which others may have used


class ActorLost(Exception):
    """The actor of a call has died."""


class Cluster(Protocol):
    """A cluster; calls of actors are identified by references."""

    def count_actors(self) -> int:
        """Return how many actors it should have now."""

    def start_actor(self) -> tuple[Any, Hashable]:
        """Start an actor; return it and a call that ends when it is ready."""

    def call(self, actor: Any, task: EvalTask) -> Hashable:
        """Start the computation of a task on an actor."""

    def wait(self, calls: Sequence[Any]) -> list[Any]:
        """Return calls that have ended, after some seconds at most."""

    def result(self, call: Any) -> Any:
        """Return the result of a call that has ended; raises `ActorLost`, or what went wrong."""


class MemoryRetries:
    """Counts how often tasks ran out of memory: they are retried later; the last attempt drops what does not fit."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()

    def next_attempt(self, task: EvalTask) -> EvalTask:
        """Return the task as it is to be computed now."""
        return replace(task, is_last_attempt=self._failures[task.name] >= _MAX_ATTEMPTS - 1)

    def record_failure(self, task: EvalTask, error: OutOfMemory) -> None:
        """Count a failure; raise the error if it was the last attempt, as for a model that does not fit."""
        self._failures[task.name] += 1
        if self._failures[task.name] >= _MAX_ATTEMPTS:
            raise error

    def has_failed(self, tasks: Iterable[EvalTask]) -> bool:
        """Return whether one of the tasks ran out of memory."""
        return any(self._failures[task.name] for task in tasks)


class TaskQueue:
    """Tasks that no actor computes yet; an actor gets tasks on the images that it has read, as long as there are any.

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
        """Return a task on the same images as the last one, else on images that the fewest actors have read."""
        left = [chunk for chunk, tasks in self._chunks.items() if tasks]
        if not left:
            return None
        chunk = last_chunk if last_chunk in left else min(left, key=lambda one: self._readers[one])
        self._readers[chunk] += chunk != last_chunk
        return self._chunks[chunk].popleft()

    def put_first(self, task: EvalTask) -> None:
        """Put a task back before the others on its images."""
        self._chunks[task.chunk].appendleft(task)

    def put_last(self, task: EvalTask) -> None:
        """Put a task back after the others on its images."""
        self._chunks[task.chunk].append(task)


@dataclass
class Dispatcher:
    """Gives tasks to actors one at a time: if an actor or node dies, only its running task is computed again.

    Attributes:
        cluster: where actors run.
        done: called with each task and its result.
    """

    cluster: Cluster
    done: Callable[[EvalTask, Any], None]
    _calls: dict[Any, tuple[Any, EvalTask | None]] = field(default_factory=dict)
    _idle: list[Any] = field(default_factory=list)
    _deaths: Counter[str] = field(default_factory=Counter)
    _retries: MemoryRetries = field(default_factory=MemoryRetries)

    def run(self, tasks: Sequence[EvalTask]) -> None:
        """Return when all tasks are done."""
        queue = TaskQueue(tasks)
        while queue or any(task for _, task in self._calls.values()):
            self._start_actors()
            for call in self.cluster.wait(list(self._calls)):
                self._handle(call, queue)
            while queue and self._idle:  # tasks of a lost actor
                self._assign(self._idle.pop(), queue)

    def _start_actors(self) -> None:
        """Start missing actors: a new node has room for some, a dead actor is replaced."""
        for _ in range(self.cluster.count_actors() - len(self._calls) - len(self._idle)):
            actor, ready = self.cluster.start_actor()
            self._calls[ready] = (actor, None)

    def _handle(self, call: Any, queue: TaskQueue) -> None:
        actor, task = self._calls.pop(call)
        try:
            result = self.cluster.result(call)
        except ActorLost as error:
            self._handle_loss(task, error, queue)
            return
        except OutOfMemory as error:
            if task is None:
                raise
            self._retries.record_failure(task, error)
            queue.put_last(task)
            self._assign(actor, queue)
            return
        if task is None:
            self._deaths["start"] = 0
        else:
            self.done(task, result)
        self._assign(actor, queue, task.chunk if task else None)

    def _assign(self, actor: Any, queue: TaskQueue, last_chunk: Any = None) -> None:
        task = queue.pop(last_chunk)
        if task is None:
            self._idle.append(actor)
        else:
            self._calls[self.cluster.call(actor, self._retries.next_attempt(task))] = (actor, task)

    def _handle_loss(self, task: EvalTask | None, error: ActorLost, queue: TaskQueue) -> None:
        name = task.name if task else "start"
        self._deaths[name] += 1
        if self._deaths[name] == _MAX_DEATHS:
            what = f"actors die at {name}" if task else "no actor can begin"
            how = "if memory is too small, take a smaller batch in another folder"
            raise RuntimeError(f"{what}, {_MAX_DEATHS} times ({error}); {how}") from error
        if task is not None:
            queue.put_first(task)
