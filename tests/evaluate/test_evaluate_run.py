"""Whole runs on a tiny world: rows, resuming, grids, what is left out, summary and report."""

from __future__ import annotations

import copy
import gc
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dave_vit.data import Item, open_dataset
from dave_vit.data.batches import Batch, load_batch
from dave_vit.data.grids import GridOptions
from dave_vit.engine.rule_sets import PLAIN
from dave_vit.errors import DataError, DaveError, OptionError
from dave_vit.evaluate import evaluate
from dave_vit.evaluate.job import EvalJob, software_versions
from dave_vit.evaluate.report import build_model_report, render_report
from dave_vit.evaluate.scoring import MapMaker
from dave_vit.evaluate.statistics.rows import Row, ScannedImage
from dave_vit.evaluate.statistics.scores import ModelScores
from dave_vit.evaluate.tasks import TaskBuilder, build_grids, relax_confidence
from dave_vit.evaluate.worker import Worker
from dave_vit.maps import collapse
from dave_vit.methods import METHODS, Explanation, Method, create_method
from dave_vit.methods.options import declared_options
from dave_vit.metrics import METRICS, Case, create_metric, energypg
from evaluation_fixtures import COLOURS, build_plan, load, paint, preprocess, read_rows

ROW = "model method metric image unit pictures target value dropped seed options versions device passes map_seconds"
ROW += " seconds curve at"


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> Path:
    return paint(tmp_path_factory.mktemp("squares") / "data")


@pytest.fixture(scope="module")
def done(squares, tmp_path_factory):
    """A finished run: its folder and its summary."""
    run = tmp_path_factory.mktemp("done") / "run"
    return run, evaluate(build_plan(squares), run, loader=load)


@pytest.fixture
def computed(monkeypatch) -> list[str]:
    """Names of the tasks that workers of this process compute."""
    names: list[str] = []
    compute = Worker.compute
    monkeypatch.setattr(Worker, "compute", lambda self, task, *rest: names.append(task.name) or compute(self, task))
    return names


def test_rows_have_every_column_and_every_image(done):
    from pyarrow import parquet

    run, _ = done
    for path in (run / "rows").glob("*.parquet"):
        assert parquet.ParquetFile(path).schema_arrow.names == ROW.split()
    rows = read_rows(run)
    counts = Counter((row["method"], row["metric"]) for row in rows)
    images = 4 * len(COLOURS)
    assert counts[("dave", "energypg")] == counts[("input_x_gradient", "deletion")] == images
    assert counts[("dave", "gridpg")] == counts[("input_x_gradient", "gridpg")] > 0
    assert {row["device"].split()[0] for row in rows} == {"cpu"}
    assert all("dave-vit" in row["versions"] and "torch" in row["versions"] for row in rows)
    assert all((row["value"] is None) == (row["dropped"] is not None) for row in rows)
    assert len({row["options"] for row in rows}) == 6  # of each method and metric


def test_values_are_those_of_the_functions(done, squares):
    run, _ = done
    data = open_dataset(f"folder:{squares}")
    model = load(build_plan(squares).models[0], "cpu")
    (row,) = [r for r in read_rows(run) if (r["method"], r["metric"], r["image"]) == ("dave", "energypg", "blue/2.png")]
    index = [item.name for item in data].index("blue/2.png")
    from dave_vit.data.geometry import GeometryCache

    batch = load_batch(data, [index], GeometryCache(model.preprocess))
    maps = collapse(create_method("dave", model, samples=3, seed=0).attribute(batch.inputs, [0]))
    assert row["target"] == 0  # blue is the first of the alphabet
    assert row["value"] == pytest.approx(energypg(maps, batch.regions).item(), rel=1e-4)


def test_grids_are_kept_and_the_same_for_every_method(done):
    run, _ = done
    (path,) = (run / "grids").glob("*.json")
    grids = json.loads(path.read_text())
    assert grids["options"]["confidence"] == 0.95
    by_method = {}
    for row in read_rows(run):
        if row["metric"] == "gridpg":
            by_method.setdefault(row["method"], []).append((row["image"], row["target"], row["unit"]))
    assert by_method["dave"] == by_method["input_x_gradient"]
    cells = {name: target for name, target, _ in by_method["dave"]}
    for number, grid in enumerate(grids["grids"]):
        assert [cells[f"grid-{number:05d}/{k}"] for k in range(4)] == grid["labels"]
        assert len(set(grid["labels"])) == 4
    shown = {row["unit"]: row["pictures"] for row in read_rows(run) if row["metric"] == "gridpg"}
    assert [shown[f"grid-{number:05d}"] for number in range(len(grids["grids"]))] == [
        g["names"] for g in grids["grids"]
    ]
    for one in done[1]["results"]:
        assert one["images"] == 20
        assert one["n"] == (4 * len(grids["grids"]) if one["metric"] == "gridpg" else 20)


