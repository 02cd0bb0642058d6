"""Engines: where the tasks of a run are computed. One file each, which registers itself."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from dave_vit._internal.registry import Registry, import_all
from dave_vit.evaluate.job import EvalJob
from dave_vit.evaluate.store import RunFolder
from dave_vit.evaluate.tasks import EvalTask

TaskCallback = Callable[[EvalTask], None]
"""Called with each task whose files exist."""


class Engine(AbstractContextManager[Any], Protocol):
    """Computes tasks somewhere and puts their files into the run's folder, while it is entered."""

    def run(self, job: EvalJob, folder: RunFolder, tasks: Sequence[EvalTask], finished: TaskCallback) -> None:
        """Return when the files of all tasks exist."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of the command line for all engines.

    Attributes:
        device: "auto", or what the engine understands, such as "cpu" or "cuda:0,cuda:1".
        workers: number of processes; the engine chooses if None.
        address: address of a cluster.
    """

    device: str = "auto"
    workers: int | None = None
    address: str | None = None


ENGINES: Registry[Callable[[EngineOptions], Engine]] = Registry("engine")


def create_engine(name: str, **options: Any) -> Engine:
    """Create an engine by name.

    Args:
        name: one of ``ENGINES``.
        options: fields of ``EngineOptions``.
    """
    return ENGINES[name](EngineOptions(**options))


import_all(__name__)
