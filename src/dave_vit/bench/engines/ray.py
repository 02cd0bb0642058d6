"""The engine of a cluster: Ray Data with a pool of actors.

Actors compute tasks and send their files back; the driver writes them, so that workers need not share the run's folder.
They must see the data and the weights under the same names as the driver.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from dave_vit.bench.engines.base import ENGINES, EngineOptions, Finished
from dave_vit.bench.job import Job
from dave_vit.bench.store import RunFolder
from dave_vit.bench.tasks import Task
from dave_vit.bench.worker import Worker
from dave_vit.errors import DaveError, OptionError, first_line, missing_extra


@dataclass
class RayEngine:
    """Runs tasks on a Ray cluster, which lives as long as the block that this engine opens.

    Attributes:
        address: of a cluster, such as "auto" or "ray://head:10001"; a cluster of this machine where nothing is said.
        device: "cpu", or "auto" for GPUs where the cluster has some.
        workers: actors; one per GPU, or as many as the CPUs allow, where nothing is said.
    """

    address: str | None = None
    device: str = "auto"
    workers: int | None = None
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> RayEngine:
        self._stack.enter_context(_cluster(self.address))
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def run(self, job: Job, folder: RunFolder, tasks: Sequence[Task], finished: Finished) -> None:
        """Computes all tasks that are not done, and writes them; Ray tries again what a killed actor had begun."""
        import ray

        pending = []
        for task in tasks:
            if (folder / task.file).exists():
                finished(task)
            else:
                pending.append(task)
        if not pending:
            return
        pool = plan_pool(ray.cluster_resources(), len(pending), job.threads or 1, self.device, self.workers)
        groups = group(pending, pool.actors)
        rows = ray.data.from_items([{"tasks": pickle.dumps(part)} for part in groups], override_num_blocks=len(groups))
        results = rows.map_batches(
            _Actor,
            fn_constructor_args=(job, pool.device),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=pool.actors, max_tasks_in_flight_per_actor=1),
            **pool.resources,
        )
        for row in results.iter_rows():
            if row["error"]:
                raise pickle.loads(row["error"])
            folder.write(pickle.loads(row["files"]))
            finished(pickle.loads(row["task"]))


@ENGINES.register("ray")
def _ray(options: EngineOptions) -> RayEngine:
    return RayEngine(options.address, options.device, options.workers)


class _Actor:
    """Computes groups of tasks; one worker for its life."""

    def __init__(self, job: Job, device: str) -> None:
        torch.set_num_threads(job.threads or 1)
        self._make: Callable[[], Worker] = lambda: Worker(job, device)
        self._worker: Worker | None = None

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[bytes]]]:
        for task in pickle.loads(batch["tasks"][0]):
            try:
                self._worker = self._worker or self._make()
                files, error = pickle.dumps(self._worker.compute(task)), b""
            except DaveError as failure:  # the user can repair it; Ray would bury it in a trace
                files, error = b"", pickle.dumps(failure)
            yield {"task": [pickle.dumps(task)], "files": [files], "error": [error]}


@dataclass(frozen=True)
class Pool:
    """How many actors, on which device, each with what of the cluster."""

    actors: int
    device: str
    resources: dict[str, float]


def plan_pool(cluster: dict[str, float], tasks: int, threads: int, device: str, workers: int | None) -> Pool:
    """The pool of actors for a cluster.

    Args:
        cluster: its resources, "CPU" and "GPU".
        tasks: how many there are; more actors than tasks are no use.
        threads: of each actor on the CPU.
        device: "cpu", or "auto" or "cuda" for GPUs.
        workers: wanted actors.
    """
    if workers is not None and workers < 1:
        raise OptionError(f"{workers} workers; expected 1 or more")
    cpus, gpus = cluster.get("CPU", 1.0), int(cluster.get("GPU", 0))
    if device != "cpu" and gpus:
        actors = max(1, min(workers or gpus, tasks))
        share = 1.0 if actors <= gpus else gpus / actors
        return Pool(actors, "cuda", {"num_gpus": share, "num_cpus": _whole(min(1.0, cpus / (2 * actors)))})
    if device not in ("auto", "cpu"):
        raise OptionError(f"device {device!r}, and the cluster has no GPU; use cpu")
    actors = max(1, min(workers or int(cpus // threads) or 1, tasks))
    # Whole CPUs for all actors of a small cluster would leave none for the tasks that feed them.
    free = cpus - 1 if cpus > 1 else 0.5
    return Pool(actors, "cpu", {"num_cpus": _whole(min(float(threads), free / actors))})


def _whole(cpus: float) -> float:
    """Ray takes fractions below one, and whole numbers above."""
    return float(int(cpus)) if cpus >= 1 else round(cpus, 3)


def group(tasks: Sequence[Task], actors: int) -> list[list[Task]]:
    """Tasks that read the same images stay together, unless that leaves actors without work."""
    together: dict[Any, list[Task]] = {}
    for task in tasks:
        together.setdefault(task.chunk, []).append(task)
    return list(together.values()) if len(together) >= 4 * actors else [[task] for task in tasks]


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """A connection to a cluster; one of this machine ends with the block, one that was there already stays."""
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_BACKEND_LOG_LEVEL", "fatal")):
        os.environ.setdefault(name, value)  # read when Ray is imported
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_extra("ray", "cluster") from error
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    with ExitStack() as stack:
        if address is None:
            stack.enter_context(_own_token())
            ray.init(address="local", include_dashboard=False, **quiet)
        else:
            _connect(ray, address, quiet)
        stack.callback(ray.shutdown)
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield


def _connect(ray: Any, address: str, quiet: dict[str, Any]) -> None:
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"no Ray cluster at {address!r} ({first_line(error)}); start one with: ray start --head"
        ) from error


@contextmanager
def _own_token() -> Iterator[None]:
    """A secret of this process alone: without one in the environment Ray would write one into the home folder."""
    known = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in known):
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = _token()
    try:
        yield
    finally:
        for name in known:  # Ray itself adds the mode
            os.environ.pop(name, None)


@lru_cache(maxsize=1)
def _token() -> str:
    """Always the same: Ray keeps the first one that a process shows it."""
    return secrets.token_hex(32)
