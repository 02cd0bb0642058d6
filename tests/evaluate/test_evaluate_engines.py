"""Runs that are killed, shared and spread over processes: always the same rows, no finished shard computed again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import small_embedded
from dave_vit import cli
from dave_vit.errors import OptionError, OutOfMemory, UnknownName
from dave_vit.evaluate import create_engine, dispatch, evaluate
from dave_vit.evaluate.dispatch import Dispatcher, WorkerLost
from dave_vit.evaluate.engines.local import LocalEngine, pick_devices
from dave_vit.evaluate.engines.ray import RayEngine, plan_pool
from dave_vit.evaluate.store import RunFolder
from dave_vit.evaluate.tasks import EvalTask
from evaluation_fixtures import build_plan, load, load_at_home, load_fatal, paint, quick_plan, read_rows

# A run in a process of its own, which notes each task that it computes.
SUPPORT = Path(__file__).parents[1] / "support"
RUN = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from evaluation_fixtures import load, quick_plan
from dave_vit.evaluate import evaluate
from dave_vit.evaluate.worker import Worker

folder, run, log = map(Path, sys.argv[1:4])
compute = Worker.compute

def noted(self, task, following=None):
    with log.open("a") as file:
        file.write(task.name + "\\n")
    time.sleep(0.05)
    return compute(self, task, following)

Worker.compute = noted
evaluate(quick_plan(folder), run, loader=load, threads=1)
"""


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> Path:
    return paint(tmp_path_factory.mktemp("squares") / "data")


@pytest.fixture(scope="module")
def expected(squares, tmp_path_factory) -> list[dict]:
    """The rows of a run that nothing disturbed."""
    run = tmp_path_factory.mktemp("quiet") / "run"
    evaluate(quick_plan(squares), run, loader=load, threads=1)
    return read_rows(run)


