"""The engine of a cluster: Ray actors, which are handed one task at a time.

Actors compute tasks and send their files back; the driver writes each at once, so that workers need not share the run's
folder and a driver that dies loses what actors were at, no more. Actors must see the data and the weights under the
same names as the driver.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from dave_vit.errors import DaveError, OptionError, first_line, missing_extra
from dave_vit.evaluate.dispatch import ActorLost, Dispatcher
from dave_vit.evaluate.engines.base import ENGINES, EngineOptions, Finished
from dave_vit.evaluate.job import EvalJob
from dave_vit.evaluate.store import RunFolder
from dave_vit.evaluate.tasks import EvalTask
from dave_vit.evaluate.worker import Files, Worker

_LOOK = 5.0  # seconds between looks at what the cluster has


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

    def run(self, job: EvalJob, folder: RunFolder, tasks: Sequence[EvalTask], finished: Finished) -> None:
        """Computes all tasks that are not done, and writes them; what a killed actor had begun is done again."""
        import ray

        there = folder.present(task.file for task in tasks)
        for task in tasks:
            if task.file in there:
                finished(task)
        pending = [task for task in tasks if task.file not in there]

        def done(task: EvalTask, files: Files) -> None:
            folder.write(files)
            finished(task)

        if pending:
            with closing(_Actors(ray, job, self.device, self.workers, len(pending))) as actors:
                Dispatcher(actors, done).run(pending)


@ENGINES.register("ray")
def _ray(options: EngineOptions) -> RayEngine:
    return RayEngine(options.address, options.device, options.workers)


class _Actor:
    """Computes tasks; one worker for its life."""

    def __init__(self, job: EvalJob, device: str) -> None:
        torch.set_num_threads(job.threads or 1)
        self._make: Callable[[], Worker] = lambda: Worker(job, device)
        self._worker: Worker | None = None

    def ready(self) -> None:
        """Returns when the actor has begun."""

    def compute(self, task: EvalTask) -> Files | DaveError:
        """The files of a task, or what the user can repair: raised, it would be buried in a trace of Ray's."""
        try:
            self._worker = self._worker or self._make()
            return self._worker.compute(task)
        except DaveError as failure:
            return failure


class _Actors:
    """The actors of a run on a Ray cluster, for `Dispatcher`.

    Args:
        ray: the module.
        job: what they compute.
        device: see `RayEngine`.
        workers: see `RayEngine`.
        tasks: how many there are.
    """

    def __init__(self, ray: Any, job: EvalJob, device: str, workers: int | None, tasks: int) -> None:
        self.ray, self.job, self._tasks, self._workers = ray, job, tasks, workers
        self._hired: list[Any] = []
        self._pool = self._planned(ray.cluster_resources(), device)

    def room(self) -> int:
        """As many as the cluster, as it is now, has room for; none while all GPUs are gone."""
        cluster, device = self.ray.cluster_resources(), self._pool.device  # which stays what it was at first
        if device == "cuda" and not cluster.get("GPU"):
            return 0
        self._pool = self._planned(cluster, device)
        return self._pool.actors

    def hire(self) -> tuple[Any, Any]:
        """A new actor, which Ray places when there is room."""
        pool = self._pool
        made = self.ray.remote(**pool.resources)(_Actor).remote(self.job, pool.device)
        self._hired.append(made)
        return made, made.ready.remote()

    def call(self, actor: Any, task: EvalTask) -> Any:
        """Has an actor compute a task."""
        return actor.compute.remote(task)

    def ended(self, calls: Sequence[Any]) -> list[Any]:
        """One call that has ended, or none after some seconds: a node may have joined meanwhile."""
        if not calls:
            time.sleep(_LOOK)
            return []
        ended, _ = self.ray.wait(list(calls), num_returns=1, timeout=_LOOK)
        return list(ended)

    def result(self, call: Any) -> Any:
        """What a call gave."""
        try:
            result = self.ray.get(call)
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError) as error:
            raise ActorLost(first_line(error)) from error
        if isinstance(result, DaveError):
            raise result
        return result

    def _planned(self, cluster: dict[str, float], device: str) -> Pool:
        return plan_pool(cluster, self._tasks, self.job.threads or 1, device, self._workers)

    def close(self) -> None:
        """Ends all actors."""
        for actor in self._hired:
            self.ray.kill(actor)


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
        share = _whole(1 / -(-actors // gpus))  # as many on each: three on two GPUs are two on one of them
        return Pool(actors, "cuda", {"num_gpus": share, "num_cpus": _whole(min(1.0, cpus / (2 * actors)))})
    if device not in ("auto", "cpu"):
        raise OptionError(f"device {device!r}, and the cluster has no GPU; use cpu")
    actors = max(1, min(workers or int(cpus // threads) or 1, tasks))
    # Whole CPUs for all actors of a small cluster would leave none for anything else that runs there.
    free = cpus - 1 if cpus > 1 else 0.5
    return Pool(actors, "cpu", {"num_cpus": _whole(min(float(threads), free / actors))})


def _whole(cpus: float) -> float:
    """Ray takes fractions below one, and whole numbers above; never a little more than there is."""
    return float(int(cpus)) if cpus >= 1 else int(1000 * cpus) / 1000


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """A connection to a cluster; one of this machine ends with the block, one that was there already stays."""
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_BACKEND_LOG_LEVEL", "fatal")):
        os.environ.setdefault(name, value)  # read when Ray is imported
    try:
        import ray
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
