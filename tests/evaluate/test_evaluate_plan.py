"""Plans, keys of tasks, classes of data and model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from dave_vit.data.classes import map_classes
from dave_vit.errors import DataError, OptionError, UnknownName
from dave_vit.evaluate import Plan
from dave_vit.evaluate.statistics.rows import ScannedImage
from dave_vit.evaluate.tasks import TaskBuilder

YAML = """
data: imagenet:ILSVRC
models:
  - timm:deit_tiny_patch16_224
  - {spec: timm:vit_base_patch16_224, label: ViT-B}
methods:
  - input_x_gradient
  - {method: dave, label: dave-paper, options: {preset: paper, samples: 8}}
metrics: [gridpg, {metric: deletion, options: {protocol: official}}]
seeds: [0, 1]
smoothing: {kind: mean, size: 9}
"""
TOML = """
data = "imagenet:ILSVRC"
seeds = [0, 1]
models = ["timm:deit_tiny_patch16_224", {spec = "timm:vit_base_patch16_224", label = "ViT-B"}]
methods = ["input_x_gradient", {method = "dave", label = "dave-paper", options = {preset = "paper", samples = 8}}]
metrics = ["gridpg", {metric = "deletion", options = {protocol = "official"}}]
smoothing = {kind = "mean", size = 9}
"""


def test_yaml_and_toml_say_the_same(tmp_path):
    (tmp_path / "plan.yaml").write_text(YAML)
    (tmp_path / "plan.toml").write_text(TOML)
    one, other = (Plan.load(tmp_path / f"plan.{ending}") for ending in ("yaml", "toml"))
    assert one == other
    assert [entry.label for entry in one.models] == ["timm:deit_tiny_patch16_224", "ViT-B"]
    assert one.methods[1].options == {"preset": "paper", "samples": 8}
    assert one.metrics[1].create().perturbation(100, None).baseline == "blur"
    assert (one.smoothing.kind, one.smoothing.size) == ("mean", 9)


@pytest.mark.parametrize("smoothing", ['"patch"', '{kind = "patch"}'])
def test_a_metric_of_a_file_has_its_own_smoothing(tmp_path, smoothing):
    entry = f'{{metric = "gridpg", label = "gridpg/patch", smoothing = {smoothing}}}'
    (tmp_path / "plan.toml").write_text(f'metrics = ["gridpg", {entry}]')
    plan = Plan.load(tmp_path / "plan.toml")
    assert plan.metrics == Plan.load({"metrics": "gridpg", "matched": True}).metrics


MALFORMED = {
    "method: dave": "unknown setting 'method'; did you mean methods",
    "- dave": "expected settings such as",
    "methods: [": "cannot be read as a plan",
}


@pytest.mark.parametrize(("text", "words"), MALFORMED.items())
def test_a_malformed_plan_file_is_one_line(tmp_path, text, words):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(OptionError, match=words.replace("[", r"\[")) as caught:
        Plan.load(tmp_path / "plan.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"methods": []}, OptionError),
        ({"methods": ["dave", "dave"]}, OptionError),
        ({"methods": ["dav"]}, UnknownName),
        ({"methods": [{"method": "dave", "samples": 3}]}, OptionError),
        ({"methods": [{"label": "dave"}]}, OptionError),
        ({"metrics": ["energpg"]}, UnknownName),
        ({"metrics": [{"metric": "deletion", "options": {"protocol": "x"}}]}, OptionError),
        ({"metrics": ["gridpg", {"metric": "gridpg", "label": "nine", "options": {"cells": 3}}]}, OptionError),
        ({"smoothing": "median"}, OptionError),
        ({"smoothing": {"kind": "mean", "size": 4}}, OptionError),
        ({"metrics": [{"metric": "gridpg", "smoothing": "median"}]}, OptionError),
        ({"metrics": [{"metric": "gridpg", "smoothing": {"side": 3}}]}, OptionError),
        ({"metrics": [{"metric": "gridpg", "smoothing": 3}]}, OptionError),
        ({"target": "top5"}, OptionError),
        ({"min_confidence": 1.0}, OptionError),
        ({"batch": 0}, OptionError),
    ],
)
def test_impossible_plans_are_refused_before_anything_runs(settings, error):
    with pytest.raises(error):
        Plan.load(settings)


def test_the_document_follows_content(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"weights" if name != "c" else b"others")
    plans = [Plan.load({"models": {"spec": "timm:x", "weights": str(tmp_path / name)}}) for name in ("a", "b", "c")]
    one, same, other = (plan.document("data") for plan in plans)
    assert one == same
    assert one != other
    assert plans[0].document("other data") != one


def test_keys_follow_content():
    plan = Plan.load({"methods": ["dave", "effective"], "shard": 2})
    images = [ScannedImage(i, f"n{i}", f"n{i}", i, i, 0.9, None) for i in range(5)]

    def names(plan, digest="d"):
        return [task.name for task in TaskBuilder(plan, plan.document(digest)).images(0, images)]

    assert len(set(names(plan))) == 6  # three shards, two methods
    assert names(plan) == names(Plan.load({"methods": ["dave", "effective"], "shard": 2}))
    for changed in (replace(plan, smoothing=replace(plan.smoothing, kind="mean")), replace(plan, batch=7)):
        assert not set(names(plan)) & set(names(changed))
    assert not set(names(plan)) & set(names(plan, "other data"))
    fewer = names(Plan.load({"methods": ["effective"], "shard": 2}))
    assert set(fewer) < set(names(plan))  # a method's own shards do not depend on the other methods


def test_tasks_follow_the_target_of_the_plan():
    images = [ScannedImage(0, "a", "a", 3, 5, 0.9, None), ScannedImage(1, "b", "b", None, 6, 0.9, None)]
    for target, expected in (("label", (3, 6)), ("predicted", (5, 6))):
        plan = Plan.load({"target": target})
        (task,) = TaskBuilder(plan, plan.document("d")).images(0, images)
        assert task.targets == expected


def test_classes_go_by_name_or_by_place():
    model = ["tench, Tinca tinca", "goldfish", "crane", "crane, bird"]
    places = {0: 0, 1: 1, 2: 2, 3: 3}
    assert map_classes([], model) == places
    assert map_classes(model, model) == places
    assert map_classes(["Goldfish", "tinca_tinca", "whale"], model) == {0: 1, 1: 0}
    assert map_classes(["3", "crane"], model) == {0: 3, 1: 2}
    assert map_classes(["n0", "n1", "n2", "n3"], model) == places  # synsets beside names
    assert map_classes(["tench", "goldfish", "crane", "crane"], model) == places  # two classes of one name
    assert map_classes(["bird", "crane", "goldfish", "tench"], model) == {0: 3, 1: 2, 2: 1, 3: 0}
    with pytest.raises(DataError, match="none of the 2 classes"):
        map_classes(["whale", "car"], model)


def test_a_name_that_two_classes_share_is_nobodys():
    assert map_classes(["maillot", "goldfish"], ["maillot, tank suit", "maillot", "x, goldfish"]) == {0: 1, 1: 2}
    assert map_classes(["tank", "goldfish"], ["a, tank", "b, tank", "goldfish"]) == {1: 2}


@pytest.mark.realdata
def test_imagenet_goes_by_place_for_a_model_of_timm(data_dir):
    from dave_vit import load_model
    from dave_vit.data import open_dataset

    data = open_dataset(f"imagenet:{data_dir}/imagenet-val-300", 1)
    model = load_model("timm:test_vit", "random")
    assert map_classes(data.class_names, model.class_names) == {index: index for index in range(1000)}


def test_what_classes_are_set_against_is_part_of_a_plan():
    entries = [{"method": "gradcam"}, {"method": "gradcam", "label": "rivals", "against": "rivals"}]
    plan = Plan.load({"methods": entries, "metrics": "gridpg"})
    assert [method["against"] for method in plan.document("data")["methods"]] == [None, "rivals"]


def test_the_plan_of_the_tables_is_a_plan():
    plan = Plan.load(Path(__file__).parents[2] / "benchmarks" / "tables.toml")
    assert plan.methods[0].label == "dave"
    assert {entry.against for entry in plan.methods} == {None, "rivals"}


def test_a_model_of_a_plan_says_what_is_done_to_photographs():
    preprocessing = {"size": 64, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    plan = Plan.load({"models": {"spec": "builtin", "prepare": preprocessing}})
    assert plan.models[0].load("cpu").preprocess(Image.new("RGB", (80, 90))).shape == (1, 3, 64, 64)
    assert plan.models[0].identity["prepare"]["size"] == 64
    for wrong, words in (({"sise": 64}, "no option 'sise'; did you mean size"), ({"fit": "tiles"}, "no metric scores")):
        with pytest.raises(OptionError, match=words):
            Plan.load({"models": {"spec": "builtin", "prepare": wrong}})


@pytest.mark.parametrize("plugins", [{"file": "half.py"}, [3], [None]])
def test_plugins_are_files(plugins):
    with pytest.raises(OptionError, match="give the path of a Python file"):
        Plan.load({"plugins": plugins})
