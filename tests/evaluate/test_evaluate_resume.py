"""What a run may go on with: content decides, of pictures, presets and code; texts that no number depends on do not."""

from __future__ import annotations

import hashlib
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from dave_vit._internal import content_hash
from dave_vit.errors import OptionError
from dave_vit.evaluate import MethodEntry, MetricEntry, ModelEntry, Plan, evaluate, job
from dave_vit.metrics import METRICS, Metric, Scores
from evaluation_fixtures import build_plan, load, paint

METRIC = """
from dave_vit.metrics import METRICS, Metric, Scores

@METRICS.register("own")
class Own(Metric):
    summary = "The mean."

    def score(self, case):
        return Scores(case.maps.mean((1, 2)))
"""
MODEL = """
import torch

def build():
    return torch.nn.Linear(3, 2)
"""
PRESET = "base = 'paper'\nsamples = 3\n"


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, Path]:
    """A small run, and its pictures."""
    folder = tmp_path_factory.mktemp("resume")
    squares = paint(folder / "data")
    evaluate(plan_of(squares), folder / "run", loader=load, threads=1)
    return folder / "run", squares


def plan_of(squares: Path, model: Path | None = None) -> Plan:
    settings = {"methods": ["input_x_gradient"], "metrics": ["energypg"], "limit": 4}
    return build_plan(model or squares, data=f"folder:{squares}", **settings)


@pytest.fixture
def pictures(done, tmp_path) -> list[Path]:
    """A copy of the pictures."""
    return sorted(shutil.copytree(done[1], tmp_path / "data").rglob("*.png"))


@pytest.fixture
def resume(done, pictures, tmp_path, monkeypatch):
    """Go on with a copy of the run and of its pictures as a new process does, which has hashed no file yet."""
    run = shutil.copytree(done[0], tmp_path / "run")

    def go_on() -> Path:
        monkeypatch.setattr(content_hash, "_KNOWN", {})
        evaluate(plan_of(tmp_path / "data", done[1]), run, loader=load, threads=1)
        return run

    return go_on


def test_a_picture_with_other_bytes_of_the_same_size_is_other_data(resume, pictures):
    data = bytearray(pictures[0].read_bytes())
    data[-20] ^= 0xFF
    pictures[0].write_bytes(data)
    with pytest.raises(OptionError, match=r"holds a run of another plan \(data was content"):
        resume()


def test_a_picture_that_was_only_touched_is_the_same(resume, pictures):
    os.utime(pictures[0], (1, 1))
    resume()


def test_pictures_are_read_again_only_if_they_may_have_changed(resume, pictures, monkeypatch):
    reads, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: reads.append(Path(file.name)) or digest(file, kind))
    resume()
    used = set(reads) & set(pictures)
    assert len(used) == 4
    reads.clear()
    resume()
    assert not reads
    os.utime(min(used), (1, 1))
    resume()
    assert reads == [min(used)]


def test_damaged_hashes_are_computed_again(resume):
    run = resume()
    for text in ("{", "[1]", '{"a": 1}'):
        (run / "hashes.json").write_text(text)
        resume()


def document_with(folder: Path, **settings) -> dict:
    return Plan(**{"metrics": (MetricEntry("energypg"),), **settings}).document("data")


def rewrite(path: Path, text: str) -> None:
    """Write a text of any length in the same second, as an editor does."""
    path.write_text(text)


def test_what_a_preset_file_says_decides(tmp_path):
    path = tmp_path / "mine.toml"
    methods = (MethodEntry("dave", {"preset": str(path)}),)
    rewrite(path, PRESET)
    before = document_with(tmp_path, methods=methods)
    rewrite(path, f"# tuned on Monday\n{PRESET}")
    assert document_with(tmp_path, methods=methods) == before
    rewrite(path, PRESET.replace("3", "4"))
    assert document_with(tmp_path, methods=methods) != before
    rewrite(path, "base = ")
    assert document_with(tmp_path, methods=methods) != before
    assert document_with(tmp_path, methods=(MethodEntry("dave", {"preset": "paper"}),))["methods"][0]["options"] == {
        "preset": "paper"
    }


