"""What every engine is, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dave_vit._internal.registry import Registry
from dave_vit.evaluate.job import EvalJob
from dave_vit.evaluate.store import RunFolder
from dave_vit.evaluate.tasks import EvalTask

Finished = Callable[[EvalTask], None]
"""Is told of each task whose files are there."""


class Engine(Protocol):
    """Computes tasks somewhere and sees to it that their files are in the run's folder."""

    def __enter__(self) -> object: ...

    def __exit__(self, *failure: object) -> None: ...

    def run(self, job: EvalJob, folder: RunFolder, tasks: Sequence[EvalTask], finished: Finished) -> None:
        """Returns when the files of all tasks are there."""


@dataclass(frozen=True)
class EngineOptions:
    """What a user may say of an engine.

    Attributes:
        device: "auto", or what the engine understands, such as "cpu" or "cuda:0,cuda:1".
        workers: processes; as many as the engine thinks fit where nothing is said.
        address: of a cluster.
    """

    device: str = "auto"
    workers: int | None = None
    address: str | None = None


ENGINES: Registry[Callable[[EngineOptions], Engine]] = Registry("engine")


def create_engine(name: str, **options: Any) -> Engine:
    """An engine by its name.

    Args:
        name: one of ``ENGINES``.
        options: fields of ``EngineOptions``.
    """
    return ENGINES[name](EngineOptions(**options))