def start(squares: Path, run: Path, log: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", RUN, squares, run, log], cwd=SUPPORT)


def shards(run: Path) -> set[str]:
    return {path.stem for kind in ("rows", "scan") for path in (run / kind).glob("*.parquet")}


def names(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.slow
def test_killed_at_random_and_started_again(squares, expected, tmp_path):
    run = tmp_path / "run"
    draw = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID", "killed"))
    for attempt in range(2):
        log = tmp_path / f"log{attempt}"
        before = shards(run) if run.exists() else set()
        process = start(squares, run, log)
        goal = draw.randint(1, 6)  # of 18 tasks
        while len(names(log)) < goal and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not before & set(names(log))  # nothing that was finished is computed again
        assert before <= shards(run)
    finished = shards(run)
    last = start(squares, run, tmp_path / "last")
    assert last.wait(timeout=300) == 0
    assert not finished & set(names(tmp_path / "last"))
    assert read_rows(run) == expected
    assert not list(run.rglob("*.part"))


BUILTIN = """evaluate --metric all --methods input_x_gradient,smoothgrad --samples 2 --limit 8 --shard 2 --threads 1
    --set gridpg.grids=2 --set deletion.steps=2 --set insertion.steps=2 --set sanity.images=1
    --set infidelity.images=1 --set sensitivity_n.images=1 --set sensitivity_n.samples=4 --set irof.steps=2
    --set road.images=1 --set srg.steps=3 --set r_oms.images=1 --quiet --out""".split()


def command(run: Path) -> subprocess.Popen:
    """The command of a user on builtin data, with a small model whose weights are beside the run."""
    code = f"import torch, small_embedded; torch.set_num_threads(1); small_embedded.shrink({str(run.parent)!r})"
    code += "; from dave_vit.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *BUILTIN, run], cwd=SUPPORT)


def read_write_times(run: Path) -> dict[str, int]:
    """Return when each shard was written."""
    return {path.name: path.stat().st_mtime_ns for path in (run / "rows").glob("*.parquet")}


@pytest.mark.slow
def test_the_command_killed_at_random_on_builtin_data(tmp_path, monkeypatch):
    small_embedded.shrink(tmp_path, monkeypatch.setattr)
    small_embedded.write_weights(tmp_path, ["builtin"])
    assert cli.run([*BUILTIN, str(tmp_path / "quiet")]) == 0
    run = tmp_path / "run"
    total, finished = len(read_write_times(tmp_path / "quiet")), {}
    draw = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID", "killed"))
    for _ in range(2):
        process = command(run)
        goal = min(len(finished) + draw.randint(1, total // 3), total - 1)
        while len(read_write_times(run)) < goal and process.poll() is None:
            time.sleep(0.02)
        last = time.monotonic() + draw.uniform(0, 0.3)
        # Small models are quick: stop while something is left.
        while time.monotonic() < last and len(read_write_times(run)) < total - 3:
            time.sleep(0.002)
        process.kill()  # SIGKILL
        process.wait()
        assert finished.items() <= read_write_times(run).items()  # neither lost nor written again
        finished = read_write_times(run)
    assert 0 < len(finished) < total
    assert command(run).wait(timeout=600) == 0
    assert finished.items() <= read_write_times(run).items()
    assert read_rows(run) == read_rows(tmp_path / "quiet")
    assert (run / "report.html").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_processes_on_a_gpu(squares, expected, tmp_path):
    engine = LocalEngine(pick_devices("cuda:0", workers=2))
    evaluate(quick_plan(squares), tmp_path / "run", engine=engine, loader=load, threads=1)
    there = read_rows(tmp_path / "run")
    assert [row["image"] for row in there] == [row["image"] for row in expected]
    near = [
        row["value"] == other["value"] or abs(row["value"] - other["value"]) < 0.02
        for row, other in zip(there, expected, strict=True)
    ]
    assert sum(near) >= 0.98 * len(near)  # the order of pixels that are nearly equal may differ


@pytest.mark.slow
def test_two_processes_share_one_run(squares, expected, tmp_path):
    run = tmp_path / "run"
    logs = [tmp_path / "one", tmp_path / "two"]
    processes = [start(squares, run, log) for log in logs]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    computed = [name for log in logs for name in names(log)]
    assert len(computed) == len(set(computed))  # each task once, by one of the two
    assert read_rows(run) == expected


@pytest.mark.slow
def test_a_team_survives_a_killed_member(squares, expected, tmp_path):
    (squares.parent / "killed").unlink(missing_ok=True)
    engine = LocalEngine(["cpu", "cpu"])
    evaluate(quick_plan(squares), tmp_path / "run", engine=engine, loader=load_fatal, threads=1)
    assert (squares.parent / "killed").exists()
    assert read_rows(tmp_path / "run") == expected


@pytest.mark.slow
def test_ray_gives_the_same_rows_and_survives_a_killed_worker(squares, expected, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    (squares.parent / "killed").unlink(missing_ok=True)
    engine = RayEngine(device="cpu", workers=2)
    evaluate(quick_plan(squares), tmp_path / "run", engine=engine, loader=load_fatal, threads=1)
    assert (squares.parent / "killed").exists()
    assert read_rows(tmp_path / "run") == expected
    assert not (tmp_path / ".ray").exists()  # no secret is left in the home folder
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.slow
def test_an_error_of_a_member_reaches_the_caller(squares, tmp_path):
    plan = quick_plan(squares, limit=12)  # three scans
    with pytest.raises(RuntimeError, match="a worker failed"):
        evaluate(plan, tmp_path / "run", engine=LocalEngine(["cpu", "cpu"]), loader=load_at_home, threads=1)


def test_waiting_for_others_takes_longer_and_longer_looks(tmp_path, monkeypatch):
    """A second command that finds everything claimed must not ask a file server five times a second."""
    tasks = [EvalTask("scan", f"s{i}", 0, -1, 0, i, (i,)) for i in range(2000)]
    cluster, folder, pauses = SimulatedCluster(), RunFolder(tmp_path), []
    monkeypatch.setattr(RunFolder, "claim", lambda self, key: nullcontext(False))  # all in other hands
    monkeypatch.setattr(RunFolder, "find_existing", lambda self, files: set(files) if len(pauses) > 9 else set())

    def pause(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(dispatch.time, "sleep", pause)
    finished_tasks = []
    Dispatcher(cluster, folder, finished_tasks.append).run(tasks)
    assert finished_tasks == tasks
    assert not cluster.calls
    assert pauses[:3] == [0.4, 0.8, 1.6]
    assert max(pauses) == 5.0
    assert len(pauses) == 10


def test_engines_go_by_name():
    assert create_engine("local", device="cpu", workers=2) == LocalEngine(["cpu", "cpu"])
    ray = create_engine("ray", address="auto", workers=3)
    assert (ray.address, ray.device, ray.workers) == ("auto", "auto", 3)
    with pytest.raises(UnknownName, match="unknown engine 'loca'; did you mean local"):
        create_engine("loca")
    with pytest.raises(OptionError, match="add --engine ray"):
        create_engine("local", address="auto")


def test_all_gpus_of_the_machine_by_default(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert create_engine("local").devices == ["cuda:0", "cuda:1", "cuda:2"]
    assert create_engine("local", workers=6).devices == ["cuda:0", "cuda:1", "cuda:2"] * 2


def test_a_full_gpu_says_so(monkeypatch):
    def ones(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(OutOfMemory, match=r"^device 'cuda' is full; free its memory, or use another device$"):
        create_engine("local", device="cuda")


def test_devices():
    assert pick_devices("cpu") == ["cpu"]
    assert pick_devices("cpu", workers=3) == ["cpu"] * 3
    assert pick_devices("cuda:0, cuda:2") == ["cuda:0", "cuda:2"]
    assert pick_devices("cuda:0,cuda:1", workers=4) == ["cuda:0", "cuda:1"] * 2
    with pytest.raises(OptionError):
        pick_devices("")


@pytest.mark.parametrize(
    ("cluster", "threads", "workers", "actors", "resources"),
    [
        ({"CPU": 2}, 1, None, 2, {"num_cpus": 0.5}),  # not two whole ones: nothing would be left for what feeds them
        ({"CPU": 1}, 1, None, 1, {"num_cpus": 0.5}),
        ({"CPU": 64}, 16, None, 4, {"num_cpus": 15}),
        ({"CPU": 16}, 1, 3, 3, {"num_cpus": 1}),
        ({"CPU": 16, "GPU": 4}, 1, None, 4, {"num_gpus": 1, "num_cpus": 1}),
        ({"CPU": 4, "GPU": 1}, 1, 2, 2, {"num_gpus": 0.5, "num_cpus": 1}),
        ({"CPU": 16, "GPU": 2}, 1, 3, 3, {"num_gpus": 0.5, "num_cpus": 1}),  # two thirds would leave one without a GPU
        ({"CPU": 16, "GPU": 1}, 1, 3, 3, {"num_gpus": 0.333, "num_cpus": 1}),
    ],
)
def test_pools_fit_their_cluster(cluster, threads, workers, actors, resources):
    pool = plan_pool(cluster, 1000, threads, "auto", workers)
    assert (pool.actors, pool.resources) == (actors, resources)
    assert pool.device == ("cuda" if "GPU" in cluster else "cpu")
    assert sum(pool.resources["num_cpus"] for _ in range(actors)) < cluster["CPU"]


def test_pools_are_not_larger_than_the_work():
    assert plan_pool({"CPU": 64}, 3, 1, "auto", None).actors == 3
    assert plan_pool({"CPU": 64, "GPU": 8}, 100, 1, "cpu", 2).device == "cpu"
    with pytest.raises(OptionError, match="no GPU"):
        plan_pool({"CPU": 64}, 3, 1, "cuda", None)


TASKS = [
    EvalTask("images", f"{start}-{method}", 0, method, 0, start, (start,)) for start in range(4) for method in (0, 1)
]


class SimulatedCluster:
    """A simulated cluster: actors compute by returning a task's name, and die or join on demand."""

    def __init__(self, *, deadly=None, full=None, sizes: list[int] | None = None, failing_starts: int = 0):
        self.deadly, self.full = dict(deadly or {}), dict(full or {})  # how often a task dies, or finds no memory
        self.sizes, self.failing_starts = list(sizes or [2]), failing_starts
        self.last: list[str] = []
        self.calls: list[tuple[int, str]] = []
        self.hired = 0
        self.released: set[int] = set()

    def count_workers(self):
        return self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]

    def start_worker(self):
        self.hired += 1
        return self.hired, (self.hired, "ready")

    def submit(self, actor, task, following):
        assert following is None or following.chunk != task.chunk
        self.calls.append((actor, task.name))
        self.last += [task.name] if task.is_last_attempt else []
        return actor, task.name

    def wait(self, calls):
        return calls[:1]

    def result(self, call):
        _, what = call
        if what == "ready" and self.failing_starts:
            self.failing_starts -= 1
            raise WorkerLost("no memory")
        if self.deadly.get(what):
            self.deadly[what] -= 1
            raise WorkerLost("killed")
        if self.full.get(what):
            self.full[what] -= 1
            raise OutOfMemory("full")
        return {f"rows/{what}.parquet": what.encode()}

    def release_memory(self, actor):
        self.released.add(actor)


@pytest.fixture
def dispatch_all(tmp_path, monkeypatch):
    """Run all tasks on a cluster and return the names of those that were finished; pauses take no time."""
    monkeypatch.setattr(dispatch.time, "sleep", lambda seconds: None)

    def run(cluster: SimulatedCluster) -> list[str]:
        done, folder = [], RunFolder(tmp_path / str(len(list(tmp_path.iterdir()))))
        Dispatcher(cluster, folder, done.append).run(TASKS)
        assert all((folder / task.file).read_text() == task.name for task in done)
        assert not list((folder / "locks").iterdir())
        return [task.name for task in done]

    return run


def test_actors_stay_with_the_images_that_they_have_read(dispatch_all):
    cluster = SimulatedCluster()
    assert sorted(dispatch_all(cluster)) == sorted(task.name for task in TASKS)
    for actor in (1, 2):
        chunks = [name.partition("-")[0] for who, name in cluster.calls if who == actor]
        assert chunks == sorted(chunks, key=chunks.index)  # one after the other, none twice


def test_what_a_lost_actor_had_begun_is_done_by_another(dispatch_all):
    cluster = SimulatedCluster(deadly={"2-0": 2, "0-1": 1}, failing_starts=1)
    done = dispatch_all(cluster)
    assert sorted(done) == sorted(task.name for task in TASKS)  # each once
    assert cluster.hired == 2 + 1 + 3


def test_a_task_that_kills_every_actor_ends_the_run(dispatch_all):
    with pytest.raises(RuntimeError, match=r"workers die at 1-0, 3 times \(killed\); if memory is too small"):
        dispatch_all(SimulatedCluster(deadly={"1-0": 9}))
    with pytest.raises(RuntimeError, match="no worker could start, 3 times"):
        dispatch_all(SimulatedCluster(failing_starts=9))


def test_a_task_that_finds_no_memory_is_tried_later_and_for_the_last_time(dispatch_all):
    cluster = SimulatedCluster(full={"1-0": 2, "2-1": 5})
    assert sorted(dispatch_all(cluster)) == sorted(task.name for task in TASKS)
    names = [name for _, name in cluster.calls]
    assert names.index("1-1") < len(names) - 1 - names[::-1].index("1-0")  # its neighbour went before
    assert (names.count("1-0"), names.count("2-1"), cluster.last) == (3, 6, ["2-1"])
    assert cluster.hired == 2  # no actor is lost by it
    assert cluster.released  # while tasks wait for memory
    with pytest.raises(OutOfMemory):
        dispatch_all(SimulatedCluster(full={"1-0": 9}))


def test_a_worker_without_memory_leaves_the_tasks_to_the_others(dispatch_all):
    """Else it would fail at one task after the other while the others compute."""
    cluster = SimulatedCluster()
    result = cluster.result

    def fail_at_first_worker(call):
        if call[0] == 1 and call[1] != "ready":
            raise OutOfMemory("full")
        return result(call)

    cluster.result = fail_at_first_worker
    assert sorted(dispatch_all(cluster)) == sorted(task.name for task in TASKS)
    assert [who for who, _ in cluster.calls].count(1) <= 2


def test_a_node_that_joins_later_helps(dispatch_all):
    cluster = SimulatedCluster(sizes=[1, 1, 1, 3])
    dispatch_all(cluster)
    assert {who for who, _ in cluster.calls} == {1, 2, 3}


# The driver of a run on Ray; its actors are slow enough for it to be killed between two tasks.
DRIVER = """
import sys
from evaluation_fixtures import load, build_plan
from dave_vit.evaluate import evaluate
from dave_vit.evaluate.engines.ray import RayEngine

plan = build_plan(sys.argv[1], methods=["effective", "input_x_gradient"], metrics=["energypg"])
evaluate(plan, sys.argv[2], engine=RayEngine(device="cpu", workers=1), loader=load, threads=1)
"""


@pytest.mark.slow
def test_a_ray_driver_that_is_killed_loses_nothing_that_was_written(squares, tmp_path):
    pytest.importorskip("ray")
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    home = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": path}
    run = tmp_path / "run"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, squares, run], env=home)
    while not read_write_times(run) and driver.poll() is None:
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    finished = read_write_times(run)
    assert finished
    plan = build_plan(squares, methods=["effective", "input_x_gradient"], metrics=["energypg"])
    evaluate(plan, run, loader=load, threads=1)  # any engine goes on
    assert finished.items() <= read_write_times(run).items()
    evaluate(plan, tmp_path / "quiet", loader=load, threads=1)
    assert read_rows(run) == read_rows(tmp_path / "quiet")
