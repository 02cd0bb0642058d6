"""What is known of a model before anybody asks for a map: the doctor's verdict, and which methods cannot run."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from torch import Tensor

from dave_vit.checks.doctor import diagnose, example_inputs
from dave_vit.errors import DaveError
from dave_vit.methods import METHODS, create_method
from dave_vit.methods.options import filter_options
from dave_vit.models import Adapter
from dave_vit.models.tasks import TaskModel
from dave_vit.web.explaining import Desk
from dave_vit.web.jobs import PULSE, Check, Jobs
from dave_vit.web.schema import Verdict

T = TypeVar("T")
Gone = Callable[[], Awaitable[bool]]
_PASSES = 2  # a method that gets this far is not refused any more
_LIKE = {"attention_flow": "rollout"}  # refuses what the other one refuses, and computes long


class _Enough(Exception):
    """Raised inside of a method that has shown that it runs."""


class Checks:
    """Looks into the models of a server while nobody else wants anything of it, once for each of them.

    Args:
        desk: holds the models.
        jobs: their worker.
    """

    def __init__(self, desk: Desk, jobs: Jobs) -> None:
        self._desk, self._jobs = desk, jobs
        self._verdicts: dict[str, Verdict] = {}
        self._reasons: defaultdict[str, dict[str, str | None]] = defaultdict(dict)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def verdict(self, name: str | None, gone: Gone) -> Verdict:
        """Whether a model is explained exactly."""
        served = self._desk.served(name)
        async with self._locks[served.name]:
            if served.name not in self._verdicts:
                self._verdicts[served.name] = await self._at_rest(partial(verdict, served.model), gone)
        return self._verdicts[served.name]

    async def refusals(self, name: str | None, gone: Gone) -> dict[str, str]:
        """The methods that cannot explain a model, each with its reason."""
        served = self._desk.served(name)
        async with self._locks[served.name]:
            known = self._reasons[served.name]
            for method in METHODS:
                if method not in known:  # one by one: a request in between waits for one of them
                    trial = partial(refusal, served.model, _LIKE.get(method, method))
                    known[method] = await self._at_rest(trial, gone)
        return {method: reason for method, reason in known.items() if reason is not None}

    async def _at_rest(self, work: Callable[[], T], gone: Gone) -> T:
        """The result of some work, begun when the worker has nothing else to do."""
        while not self._jobs.idle:
            await asyncio.sleep(PULSE)

        def steps(check: Check) -> Generator[list[T], None, None]:
            yield [work()]

        async with aclosing(self._jobs.submit(steps, counted=False).steps(gone)) as results:
            async for result in results:
                if result is not None:
                    return result[0]
        raise ClientDisconnect


def verdict(model: Adapter) -> Verdict:
    """What `dave doctor` says of a model."""
    try:
        found = diagnose(*example_inputs(model))
    except DaveError as error:
        return Verdict(exact=False, text=str(error))
    return Verdict(exact=found.exact, text=found.verdict)


def refusal(model: Adapter, method: str) -> str | None:
    """Why a method cannot explain a model; None where it can. It is tried on noise, with as few passes as it takes."""
    asked, inputs = example_inputs(model)
    handle = asked.register_forward_pre_hook(_Counter())
    try:
        _try(asked, method, inputs)
    except _Enough:
        return None
    except DaveError as error:
        return str(error)
    finally:
        handle.remove()
    return None


def _try(model: Adapter, method: str, inputs: Tensor) -> None:
    target = model.task.check_score if isinstance(model, TaskModel) else 0
    create_method(method, model, **filter_options(method, **METHODS[method].options_for_budget(1))).explain(
        inputs, target
    )


class _Counter:
    def __init__(self) -> None:
        self.passes = 0

    def __call__(self, module: Any, inputs: Any) -> None:
        self.passes += 1
        if self.passes > _PASSES:
            raise _Enough