def test_the_code_of_a_model_decides(tmp_path):
    path = tmp_path / "mod.py"
    models = (ModelEntry(f"{path}:build"),)
    rewrite(path, MODEL)
    before = document_with(tmp_path, models=models)
    rewrite(path, MODEL.replace("def build():", "def build():\n    # two classes\n    'The model.'"))
    assert document_with(tmp_path, models=models) == before
    rewrite(path, MODEL.replace("Linear(3, 2)", "Linear(3, 4)"))
    assert document_with(tmp_path, models=models) != before


def test_the_files_of_a_folder_decide(tmp_path):
    models = (ModelEntry(f"hf:{tmp_path}"),)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = document_with(tmp_path, models=models)
    assert document_with(tmp_path, models=models) == before
    (tmp_path / "model.safetensors").write_bytes(b"others.")
    os.utime(tmp_path / "model.safetensors", (1, 1))
    assert document_with(tmp_path, models=models) != before


def test_the_code_of_a_plugin_decides_and_its_captions_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(METRICS, "data", {**METRICS.data})
    monkeypatch.setattr("dave_vit._internal.registry._PLUGINS", {})
    path = tmp_path / "own.py"
    rewrite(path, METRIC)
    plan = Plan.load({"plugins": str(path), "metrics": "own"})
    before = plan.document("data")
    assert before["metrics"][0]["code"]
    rewrite(path, METRIC.replace("The mean.", "The mean of the map, whatever that means."))
    assert plan.document("data") == before
    rewrite(path, METRIC.replace("mean((1, 2))", "amax((1, 2))"))
    after = plan.document("data")
    assert after["plugins"] != before["plugins"]
    assert after["metrics"] != before["metrics"]  # also if it was registered without a plugin
    with pytest.raises(OptionError, match=r"own.py has changed since it was imported"):
        Plan.load({"plugins": str(path), "metrics": "own"})


def test_a_metric_of_this_package_has_no_code_of_its_own(monkeypatch):
    monkeypatch.setattr(METRICS, "data", {**METRICS.data})

    @METRICS.register("here")
    class Here(Metric):
        def score(self, case) -> Scores:
            return Scores(case.maps.mean((1, 2)))

    own, usual = (MetricEntry(name).identity["code"] for name in ("here", "energypg"))
    assert own
    assert not usual


def test_code_without_a_file_is_known_by_its_name(monkeypatch):
    """As of a class that was typed into a shell, or of what is no class at all."""
    source = "class Typed:\n    def score(self, case): ...\n"
    typed: dict = {"__name__": "__main__"}
    exec(compile(source, "<stdin>", "exec"), typed)
    assert content_hash.hash_own_code(typed["Typed"]) == "__main__.Typed"
    assert content_hash.hash_own_code(partial(print, 1)) == content_hash.hash_own_code(partial(print, 1))


def test_code_that_no_row_depends_on_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "PACKAGE", tmp_path)
    files = (
        "engine/rules.py",
        "evaluate/worker.py",
        "evaluate/report.py",
        "viz/pages.py",
        "explanations/pages.py",
        "methods/methods.toml",
    )
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")

    def version() -> str:
        return job.software_versions.__wrapped__()["code"]

    first = version()
    for name in ("evaluate/report.py", "viz/pages.py", "explanations/pages.py"):
        (tmp_path / name).write_text("title = 'A better caption'\n")
    (tmp_path / "engine/rules.py").write_text('"""Rules."""\n\nx = 1  # one\n')
    assert version() == first
    for name in ("engine/rules.py", "evaluate/worker.py", "methods/methods.toml"):
        (tmp_path / name).write_text("x = 20\n")
        assert version() != first
        first = version()
