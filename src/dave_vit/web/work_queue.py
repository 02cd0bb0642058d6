"""A bounded queue with one worker thread; work stops when nobody waits for its result any more."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect

from dave_vit.errors import DaveError

T = TypeVar("T")
Check = Callable[[], None]  # raises if the work is cancelled
Work = Callable[[Check], Iterable[T]]
IsDisconnected = Callable[[], Awaitable[bool]]

POLL_SECONDS = 0.2  # between two checks whether the client is still connected


class QueueFull(DaveError):
    """No more work is accepted for now."""


class _Cancelled(Exception):
    """Raised inside work that nobody waits for."""


class WorkQueue:
    """Runs work one after another in a thread.

    Args:
        waiting: how many items may wait behind the running one; one more raises `QueueFull`.
    """

    def __init__(self, waiting: int) -> None:
        self._waiting = waiting
        self._items: list[WorkItem[Any]] = []  # the running one first
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dave-worker")

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._items

    def submit(self, work: Work[T], *, counted: bool = True) -> WorkItem[T]:
        """Queue some work. Must be called from a running event loop.

        Args:
            work: called with a check that it calls now and then; yields results, none of them None.
            counted: whether it counts for the limit of the queue.
        """
        item = WorkItem(work, counted=counted)
        with self._lock:
            if counted:
                self.check_capacity()
            self._items.append(item)
        self._worker.submit(self._run, item)
        return item

    async def call(self, function: Callable[[Check], T], is_disconnected: IsDisconnected, *, counted: bool = True) -> T:
        """Run a function in the queue and return its result."""
        return await self.submit(lambda check: [function(check)], counted=counted).last_result(is_disconnected)

    def check_capacity(self) -> None:
        """Raise `QueueFull` if the queue is full, for callers that have something to do before they submit."""
        with self._lock:
            active = sum(item.counted and not item.is_cancelled for item in self._items)
        if active > self._waiting:
            raise QueueFull(f"the server is busy with {active} requests; try again in a moment")

    def count_ahead(self, item: WorkItem[Any]) -> int:
        """Return how many items run before this one."""
        with self._lock:
            index = self._items.index(item) if item in self._items else 0
            return sum(not other.is_cancelled for other in self._items[:index])

    def close(self) -> None:
        """Cancel everything."""
        with self._lock:
            for item in self._items:
                item.is_cancelled = True
        self._worker.shutdown(wait=False)

    def _run(self, item: WorkItem[Any]) -> None:
        try:
            item.run()
        finally:
            with self._lock:
                self._items.remove(item)


class WorkItem(Generic[T]):
    """Work that waits or runs.

    Attributes:
        counted: whether it counts for the limit of the queue.
        is_cancelled: whether nobody waits for it; then the work stops at its next check.
    """

    def __init__(self, work: Work[T], *, counted: bool = True) -> None:
        self._work, self.counted, self.is_cancelled = work, counted, False
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._newest: deque[T] = deque(maxlen=1)  # a slow reader misses results and does not block the worker
        self._done = False
        self._error: Exception | None = None

    def run(self) -> None:
        """Do the work. Called by the worker thread."""
        try:
            self._check()
            for result in self._work(self._check):
                self._newest.append(result)
                self._notify()
                self._check()
        except _Cancelled:
            pass
        except Exception as error:
            self._error = error
        finally:
            self._done = True
            self._notify()

    async def results(self, is_disconnected: IsDisconnected) -> AsyncGenerator[T | None, None]:
        """Yield results, at least the last one, and None now and then while there is nothing new.

        Args:
            is_disconnected: whether the client has gone; then the work stops.
        """
        try:
            while not self._done or self._newest:
                if self._newest:
                    yield self._newest.popleft()
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), POLL_SECONDS)
                self._changed.clear()
                if await is_disconnected():
                    return
                if not self._newest and not self._done:
                    yield None
            if self._error is not None:
                raise self._error
        finally:
            self.is_cancelled = True

    async def last_result(self, is_disconnected: IsDisconnected) -> T:
        """Wait for the last result."""
        last: T | None = None
        async with aclosing(self.results(is_disconnected)) as results:
            async for result in results:
                last = result if result is not None else last
        if last is None:
            raise ClientDisconnect
        return last

    def _check(self) -> None:
        if self.is_cancelled:
            raise _Cancelled

    def _notify(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._changed.set)
