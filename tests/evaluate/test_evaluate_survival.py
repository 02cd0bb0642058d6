"""What a run survives: kills of its parent, damaged files, a full disk, a first command with a typo."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dave_vit import cli
from dave_vit.cli.options import ModelOptions
from dave_vit.evaluate import dispatch, evaluate
from dave_vit.evaluate.engines.local import LocalEngine
from evaluation_fixtures import build_plan, load, paint, read_rows
from hostile_files import good_png
from tiny_adapters import adapter

# The parent of two slow workers, as the command line runs one.
SUPPORT = Path(__file__).parents[1] / "support"
TEAM = """
import sys
from unittest.mock import patch
from evaluation_fixtures import load_slow, build_plan
from dave_vit import cli
from dave_vit.evaluate import evaluate
from dave_vit.evaluate.engines.local import LocalEngine

def explain(*args, **options):
    evaluate(build_plan(sys.argv[1]), sys.argv[2], engine=LocalEngine(["cpu", "cpu"]), loader=load_slow)

if __name__ == "__main__":
    with patch.object(cli, "app", explain):
        sys.exit(cli.run(["evaluate"]))
"""


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> Path:
    return paint(tmp_path_factory.mktemp("squares") / "data")


@pytest.fixture(scope="module")
def done(squares, tmp_path_factory) -> Path:
    """A run that nothing disturbed."""
    run = tmp_path_factory.mktemp("quiet") / "run"
    evaluate(build_plan(squares), run, loader=load, threads=1)
    return run


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def listening() -> None:
    """Signals do what they usually do, also where the tests run in the background of a shell."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name
)
def test_workers_end_with_their_parent(number, tmp_path):
    folder = paint(tmp_path / "data")
    (tmp_path / "team.py").write_text(TEAM)
    home = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, tmp_path / "team.py", folder, tmp_path / "run"]
    parent = subprocess.Popen(command, env=home, stderr=subprocess.PIPE, text=True, preexec_fn=listening)
    workers = tmp_path / "workers"
    assert eventually(lambda: workers.is_dir() and len(list(workers.iterdir())) == 2, 120)
    pids = [int(path.name) for path in workers.iterdir()]
    assert all(map(alive, pids))
    parent.send_signal(number)
    error = parent.communicate(timeout=30)[1]
    assert eventually(lambda: not any(map(alive, pids)), 20)
    assert not list((tmp_path / "run").rglob("*.part")) or number == signal.SIGKILL
    if number != signal.SIGKILL:
        assert parent.returncode == 128 + number
        who = "" if number == signal.SIGINT else f" by {number.name}"
        assert error.strip() == f"stopped{who}; what was finished is kept"


NO_ROOM = "CUDA out of memory. Tried to allocate 2 MiB.\nProcess 1 has 2 GiB memory in use"


