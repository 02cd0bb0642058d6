"""One worker, a bounded queue before it, and jobs that end when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, Generic, TypeVar

from dave_vit.errors import DaveError

T = TypeVar("T")
Check = Callable[[], None]  # raises where the work is to stop
Work = Callable[[Check], Generator[T, None, None]]

PULSE = 0.2  # seconds between two looks at whether the other side is still there


class Busy(DaveError):
    """The queue is full."""


class _Left(Exception):
    """Raised inside of work that nobody waits for."""


class Jobs:
    """Runs jobs one after another in a thread of their own.

    Args:
        waiting: how many may wait behind the one that runs; one more is `Busy`.
    """

    def __init__(self, waiting: int) -> None:
        self._waiting = waiting
        self._open: list[Job[Any]] = []  # the running one first
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dave-worker")

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        with self._lock:
            return not self._open

    def submit(self, work: Work[T], *, counted: bool = True) -> Job[T]:
        """Queues some work, to be called from a running event loop.

        Args:
            work: given a check that it calls now and then, an iterator of results.
            counted: whether it takes one of the places in the queue.
        """
        job = Job(work, counted=counted)
        with self._lock:
            if counted:
                self._check_room()
            self._open.append(job)
        self._worker.submit(self._run, job)
        return job

    def check_room(self) -> None:
        """Raises `Busy` where the queue is full, for those who have something to do before they submit."""
        with self._lock:
            self._check_room()

    def _check_room(self) -> None:
        wanted = [other for other in self._open if other.counted and not other.left]
        if len(wanted) > self._waiting:
            raise Busy(f"the server is busy, {len(wanted)} requests are before yours; try again in a moment")

    def ahead(self, job: Job[Any]) -> int:
        """How many jobs are before this one."""
        with self._lock:
            at = next((number for number, other in enumerate(self._open) if other is job), 0)
            return sum(not other.left for other in self._open[:at])

    def close(self) -> None:
        """Ends every job."""
        with self._lock:
            for job in self._open:
                job.leave()
        self._worker.shutdown(wait=False)

    def _run(self, job: Job[Any]) -> None:
        try:
            job.run()
        finally:
            with self._lock:
                self._open.remove(job)


class Job(Generic[T]):
    """Some work on its way."""

    def __init__(self, work: Work[T], *, counted: bool = True) -> None:
        self._work, self.counted = work, counted
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._leaving = threading.Event()
        self._newest: deque[T] = deque(maxlen=1)  # a slow reader misses steps and does not hold the worker up
        self._ended = False
        self._error: Exception | None = None

    @property
    def left(self) -> bool:
        """Whether nobody waits for it."""
        return self._leaving.is_set()

    def leave(self) -> None:
        """Ends the work at its next check."""
        self._leaving.set()

    def run(self) -> None:
        """Does the work; called by the worker."""
        try:
            self._check()
            with closing(self._work(self._check)) as steps:
                for step in steps:
                    self._newest.append(step)
                    self._tell()
                    self._check()
        except _Left:
            pass
        except Exception as error:
            self._error = error
        finally:
            self._ended = True
            self._tell()

    async def steps(self, gone: Callable[[], Awaitable[bool]]) -> AsyncGenerator[T | None, None]:
        """What the work yields, at least its last result, and None now and then while there is nothing new.

        Args:
            gone: whether the one who asked has gone; then the work ends.
        """
        try:
            while not self._ended or self._newest:
                if self._newest:
                    yield self._newest.popleft()
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), PULSE)
                self._changed.clear()
                if await gone():
                    return
                if not self._newest and not self._ended:
                    yield None
            if self._error is not None:
                raise self._error
        finally:
            self.leave()

    def _check(self) -> None:
        if self.left:
            raise _Left

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the loop has been closed: nobody listens
            self._loop.call_soon_threadsafe(self._changed.set)
