"""What a run shows while it goes on: a bar for each of its phases, or its first numbers with `--watch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from dave_vit.cli.common import Output, Progress

Watch = Callable[[str, int, int, int], None]
Results = Callable[[], list[dict[str, Any]]]
_SHARE = 20  # first numbers take a twentieth of the time at most
_EVERY, _EVERY_LINE = 2.0, 30.0  # seconds between two looks: on a terminal, in a log


@contextmanager
def bars(output: Output) -> Iterator[Watch]:
    """What a run tells of its progress becomes a bar for each of its phases, or in a log a line now and then."""
    if not output.on_terminal:
        yield _lines(output)
        return
    with ExitStack() as stack:
        phase: list[tuple[str, Progress, float]] = []

        def watch(what: str, done: int, total: int, before: int) -> None:
            if not phase or phase[-1][0] != what:
                stack.close()  # the bar of the phase before
                phase.append((what, stack.enter_context(output.progress(total - before, what)), time.monotonic()))
            _, bar, started = phase[-1]
            now = max(done - before, 0)
            rate = now / max(time.monotonic() - started, 1e-6)
            bar.update(done=now, text=f"{what}: {done} of {total}, {rate:.3g} a second")

        yield watch


def _lines(output: Output) -> Watch:
    shown = _Shown(_EVERY_LINE)
    shown.noted(0.0)  # what takes less needs none

    def watch(what: str, done: int, total: int, before: int) -> None:
        line = shown.line(what, done, total, before)
        if shown.due(last=False):
            output.note(line)
            shown.noted(0.0)

    return watch


@contextmanager
def numbers(output: Output, results: Results) -> Iterator[Watch]:
    """What a run tells of its progress becomes a line and a table of the numbers that are there.

    On a terminal the table stays in its place; elsewhere it is printed again now and then.
    """
    with output.live() as show:
        shown = _Shown(_EVERY if show.is_terminal else _EVERY_LINE)

        def watch(what: str, done: int, total: int, before: int) -> None:
            line = shown.line(what, done, total, before)
            if shown.due(last=done == total):
                started = time.monotonic()
                show(line, _table(results()) if what == "evaluating" else None)
                shown.noted(time.monotonic() - started)

        yield watch


class _Shown:
    """When the last look was, and how fast the phase goes."""

    def __init__(self, every: float) -> None:
        self._every = self._pause = every
        self._phase, self._began, self._looked = "", 0.0, -float("inf")

    def line(self, what: str, done: int, total: int, before: int) -> str:
        """What is done, the rate, and the time left."""
        if what != self._phase:
            self._phase, self._began = what, time.monotonic()
        rate = max(done - before, 0) / max(time.monotonic() - self._began, 1e-6)
        left = f", {_duration((total - done) / rate)} left" if rate else ""
        return f"{what}: {done} of {total}, {rate:.3g} a second{left}"

    def due(self, *, last: bool) -> bool:
        """Whether it is time for another look; the end of a phase always is."""
        return last or time.monotonic() - self._looked >= self._pause

    def noted(self, seconds: float) -> None:
        """A look took so long."""
        self._looked, self._pause = time.monotonic(), max(self._every, _SHARE * seconds)


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _table(results: list[dict[str, Any]]) -> Any:
    """A line for each model and method, a column for each metric."""
    from rich.table import Table

    from dave_vit.viz.pages import format_estimate

    metrics = list(dict.fromkeys(one["metric"] for one in results))
    found = {(one["model"], one["method"], one["metric"]): one for one in results}
    table = Table("model", "method", *metrics, box=None)
    for model, method in dict.fromkeys((one["model"], one["method"]) for one in results):
        own = [found.get((model, method, metric)) for metric in metrics]
        words = [f"{format_estimate(one['mean'], one['low'], one['high'])} n={one['n']}" if one else "" for one in own]
        table.add_row(model, method, *words)
    return table
