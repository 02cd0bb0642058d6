"""Checks of a model that run while the server is idle: is it explained exactly, and which methods cannot explain it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, TypeVar

from dave_vit.checks.doctor import diagnose, example_inputs
from dave_vit.errors import DaveError
from dave_vit.methods import METHODS, create_method
from dave_vit.methods.options import filter_options
from dave_vit.models import Adapter
from dave_vit.models.tasks import TaskModel
from dave_vit.web.schema import Verdict
from dave_vit.web.service import ExplainService, check_before_passes
from dave_vit.web.work_queue import POLL_SECONDS, IsDisconnected, WorkQueue

T = TypeVar("T")
_PASSES = 2  # a method that gets this far raises no refusal any more
_SAME_REFUSALS = {"attention_flow": "rollout"}  # refuses what the other one refuses, and computes for long


class _PassLimit(Exception):
    """Stops a method that has shown that it runs."""


class ModelChecks:
    """Checks each model of a server once, while no other request waits.

    Args:
        service: holds the models.
        queue: runs the checks.
    """

    def __init__(self, service: ExplainService, queue: WorkQueue) -> None:
        self._service, self._queue = service, queue
        self._results: dict[tuple[str, str], Any] = {}  # by model and method
        self._lock = asyncio.Lock()

    async def verdict(self, name: str | None, is_disconnected: IsDisconnected) -> Verdict:
        """Return whether a model is explained exactly."""
        model = self._service.find_model(name).model
        return await self._run_once((model.spec, ""), lambda: examine_model(model), is_disconnected)

    async def refusals(self, name: str | None, is_disconnected: IsDisconnected) -> dict[str, str]:
        """Return the methods that cannot explain a model, each with its reason."""
        model, reasons = self._service.find_model(name).model, {}
        for method in METHODS:  # one at a time, so that another request waits for one method only
            trial = partial(refusal_reason, model, _SAME_REFUSALS.get(method, method))
            reasons[method] = await self._run_once((model.spec, method), trial, is_disconnected)
        return {method: reason for method, reason in reasons.items() if reason}

    async def _run_once(self, key: tuple[str, str], work: Callable[[], T], is_disconnected: IsDisconnected) -> T:
        async with self._lock:
            while key not in self._results:
                if self._queue.is_idle:
                    self._results[key] = await self._queue.call(lambda check: work(), is_disconnected, counted=False)
                else:
                    await asyncio.sleep(POLL_SECONDS)
        return self._results[key]  # type: ignore[no-any-return]


def examine_model(model: Adapter) -> Verdict:
    """Return what `dave doctor` says about a model."""
    try:
        examination = diagnose(*example_inputs(model))
    except DaveError as error:
        return Verdict(exact=False, text=str(error))
    return Verdict(exact=examination.exact, text=examination.summary)


def refusal_reason(model: Adapter, method: str) -> str:
    """Return why a method cannot explain a model; empty if it can. It runs on noise, with as few passes as possible."""
    examined, inputs = example_inputs(model)
    passes = count(1)

    def limit_passes() -> None:
        if next(passes) > _PASSES:
            raise _PassLimit

    try:
        with suppress(_PassLimit), check_before_passes(examined, limit_passes):
            target = examined.task.check_score if isinstance(examined, TaskModel) else 0
            options = filter_options(method, **METHODS[method].options_for_budget(1))
            create_method(method, examined, **options).explain(inputs, target)
    except DaveError as error:
        return str(error)
    return ""