def test_the_summary_keeps_its_contract(done):
    run, summary = done
    assert json.loads((run / "summary.json").read_text()) == summary
    keys = {"method", "metric", "mean", "low", "high", "n", "dropped"}
    assert all(keys <= one.keys() for one in summary["results"])
    for one in summary["results"]:
        values = [row["value"] for row in read_rows(run) if all(row[k] == one[k] for k in ("method", "metric"))]
        assert one["mean"] == pytest.approx(np.mean(values))
        assert one["low"] <= one["mean"] <= one["high"]
        assert one["n"] == len(values)
    pair = next(one for one in summary["differences"] if one["metric"] == "energypg")
    means = {one["method"]: one["mean"] for one in summary["results"] if one["metric"] == "energypg"}
    assert pair["mean"] == pytest.approx(means[pair["first"]] - means[pair["second"]])


def test_a_finished_run_computes_nothing_again(done, squares, computed):
    run, summary = done
    before = {path: path.stat().st_mtime_ns for path in (run / "rows").iterdir()}
    assert evaluate(build_plan(squares), run, loader=load) == summary
    assert computed == []
    assert {path: path.stat().st_mtime_ns for path in (run / "rows").iterdir()} == before


def test_what_is_missing_is_computed_and_nothing_else(done, squares, computed, tmp_path):
    run = tmp_path / "copy"
    shutil.copytree(done[0], run)
    lost = sorted((run / "rows").iterdir())[::3]
    for path in lost:
        path.unlink()
    (run / "rows" / ".x.parquet.0000.part").write_bytes(b"half a file")
    (run / "summary.json").unlink()
    assert evaluate(build_plan(squares), run, loader=load)["results"][0]["mean"] == done[1]["results"][0]["mean"]
    assert sorted(computed) == sorted(path.stem for path in lost)
    assert read_rows(run) == read_rows(done[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": ["input_x_gradient"]}, 'methods was ["input_x_gradient", "dave"], now ["input_x_gradient"]'),
        ({"seeds": [1]}, "seeds 1 was 0, now 1"),
        ({"smoothing": "mean"}, "smoothing.kind"),
        ({"limit": 3}, "(limit was not set, now 3)"),
        (
            {"metrics": [{"metric": "gridpg", "options": {"cells": 3}}, "energypg", "deletion"]},
            "metrics 1.options.cells",
        ),
    ],
)
def test_another_plan_in_the_same_folder_is_refused(done, squares, change, words):
    with pytest.raises(OptionError, match="holds a run of another plan") as caught:
        evaluate(build_plan(squares, **change), done[0], loader=load)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def half(done, tmp_path) -> Path:
    """A copy of the run without a shard and the summary."""
    run = shutil.copytree(done[0], tmp_path / "half")
    sorted((run / "rows").iterdir())[0].unlink()
    (run / "summary.json").unlink()
    return run


def test_a_run_goes_on_with_its_own_versions_only(half, squares, monkeypatch):
    before = dict(software_versions())
    monkeypatch.setattr("dave_vit.evaluate.run.software_versions", lambda: {**before, "torch": "9.9", "code": "0"})
    monkeypatch.setattr("dave_vit.evaluate.worker.software_versions", lambda: {**before, "torch": "9.9", "code": "0"})
    with pytest.raises(OptionError, match="computed with other versions") as caught:
        evaluate(build_plan(squares), half, loader=load)
    assert f'torch was "{before["torch"]}", now "9.9"' in str(caught.value)
    assert "\n" not in str(caught.value)
    summary = evaluate(build_plan(squares), half, loader=load, allow_mixed=True)
    (note,) = summary["notes"]
    assert note.startswith("computed with mixed versions: code was")
    assert note in (half / "report.md").read_text()
    assert len(summary["versions"]) == 2
    evaluate(build_plan(squares), half, loader=load)  # both are known now


