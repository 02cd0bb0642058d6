"""Who computes which task on a cluster whose actors come and go; nothing in here knows Ray."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dave_vit.errors import OutOfMemory
from dave_vit.evaluate.tasks import EvalTask

_LIVES = 3  # how often a task may take its actor with it, or a new actor may fail to begin
_TRIES = 6  # of a task that finds no memory, which others may have filled


class ActorLost(Exception):
    """The actor of a call is gone, and its work with it."""


class Cluster(Protocol):
    """What a cluster does: calls of actors are known by references, which are waited for."""

    def room(self) -> int:
        """How many actors it should have now."""

    def hire(self) -> tuple[Any, Hashable]:
        """A new actor, and a call that ends when it is ready."""

    def call(self, actor: Any, task: EvalTask) -> Hashable:
        """Has an actor compute a task."""

    def ended(self, calls: Sequence[Any]) -> list[Any]:
        """Those calls that have ended, after some seconds at most."""

    def result(self, call: Any) -> Any:
        """What a call that has ended gave; raises `ActorLost`, or what went wrong."""


class MemoryRetries:
    """How often tasks found no memory: they are tried again later, and the last time what finds none is dropped."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()

    def now(self, task: EvalTask) -> EvalTask:
        """The task as it is to be tried now."""
        return replace(task, last=self._failures[task.name] >= _TRIES - 1)

    def failed(self, task: EvalTask, error: OutOfMemory) -> None:
        """Takes note of it; raises the error where it was the last try, as of a model that does not fit."""
        self._failures[task.name] += 1
        if self._failures[task.name] >= _TRIES:
            raise error

    def tried(self, tasks: Iterable[EvalTask]) -> bool:
        """Whether one of them found no memory."""
        return any(self._failures[task.name] for task in tasks)


class Queue:
    """Tasks that nobody computes yet: an actor goes on with the images that it has read, where there are any left.

    Args:
        tasks: in their order.
    """

    def __init__(self, tasks: Iterable[EvalTask]) -> None:
        self._chunks: dict[Any, deque[EvalTask]] = {}
        self._taken: Counter[Any] = Counter()
        for task in tasks:
            self._chunks.setdefault(task.chunk, deque()).append(task)

    def __bool__(self) -> bool:
        return any(self._chunks.values())

    def next(self, last: Any = None) -> EvalTask | None:
        """A task of the same images as the last one, else of images that the fewest actors have read."""
        left = [chunk for chunk, tasks in self._chunks.items() if tasks]
        if not left:
            return None
        chunk = last if last in left else min(left, key=lambda one: self._taken[one])
        self._taken[chunk] += chunk != last
        return self._chunks[chunk].popleft()

    def give_back(self, task: EvalTask) -> None:
        """Takes up a task again that its actor did not finish."""
        self._chunks[task.chunk].appendleft(task)

    def put_off(self, task: EvalTask) -> None:
        """Takes up a task again, after the others of its images."""
        self._chunks[task.chunk].append(task)


@dataclass
class Dispatcher:
    """Hands tasks to actors, one at a time, so that little is lost with an actor and nothing that was computed before.

    Attributes:
        cluster: where actors live.
        done: is given each task with its result.
    """

    cluster: Cluster
    done: Callable[[EvalTask, Any], None]
    _calls: dict[Any, tuple[Any, EvalTask | None]] = field(default_factory=dict)
    _idle: list[Any] = field(default_factory=list)
    _deaths: Counter[str] = field(default_factory=Counter)
    _patience: MemoryRetries = field(default_factory=MemoryRetries)

    def run(self, tasks: Sequence[EvalTask]) -> None:
        """Returns when all tasks are done."""
        queue = Queue(tasks)
        while queue or any(task for _, task in self._calls.values()):
            self._hire()
            for call in self.cluster.ended(list(self._calls)):
                self._heard(call, queue)
            while queue and self._idle:  # what a lost actor left
                self._give(self._idle.pop(), queue)

    def _hire(self) -> None:
        """Fills the room that there is now; a node that has joined makes some, an actor that died leaves some."""
        for _ in range(self.cluster.room() - len(self._calls) - len(self._idle)):
            actor, ready = self.cluster.hire()
            self._calls[ready] = (actor, None)

    def _heard(self, call: Any, queue: Queue) -> None:
        actor, task = self._calls.pop(call)
        try:
            result = self.cluster.result(call)
        except ActorLost as error:
            self._lost(task, error, queue)
            return
        except OutOfMemory as error:
            if task is None:
                raise
            self._patience.failed(task, error)
            queue.put_off(task)
            self._give(actor, queue)
            return
        if task is None:
            self._deaths["start"] = 0
        else:
            self.done(task, result)
        self._give(actor, queue, task.chunk if task else None)

    def _give(self, actor: Any, queue: Queue, last: Any = None) -> None:
        task = queue.next(last)
        if task is None:
            self._idle.append(actor)
        else:
            self._calls[self.cluster.call(actor, self._patience.now(task))] = (actor, task)

    def _lost(self, task: EvalTask | None, error: ActorLost, queue: Queue) -> None:
        name = task.name if task else "start"
        self._deaths[name] += 1
        if self._deaths[name] == _LIVES:
            what = f"actors die at {name}" if task else "no actor can begin"
            how = "if memory is too small, take a smaller batch in another folder"
            raise RuntimeError(f"{what}, {_LIVES} times ({error}); {how}") from error
        if task is not None:
            queue.give_back(task)