class Full(nn.Module):
    """A model on a device that others have filled: passes with gradients fail where ``fails`` says so."""

    def __init__(self, model: nn.Module, fails: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.model, self.preprocess, self.class_names = model, model.preprocess, model.class_names
        self.fails = fails

    def forward(self, x):
        if torch.is_grad_enabled() and self.fails(x):
            raise torch.OutOfMemoryError(NO_ROOM)
        return self.model(x)


def evaluate_short_of_memory(squares, run, monkeypatch, fails) -> dict:
    """The result of a run of four images, in two tasks."""
    pauses = []
    monkeypatch.setattr(dispatch.time, "sleep", pauses.append)
    plan = build_plan(squares, methods=["effective"], metrics=["energypg"], limit=4, shard=2, batch=2)
    summary = evaluate(plan, run, loader=lambda entry, device: Full(load(entry, device), fails), threads=1)
    assert set(pauses) <= {dispatch.MEMORY_PAUSE}
    return {**summary["results"][0], "pauses": len(pauses)}


def test_a_task_that_finds_no_memory_is_tried_again_later(squares, tmp_path, monkeypatch):
    passes = iter(range(99))
    crowded = evaluate_short_of_memory(squares, tmp_path / "crowded", monkeypatch, lambda x: next(passes) < 9)
    quiet = evaluate_short_of_memory(squares, tmp_path / "quiet", monkeypatch, lambda x: False)
    assert (crowded["n"], crowded["dropped"]) == (quiet["n"], quiet["dropped"]) == (4, 0)
    assert crowded["mean"] == pytest.approx(quiet["mean"], rel=1e-5)
    assert crowded["pauses"] >= 1
    assert quiet["pauses"] == 0


def test_an_image_for_which_memory_never_suffices_is_dropped_with_the_reason(squares, tmp_path, monkeypatch):
    first = []

    def fails(x):
        first[:] = first or [x[0].detach().clone()]
        return any(torch.equal(image, first[0]) for image in x)

    result = evaluate_short_of_memory(squares, tmp_path / "run", monkeypatch, fails)
    assert (result["n"], result["dropped"], result["pauses"]) == (3, 1, 5)
    assert [row["dropped"] for row in read_rows(tmp_path / "run")].count("out of memory on cpu") == 1


def test_a_model_that_does_not_fit_is_one_line(squares, tmp_path, monkeypatch, capsys):
    def load_none(entry, device):
        raise torch.OutOfMemoryError(NO_ROOM)

    def command(*args, **options):
        evaluate(build_plan(squares, limit=4), tmp_path / "run", loader=load_none, threads=1)

    monkeypatch.setattr(dispatch.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(cli, "app", command)
    assert cli.run(["evaluate"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "memory" in line


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip_bits(data: bytes) -> bytes:
    middle = len(data) // 3
    return data[:middle] + bytes(byte ^ 0xFF for byte in data[middle : middle + 8]) + data[middle + 8 :]


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("rows/*.parquet", truncate),
        ("rows/*.parquet", lambda data: b"{}"),
        ("scan/*.parquet", flip_bits),
        ("examples/*.npz", flip_bits),
        ("examples/*.npz", lambda data: b""),
        ("grids/*.json", truncate),
        ("grids/*.json", lambda data: b"{}"),
    ],
)
def test_a_damaged_file_is_named_set_aside_and_made_again(kind, spoil, done, squares, tmp_path):
    run = shutil.copytree(done, tmp_path / "run")
    path = sorted(run.glob(kind))[0]
    whole = path.read_bytes()
    path.write_bytes(spoil(whole))
    (run / "summary.json").unlink()
    summary = evaluate(build_plan(squares), run, loader=load, threads=1)
    assert [note for note in summary["notes"] if path.name in note and "damaged" in note]
    (aside,) = path.parent.glob("*.damaged-*")
    assert aside.read_bytes() == spoil(whole)
    assert read_rows(run) == read_rows(done)
    assert summary["results"] == json.loads((run / "summary.json").read_bytes())["results"]
    assert len(list(path.parent.glob(kind.partition("/")[2]))) == len(list((done / path.parent.name).iterdir()))


def test_a_full_disk_names_the_file(squares, tmp_path, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as failure:
        evaluate(build_plan(squares), tmp_path / "run", loader=load, threads=1)
    assert failure.value.filename == str(tmp_path / "run" / "plan.json")


@pytest.mark.slow
def test_a_full_disk_with_two_workers_is_one_line(squares, tmp_path, monkeypatch, capfd):
    fsync = os.fsync

    def fill(file):
        if multiprocessing.active_children():
            raise OSError(28, "No space left on device")
        fsync(file)

    def command(*args, **options):
        evaluate(build_plan(squares), tmp_path / "run", engine=LocalEngine(["cpu", "cpu"]), loader=load, threads=1)

    monkeypatch.setattr(os, "fsync", fill)
    monkeypatch.setattr(cli, "app", command)
    assert cli.run(["evaluate"]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {tmp_path / 'run' / 'scan'}")
    assert line.endswith("No space left on device")


@pytest.mark.parametrize(
    "typo",
    [
        "--model bultin",
        "--model timm:vit_tinny",
        "--weights none.safetensors",
        "--weights spoilt.safetensors",
        "--methods davee",
        "--set dave.rotation=fast",
        "--samples 0",
        "--metric energy",
        "--set gridpg.cells=1",
        "--data folder:none",
        "--limit 0",
        "--device bogus",
        "--classes none.txt",
    ],
)
def test_a_typo_leaves_nothing_behind(typo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file({}, "spoilt.safetensors")
    assert cli.run(["evaluate", "--limit", "2", *typo.split(), "--out", "run"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not Path("run").exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks memory up in /proc")
def test_memory_stays_what_it_was_over_many_explanations(tmp_path, monkeypatch):
    """Many commands in one process, as a notebook gives them; the first ones fill caches."""
    monkeypatch.setattr(ModelOptions, "load", lambda options: adapter())
    monkeypatch.chdir(tmp_path)
    Path("cat.png").write_bytes(good_png(64))

    def explain(times: int) -> tuple[int, int]:
        for _ in range(times):
            assert cli.run("explain cat.png -q --method dave --samples 2 --out maps".split()) == 0
        gc.collect()
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024, len(gc.get_objects())

    (before, objects), (after, more) = explain(10), explain(10)
    print(f"{before} MB after 10 explanations, {after} MB after 20; {more - objects} objects more")
    assert after - before < 30
    assert more - objects < 10 * 10  # a model that is kept has hundreds