def test_a_run_goes_on_with_its_own_weights_only(half, squares):
    def load_retrained(entry, device):
        model = copy.deepcopy(load(entry, device))
        model.head.bias.data[0] += 1e-3
        return model

    with pytest.raises(OptionError, match="a worker loads other weights of square:"):
        evaluate(build_plan(squares), half, loader=load_retrained)
    (note,) = evaluate(build_plan(squares), half, loader=load_retrained, allow_mixed=True)["notes"]
    assert "square:" in note


def test_the_same_data_at_another_place_resumes(done, squares, tmp_path, computed):
    shutil.copytree(squares, tmp_path / "moved")
    plan = build_plan(squares, data=f"folder:{tmp_path / 'moved'}")
    evaluate(plan, done[0], loader=load)
    assert computed == []


def test_images_that_cannot_be_used_are_counted_and_listed(tmp_path):
    data = paint(tmp_path / "data")
    load(build_plan(data).models[0], "cpu")  # the model learns from whole images
    (data / "red" / "1.png").write_bytes((data / "red" / "1.png").read_bytes()[:300])
    (data / "boxes.csv").write_text("image,left,top,right,bottom\nblue/0.png,5,5,20,20\nblue/1.png,0,0,1,40\n")
    summary = evaluate(build_plan(data, metrics=["energypg", "pointing"]), tmp_path / "run", loader=load)
    assert [one["image"] for one in summary["skipped"]] == ["red/1.png"]
    assert "red/1.png" in (tmp_path / "run" / "report.html").read_text()
    for one in summary["results"]:
        assert one["n"] == 1
        assert one["reasons"] == {"no box or mask in the crop": 18, "cannot be read": 1}  # blue/1: cut off by the crop
        assert one["dropped"] == 19


def test_a_method_that_cannot_explain_the_model_is_a_reason_and_not_the_end(squares, tmp_path):
    plan = build_plan(squares, methods=["bcos", "effective"], metrics=["energypg"], limit=4)
    summary = evaluate(plan, tmp_path / "run", loader=load)
    bad, good = summary["results"]
    assert (bad["mean"], bad["n"], bad["dropped"]) == (None, 0, 4)
    assert "B-cos" in next(iter(bad["reasons"]))
    assert good["n"] == 4


