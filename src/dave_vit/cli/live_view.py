"""What a run shows while it goes on: a bar for each of its phases, or its first results with `--watch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from dave_vit.cli.common import Output, Progress

if TYPE_CHECKING:
    from dave_vit.evaluate.run import ProgressCallback

_SHARE = 20  # reading and showing results takes a twentieth of the time at most
_EVERY, _EVERY_LINE = 2.0, 30.0  # seconds between two updates: on a terminal, in a log


@contextmanager
def show_bars(output: Output) -> Iterator[ProgressCallback]:
    """Show a progress bar for each phase of a run, or a line now and then in a log."""
    if not output.on_terminal:
        yield _log_lines(output)
        return
    clock = _UpdateClock(_EVERY)
    with ExitStack() as stack:
        bars: dict[str, Progress] = {}

        def update(phase: str, done: int, total: int, before: int) -> None:
            if phase not in bars:
                stack.close()  # the bar of the phase before
                bars[phase] = stack.enter_context(output.progress(total - before, phase))
            bars[phase].update(done=max(done - before, 0), text=clock.format_line(phase, done, total, before))

        yield update


def _log_lines(output: Output) -> ProgressCallback:
    clock = _UpdateClock(_EVERY_LINE)
    clock.record_update(0.0)  # a short phase needs no line

    def update(phase: str, done: int, total: int, before: int) -> None:
        line = clock.format_line(phase, done, total, before)
        if clock.is_due():
            output.note(line)
            clock.record_update(0.0)

    return update


@contextmanager
def show_results(output: Output, build_tables: Callable[[], Sequence[Any]]) -> Iterator[ProgressCallback]:
    """Show a line of progress and the tables of first results.

    On a terminal the tables are updated in place; elsewhere they are printed again now and then.
    """
    with output.live() as show:
        clock = _UpdateClock(_EVERY if output.on_terminal else _EVERY_LINE)

        def update(phase: str, done: int, total: int, before: int) -> None:
            line = clock.format_line(phase, done, total, before)
            if done == total or clock.is_due():
                started = time.monotonic()
                show(line, *(build_tables() if phase == "evaluating" else ()))
                clock.record_update(time.monotonic() - started)

        yield update


class _UpdateClock:
    """Tells when the next update is due, and how fast a phase goes."""

    def __init__(self, every: float) -> None:
        self._every = self._pause = every
        self._phase, self._started, self._updated = "", 0.0, -float("inf")

    def format_line(self, phase: str, done: int, total: int, before: int) -> str:
        """Return what is done, the rate and the time left."""
        if phase != self._phase:
            self._phase, self._started = phase, time.monotonic()
        rate = max(done - before, 0) / max(time.monotonic() - self._started, 1e-6)
        left = f", {_format_duration((total - done) / rate)} left" if rate else ""
        return f"{phase}: {done} of {total}, {rate:.3g} a second{left}"

    def is_due(self) -> bool:
        """Return whether it is time for another update."""
        return time.monotonic() - self._updated >= self._pause

    def record_update(self, seconds: float) -> None:
        """Record an update that took so long."""
        self._updated, self._pause = time.monotonic(), max(self._every, _SHARE * seconds)


def _format_duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
