"""The engine of a cluster: Ray actors, which get one task at a time.

Actors compute tasks and send their files back; the driver writes each at once. So workers need no access to the run's
folder, and if the driver dies, only running tasks are lost. Data and weights must have the same paths on all nodes.
"""

import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from dave_vit.errors import OptionError, first_line, import_optional
from dave_vit.evaluate.dispatch import Dispatcher, TaskServer, WorkerLost
from dave_vit.evaluate.engines import ENGINES, EngineOptions, TaskCallback
from dave_vit.evaluate.job import EvalJob
from dave_vit.evaluate.store import RunFolder
from dave_vit.evaluate.tasks import EvalTask
from dave_vit.evaluate.worker import Files

_TOKEN = secrets.token_hex(32)  # one secret for all clusters: Ray keeps the first one of a process
_POLL_SECONDS = 5.0  # between checks of the resources of the cluster


@dataclass(frozen=True)
class RayEngine(EngineOptions):
    """Runs tasks on a Ray cluster while it is used in a ``with`` block.

    Attributes:
        address: address of a cluster, such as "auto" or "ray://head:10001"; a cluster on this machine by default.
        device: "cpu", or "auto" for GPUs if the cluster has any.
        workers: number of actors; one per GPU, or as many as the CPUs allow, by default.
    """

    _stack: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> "RayEngine":
        self._stack.enter_context(_connect_cluster(self.address))
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def run(self, job: EvalJob, folder: RunFolder, tasks: Sequence[EvalTask], finished: TaskCallback) -> None:
        """Compute all tasks that are not done, and write them; the task of a killed actor is computed again."""
        import ray

        left = len(tasks) - len(folder.find_existing(task.file for task in tasks))
        with closing(_RayCluster(ray, job, self.device, self.workers, left)) as cluster:
            Dispatcher(cluster, folder, finished).run(tasks)


@ENGINES.register("ray")
def _create_ray(options: EngineOptions) -> RayEngine:
    return RayEngine(**vars(options))


class _RayCluster:
    """The cluster that `Dispatcher` uses.

    Args:
        ray: the module.
        job: what they compute.
        device: see `RayEngine`.
        workers: see `RayEngine`.
        tasks: how many there are.
    """

    def __init__(self, ray: Any, job: EvalJob, device: str, workers: int | None, tasks: int) -> None:
        self.ray, self.job, self._tasks, self._workers = ray, job, tasks, workers
        self._actors: list[Any] = []
        self._pool = self._plan_pool(ray.cluster_resources(), device)

    def count_workers(self) -> int:
        """Return how many actors fit on the cluster as it is now; none while it has lost all GPUs."""
        cluster, device = self.ray.cluster_resources(), self._pool.device  # which stays what it was at first
        if device == "cuda" and not cluster.get("GPU"):
            return 0
        self._pool = self._plan_pool(cluster, device)
        return self._pool.actors

    def start_worker(self) -> tuple[Any, Any]:
        """Start an actor, which Ray places as soon as it fits."""
        pool = self._pool
        actor = self.ray.remote(**pool.resources)(TaskServer).remote(self.job, pool.device)
        self._actors.append(actor)
        return actor, actor.ready.remote()

    def submit(self, worker: Any, task: EvalTask, following: EvalTask | None) -> Any:
        """Start the computation of a task on an actor."""
        return worker.compute.remote(task, following)

    def wait(self, calls: Sequence[Any]) -> Sequence[Any]:
        """Return one call that has ended, or none after some seconds: a node may have joined meanwhile."""
        if not calls:
            time.sleep(_POLL_SECONDS)
            return []
        return list(self.ray.wait(list(calls), num_returns=1, timeout=_POLL_SECONDS)[0])

    def result(self, call: Any) -> Files | Exception:
        """Return the result of a call."""
        try:
            result: Files | Exception = self.ray.get(call)
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError) as error:
            raise WorkerLost(first_line(error)) from error
        return result

    def release_memory(self, worker: Any) -> None:
        """Tell an actor to free what it does not need while it waits."""
        worker.release_memory.remote()

    def _plan_pool(self, cluster: dict[str, float], device: str) -> "ActorPool":
        return plan_pool(cluster, self._tasks, self.job.threads or 1, device, self._workers)

    def close(self) -> None:
        """Kill all actors."""
        for actor in self._actors:
            self.ray.kill(actor)


@dataclass(frozen=True)
class ActorPool:
    """Number of actors, their device, and the resources of each."""

    actors: int
    device: str
    resources: dict[str, float]


def plan_pool(cluster: dict[str, float], tasks: int, threads: int, device: str, workers: int | None) -> ActorPool:
    """Plan the pool of actors for a cluster.

    Args:
        cluster: its resources, "CPU" and "GPU".
        tasks: number of tasks; more actors than tasks are useless.
        threads: threads of each actor on the CPU.
        device: "cpu", or "auto" or "cuda" for GPUs.
        workers: requested number of actors.
    """
    if workers is not None and workers < 1:
        raise OptionError(f"{workers} workers; expected 1 or more")
    cpus, gpus = cluster.get("CPU", 1.0), int(cluster.get("GPU", 0))
    if device != "cpu" and gpus:
        actors = max(1, min(workers or gpus, tasks))
        share = _round_resource(1 / -(-actors // gpus))  # as many on each: three on two GPUs are two on one of them
        cpu_share = _round_resource(min(1.0, cpus / (2 * actors)))
        return ActorPool(actors, "cuda", {"num_gpus": share, "num_cpus": cpu_share})
    if device not in ("auto", "cpu"):
        raise OptionError(f"device {device!r}, and the cluster has no GPU; use cpu")
    actors = max(1, min(workers or int(cpus // threads) or 1, tasks))
    # Whole CPUs for all actors of a small cluster would leave none for anything else that runs there.
    free = cpus - 1 if cpus > 1 else 0.5
    return ActorPool(actors, "cpu", {"num_cpus": _round_resource(min(float(threads), free / actors))})


def _round_resource(cpus: float) -> float:
    """Round down: Ray takes fractions below one and whole numbers above, never more than there is."""
    return float(int(cpus)) if cpus >= 1 else int(1000 * cpus) / 1000


@contextmanager
def _connect_cluster(address: str | None) -> Iterator[None]:
    """Connect to a cluster; one that is started here ends with the block, one that existed before stays."""
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_BACKEND_LOG_LEVEL", "fatal")):
        os.environ.setdefault(name, value)  # read when Ray is imported
    ray = import_optional("ray", extra="cluster")
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    with ExitStack() as stack:
        if address is None:
            stack.enter_context(_set_token())
            ray.init(address="local", include_dashboard=False, **quiet)
        else:
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                how = "start one with: ray start --head"
                raise OptionError(f"no Ray cluster at {address!r} ({first_line(error)}); {how}") from error
        stack.callback(ray.shutdown)
        yield


@contextmanager
def _set_token() -> Iterator[None]:
    """Set a secret for this process: without one in the environment Ray would write one into the home folder."""
    known = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in known):
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = _TOKEN
    try:
        yield
    finally:
        for name in known:  # Ray itself adds the mode
            os.environ.pop(name, None)