def test_only_recognised_images_where_that_is_wanted(squares, tmp_path):
    def unsure(entry, device):
        model = copy.deepcopy(load(entry, device))
        weight = model.head.weight.data  # fitted such that all images are as sure as each other
        weight.mul_(0.05).add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
        return model

    model = unsure(build_plan(squares).models[0], "cpu")
    images = [preprocess(Image.open(path).convert("RGB")) for path in sorted(squares.glob("*/*.png"))]
    with torch.no_grad():
        probability, predicted = model(torch.cat(images)).softmax(1).max(1)
    right = probability[predicted == torch.arange(20) // 4].sort().values
    least = float(right[len(right) // 2 - 1] + right[len(right) // 2]) / 2
    sure = int((right > least).sum())
    assert 0 < sure < 20
    plan = build_plan(squares, metrics=["energypg"], methods=["effective"], min_confidence=least)
    (one,) = evaluate(plan, tmp_path / "run", loader=unsure)["results"]
    assert (one["n"], one["dropped"]) == (sure, 20 - sure)
    assert set(one["reasons"]) == {f"not classified correctly with more than {least:g}"}


def test_no_grids_is_said(squares, tmp_path):
    plan = build_plan(squares, metrics=["gridpg", "energypg"], methods=["effective"], limit=6)
    summary = evaluate(plan, tmp_path / "run", loader=load)
    assert re.search(r"no grids: images of \d classes .* a grid needs 4", summary["notes"][0])
    assert summary["results"][0]["n"] == 0


def test_a_model_that_is_never_sure_gets_grids_of_what_it_is_surest_of():
    def scanned(*confidences):
        return [ScannedImage(i, str(i), str(i), i % 8, i % 8, p, None) for i, p in enumerate(confidences)]

    usual = GridOptions()
    assert relax_confidence(scanned(*[0.99] * 16), usual).confidence == 0.95
    assert relax_confidence(scanned(*[0.99] * 15, 0.92), usual).confidence == 0.9
    assert relax_confidence(scanned(*[0.85] * 40), usual).confidence == 0.8
    assert relax_confidence(scanned(*[0.3] * 5), usual).confidence == 0.0
    unsure = scanned(*[0.96] * 25, *[0.85] * 60, *[0.6] * 80, *[0.3] * 99)  # such as DeiT-Tiny
    assert relax_confidence(unsure, usual).confidence == 0.5
    assert len(build_grids(unsure, relax_confidence(unsure, usual))) >= 100
    assert relax_confidence(unsure, replace(usual, grids=6)).confidence == 0.95
    strict = create_metric("gridpg", confidence=0.95)
    assert strict.fixed
    assert not create_metric("gridpg").fixed


def test_a_grid_metric_of_the_how_to_is_scored_on_the_grids_of_gridpg(squares, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "howto" / "own-metric.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    monkeypatch.setattr(METRICS, "data", dict(METRICS.data))
    for block in (blocks[0], *(block for block in blocks if "GridMetric" in block)):
        exec(block, names)
    metrics = [{"metric": name, "options": {"grids": 3}} for name in ("gridpg", "lead")]
    plan = build_plan(squares, metrics=metrics, methods=["effective"], save_maps=True)
    gridpg, lead = evaluate(plan, tmp_path / "run", loader=load)["results"]
    assert gridpg["n"] == lead["n"] == 3 * 4
    maps = {}
    for path in (tmp_path / "run" / "maps").glob("*.npz"):
        with np.load(path) as arrays:
            maps |= dict(zip(arrays["names"], arrays["maps"].clip(0).astype(float), strict=True))
    for row in read_rows(tmp_path / "run"):
        heat, cell = maps[row["image"]], int(row["image"][-1])
        quarters = [heat[i : i + 16, j : j + 16].sum() / heat.sum() for i in (0, 16) for j in (0, 16)]
        others = [share for place, share in enumerate(quarters) if place != cell]
        expected = quarters[cell] - (max(others) if row["metric"] == "lead" else 0)
        assert row["value"] == pytest.approx(expected, abs=2e-3)


def test_metrics_of_different_grids_need_runs_of_their_own(squares):
    other = {"metric": "gridpg", "label": "surer", "options": {"confidence": 0.95}}
    with pytest.raises(OptionError, match="different grids"):
        build_plan(squares, metrics=["gridpg", other])


def test_seeds_are_averaged_per_image_and_run_only_where_they_matter(squares, tmp_path):
    plan = build_plan(squares, metrics=["energypg"], seeds=[0, 1], limit=4)
    summary = evaluate(plan, tmp_path / "run", loader=load)
    rows = read_rows(tmp_path / "run")
    assert Counter((row["method"], row["seed"]) for row in rows) == {
        ("input_x_gradient", 0): 4,
        ("dave", 0): 4,
        ("dave", 1): 4,
    }
    assert [one["n"] for one in summary["results"]] == [4, 4]


def test_several_models_are_apart_from_each_other(squares, tmp_path):
    models = [{"spec": f"square:{squares}", "label": label} for label in ("one", "two")]
    summary = evaluate(
        build_plan(squares, models=models, methods=["effective"], limit=17), tmp_path / "run", loader=load
    )
    by_model = {label: [r for r in read_rows(tmp_path / "run") if r["model"] == label] for label in ("one", "two")}
    assert [{**row, "model": ""} for row in by_model["one"]] == [{**row, "model": ""} for row in by_model["two"]]
    assert sorted(path.name for path in (tmp_path / "run" / "grids").iterdir()) == ["one.json", "two.json"]
    assert [one["model"] for one in summary["results"]] == ["one"] * 3 + ["two"] * 3


def test_maps_can_be_kept(squares, tmp_path):
    plan = build_plan(squares, metrics=["energypg"], methods=["effective"], limit=6, save_maps=True)
    evaluate(plan, tmp_path / "run", loader=load)
    data = open_dataset(f"folder:{squares}", 6)
    model = load(plan.models[0], "cpu")
    maps = {}
    for path in (tmp_path / "run" / "maps").glob("*.npz"):
        with np.load(path) as arrays:
            assert arrays["maps"].dtype == np.float16
            maps |= dict(zip(arrays["names"], arrays["maps"] * arrays["scale"][:, None, None], strict=True))
    assert sorted(maps) == sorted(item.name for item in data)
    inputs = model.preprocess(data.image(3))
    expected = collapse(create_method("effective", model).attribute(inputs, [0]))[0].numpy()
    assert np.abs(maps[data[3].name] - expected).max() < 1e-3 * np.abs(expected).max()


def test_sanity_is_tried_on_some_images_only(squares, tmp_path):
    metrics = [{"metric": "sanity", "options": {"images": 7, "stages": 2}}, "consistency"]
    plan = build_plan(squares, metrics=metrics, methods=["effective"])
    sanity, consistency = evaluate(plan, tmp_path / "run", loader=load)["results"]
    assert (sanity["n"], sanity["dropped"], consistency["n"]) == (7, 0, 20)


class _Blank(Method):
    """Maps of nothing for some images, maps that are not finite for others, and an error on a batch of its choice."""

    info = METHODS["effective"].info

    def _explain(self, images, target, pass_size):
        passed = self._gradient(images, target, PLAIN)
        if _Blank.refused is not None and torch.equal(images[:1], _Blank.refused):
            raise DaveError("not this batch")
        values = -passed.weight.abs() if images.mean() < 0 else passed.weight * torch.nan
        return Explanation(values, target.resolve(passed.logits).indices)


def test_a_map_that_shows_nothing_counts_against_its_method(squares, tmp_path, monkeypatch):
    monkeypatch.setattr(METHODS, "data", {**METHODS.data, "blank": _Blank})
    monkeypatch.setattr(_Blank, "refused", None, raising=False)
    plan = build_plan(squares, methods=["blank", "effective"], metrics=["gridpg", "energypg", "pointing", "deletion"])
    summary = evaluate(plan, tmp_path / "run", loader=load)
    results = {(one["method"], one["metric"]): one for one in summary["results"]}
    for metric, n in (("gridpg", 80), ("energypg", 20), ("pointing", 20)):
        one = results["blank", metric]
        assert (one["mean"], one["n"], one["empty"], one["dropped"]) == (0.0, n, n, 0)
        assert results["effective", metric]["empty"] == 0
    assert "n = 20, 20 x shows nothing" in (tmp_path / "run" / "report.md").read_text()


def test_limited_metrics_score_the_same_images_after_a_failed_batch(squares, tmp_path, monkeypatch):
    monkeypatch.setattr(METHODS, "data", {**METHODS.data, "blank": _Blank})
    monkeypatch.setattr(_Blank, "refused", preprocess(open_dataset(f"folder:{squares}").image(0)), raising=False)
    metrics = [{"metric": "sanity", "options": {"images": 5, "stages": 1}}]
    evaluate(build_plan(squares, methods=["blank", "effective"], metrics=metrics), tmp_path / "run", loader=load)
    images = {}
    for row in read_rows(tmp_path / "run"):
        images.setdefault(row["method"], []).append((row["image"], row["dropped"]))
    assert [name for name, _ in images["blank"]] == [name for name, _ in images["effective"]]
    assert [reason for _, reason in images["blank"]][:3] == ["not this batch"] * 3
    assert len(images["blank"]) == 5


def test_an_entry_s_own_seed_is_the_one_that_is_recorded(squares, tmp_path):
    own = {"method": "smoothgrad", "options": {"samples": 2, "seed": 7}}
    evaluate(
        build_plan(squares, methods=[own], metrics=["energypg"], seeds=[0, 1], limit=3), tmp_path / "run", loader=load
    )
    assert [row["seed"] for row in read_rows(tmp_path / "run")] == [7, 7, 7]


def test_passes_are_counted_and_a_budget_sets_them(squares, tmp_path):
    methods = ["input_x_gradient", "smoothgrad", {"method": "dave", "options": {"preset": "paper"}}, "occlusion"]
    plan = build_plan(squares, methods=methods, metrics=["gridpg", "energypg"], limit=14, budget=6)
    summary = evaluate(plan, tmp_path / "run", loader=load)
    *passes, fixed = [one["passes"] for one in summary["results"] if one["metric"] == "energypg"]
    assert passes == [1, 6, 6]
    (note,) = (note for note in summary["notes"] if "budget" in note)
    assert f"of 6 passes per map: occlusion {fixed:.4g}; " in note
    assert {row["passes"] for row in read_rows(tmp_path / "run") if row["method"] == "dave"} == {6}
    assert "passes per map" in (tmp_path / "run" / "report.md").read_text()
    assert "passes per map" in (tmp_path / "run" / "report.html").read_text()


def test_a_batch_that_does_not_fit_is_halved_for_its_scores_too(squares, tmp_path):
    class Small(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.preprocess, self.class_names = model, model.preprocess, model.class_names

        def forward(self, x):
            if len(x) > 2 and not torch.is_grad_enabled() and not x.is_inference():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.model(x)

    quiet, small = (
        evaluate(
            build_plan(
                squares, methods=["effective"], metrics=["deletion"], limit=5, batch=5 if name == "small" else 1
            ),
            tmp_path / name,
            loader=(lambda entry, device: Small(load(entry, device))) if name == "small" else load,
        )["results"][0]
        for name in ("quiet", "small")
    )
    assert small["n"] == quiet["n"] == 5
    assert small["mean"] == pytest.approx(quiet["mean"], rel=1e-5)


def test_the_smoothing_is_that_of_the_run(squares, tmp_path):
    plain, smooth = (
        evaluate(build_plan(squares, smoothing=kind, metrics=["energypg"], limit=4), tmp_path / kind, loader=load)
        for kind in ("none", "mean")
    )
    assert all(a["mean"] != b["mean"] for a, b in zip(plain["results"], smooth["results"], strict=True))


def test_matched_columns_come_from_the_same_maps(squares, tmp_path):
    sanity = {"metric": "sanity", "options": {"images": 2, "stages": 1}}
    settings = {"methods": ["effective", "gradcam"], "limit": 16}
    settings["metrics"] = [{"metric": "gridpg", "options": {"grids": 2}}, "energypg", sanity]
    plan = build_plan(squares, **settings, matched=True)
    both = evaluate(plan, tmp_path / "both", loader=load)
    labels = ["gridpg", "gridpg/patch", "energypg", "energypg/patch", "sanity", "sanity/patch"]
    assert [one["metric"] for one in both["results"]] == [label for label in labels for _ in range(2)]
    alone = evaluate(build_plan(squares, **settings, smoothing="patch"), tmp_path / "alone", loader=load)
    means = {(one["method"], one["metric"]): one["mean"] for one in both["results"]}
    for one in alone["results"]:
        assert means[one["method"], f"{one['metric']}/patch"] == pytest.approx(one["mean"], rel=1e-6)
        assert means[one["method"], one["metric"]] != pytest.approx(one["mean"], rel=1e-6)
    assert replace(plan, batch=2).metrics == plan.metrics


def test_matched_columns_ask_for_other_maps_once(squares, tmp_path, monkeypatch):
    calls, raw = [], MapMaker.raw
    monkeypatch.setattr(MapMaker, "raw", lambda self, *case: calls.append(len(case[1])) or raw(self, *case))
    sanity = {"metric": "sanity", "options": {"images": 2, "stages": 2}}
    settings = {"methods": ["gradcam"], "metrics": [sanity, "consistency"], "limit": 2}
    both = evaluate(build_plan(squares, **settings, matched=True), tmp_path / "both", loader=load)["results"]
    assert calls == [2] * 5  # the maps, two of random weights, one of moved images; those of the report
    alone = [
        evaluate(build_plan(squares, **settings, smoothing=kind), tmp_path / kind, loader=load)["results"]
        for kind in ("none", "patch")
    ]
    means = {one["metric"]: one["mean"] for one in both}
    for one, coarse in zip(*alone, strict=True):
        expected = pytest.approx([one["mean"], coarse["mean"]], rel=1e-6)
        assert [means[one["metric"]], means[f"{one['metric']}/patch"]] == expected


def test_the_report_is_one_file_with_everything(done):
    run, summary = done
    page = (run / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)[^"#]', page)  # nothing is fetched
    assert page.count("<svg") == 1  # the curves of deletion
    assert page.count("data:image/jpeg;base64,") == 2 * 2 * 3  # image and map; two methods; best, median, worst
    for word in ("best:", "median:", "worst:", "Paired differences", "input_x_gradient", "energypg"):
        assert word in page
    text = (run / "report.md").read_text()
    value = next(one for one in summary["results"] if (one["method"], one["metric"]) == ("dave", "energypg"))
    assert f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]" in text
    assert "passes per map (energypg)" in text  # a grid's map has another cost
    assert "seconds per map (energypg)" in text


def test_many_comparisons_are_noted_in_the_report(done, squares):
    plan, summary = build_plan(squares), done[1]
    (model,) = {one["model"] for one in summary["differences"]}
    many = {**summary, "differences": 20 * summary["differences"]}
    for content, is_noted in ((summary, False), (many, True)):
        report = build_model_report(plan, content, model, ModelScores(), [])
        page = render_report(plan, content, [report])["report.html"].decode()
        assert ("comparisons at 95 % each: if nothing differed, about 3 would exclude zero." in page) is is_noted


def test_the_report_tells_samples_and_weights(squares, done):
    run, summary = done
    text = (run / "report.md").read_text()
    (model,) = build_plan(squares).models
    assert f"- weights: {model.label}: its own, content {summary['weights'][model.label]}\n" in text
    assert "- samples: dave 3\n" in text  # and none of the other method
    assert "- command:" not in text  # it was called from Python


def test_samples_that_maps_take_as_they_need_are_told_at_most(squares, done):
    methods = [{"method": "dave", "options": {"samples": "auto", "limit": 9}}, "smoothgrad"]
    text = render_report(build_plan(squares, methods=methods), done[1], [])["report.md"].decode()
    usual = declared_options("smoothgrad")["samples"].default
    assert f"- samples: dave at most 9, smoothgrad {usual}\n" in text


def test_the_report_tells_what_classes_are_set_against_and_how_images_are_prepared(squares, done):
    model = {"spec": "squares", "prepare": {"size": 32, "fit": "squash"}}
    plan = build_plan(squares, models=model, methods=["effective", {"method": "dave", "against": "sun"}])
    text = render_report(plan, done[1], [])["report.md"].decode()
    assert "- explained class: label; dave against sun\n- preprocessing: squares --size 32 --fit squash\n" in text


def test_names_in_the_report_are_escaped(squares, tmp_path):
    methods = [{"method": "effective", "label": "<script>x</script>"}]
    evaluate(build_plan(squares, methods=methods, limit=3, metrics=["energypg"]), tmp_path / "run", loader=load)
    assert "<script>" not in (tmp_path / "run" / "report.html").read_text()


def test_a_model_that_knows_none_of_the_classes_is_refused(tmp_path):
    data = paint(tmp_path / "data")
    plan = build_plan(data)
    load(plan.models[0], "cpu")
    for name in COLOURS:
        (data / name).rename(data / f"thing {name}")
    (data / "more").mkdir()
    (data / "boxes.csv").unlink()
    shutil.copy(data / "thing red" / "0.png", data / "more" / "0.png")  # six classes now: no place for place either
    with pytest.raises(DataError, match="none of the 6 classes of the data"):
        evaluate(plan, tmp_path / "run", loader=load)


def measure_memory() -> tuple[int, Counter]:
    """Bytes of all tensors of this process, and how many objects of a run there are."""
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(one.untyped_storage().nbytes() for one in objects if type(one) is torch.Tensor)
    return tensors, Counter(type(one).__name__ for one in objects if type(one) in (Row, Item, Batch, Case))


def test_memory_does_not_grow_with_the_images(tmp_path):
    """A worker holds one shard, however many it has computed."""
    data = paint(tmp_path / "data", each=8)
    plan = build_plan(data, metrics=["energypg", "deletion"], methods=["effective"], shard=4, batch=2, save_maps=True)
    tasks = TaskBuilder(plan, plan.document("x")).images(
        0, [ScannedImage(i, str(i), str(i), 0, 0, 1.0, None) for i in range(40)]
    )
    worker = Worker(EvalJob(plan, load), "cpu")
    before = measure_memory()  # of other tests of this process
    worker.compute(tasks[0])
    after_one = measure_memory()
    for task in tasks[1:]:
        worker.compute(task)
    assert measure_memory() == after_one
    assert after_one[1]["Batch"] - before[1]["Batch"] == 2


def test_metrics_of_the_plan_are_made_once_per_entry(squares, tmp_path):
    metrics = [
        {"metric": "deletion", "label": "grey", "options": {"steps": 2}},
        {"metric": "deletion", "label": "blurred", "options": {"steps": 2, "baseline": "blur"}},
    ]
    plan = build_plan(squares, metrics=metrics, methods=["effective"], limit=4)
    grey, blurred = evaluate(plan, tmp_path / "run", loader=load)["results"]
    assert (grey["metric"], blurred["metric"]) == ("grey", "blurred")
    assert grey["mean"] != blurred["mean"]
    assert create_metric("deletion").higher_is_better is grey["higher_is_better"]
    assert torch.get_num_threads() == 1  # as before the run
