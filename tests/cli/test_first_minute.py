"""The first minute: the embedded model says what it knows, names are found, one's own files are taken."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dave_vit
from dave_vit import cli
from dave_vit._internal.registry import suggest_names
from dave_vit.data import open_dataset
from dave_vit.data.classes import parse_targets
from dave_vit.errors import ModelError, OptionError, TargetError, UnknownName
from dave_vit.evaluate import Plan
from dave_vit.evaluate.job import EvalJob
from dave_vit.evaluate.worker import Worker
from dave_vit.methods import METHODS
from dave_vit.models.adapter import is_out_of_domain, top_logit_margin

NAMES = ["cat", "tiger cat", "dog", "hen", "cock", "beer glass, glass"]
RANKING = [2, 0, 1, 3, 4, 5]
PHOTOS = Path(__file__).resolve().parents[2] / "docs" / "photos"


@pytest.fixture(scope="module")
def builtin():
    return dave_vit.load_model("builtin")


def test_a_crowd_of_logits_is_told_from_one_or_two_that_stand_out():
    one, two, crowd = torch.zeros(20), torch.zeros(20), torch.zeros(20)
    one[3], two[:2], crowd[:8] = 10, 10, 10
    assert top_logit_margin(torch.stack([one, two, crowd])).tolist() == [5, 10, 0]


def test_photographs_are_unlike_what_the_embedded_model_was_made_for(builtin):
    photos = [PHOTOS / name for name in ("chelsea.jpg", "coffee.jpg")]
    own = open_dataset("builtin:single:seen:12", limit=8)
    with torch.inference_mode():
        assert is_out_of_domain(builtin, builtin(builtin.preprocess(photos))).tolist() == [True, True]
        assert is_out_of_domain(builtin, builtin(builtin.preprocess([own.image(i) for i in range(8)]))).sum() == 0
    assert not is_out_of_domain(torch.nn.Identity(), torch.zeros(1, 9)).any()  # nothing is known of other models


def test_the_embedded_model_says_what_it_knows(tmp_path, capsys):
    words = ["explain", str(PHOTOS / "chelsea.jpg"), "--method", "effective", "--out", str(tmp_path)]
    assert cli.run(words) == 0
    said = capsys.readouterr().err
    assert "builtin knows 100 kinds of emoji only; for photographs: --model timm:deit_tiny_patch16_224" in said
    assert "unlike the images that builtin was trained on" in said
    assert "unlike the images" in json.dumps(
        json.loads((tmp_path / "chelsea.effective.dave.json").read_text())["notes"]
    )


def test_what_was_begun_is_finished_first():
    names = ["deit3_base_patch16_224", "deit_tiny_distilled_patch16_224", "deit_tiny_patch16_224", "tiny_vit_5m_224"]
    assert suggest_names("deit_tiny", names).startswith("; did you mean deit_tiny_patch16_224, deit_tiny_distilled")


def test_a_file_or_folder_that_exists_is_recognised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("best.pth").touch()
    Path("net.py").touch()
    for name, words in (("mine", "hf:mine"), ("best.pth", "--weights best.pth"), ("net.py", "net.py:FUNCTION")):
        with pytest.raises(UnknownName, match=words):
            dave_vit.load_model(name)


def test_several_targets_with_commas():
    assert parse_targets("hen, top1,2", RANKING, NAMES) == [3, 2]
    assert parse_targets("all-top5,beer glass", RANKING, NAMES) == RANKING
    assert parse_targets("beer glass, glass", RANKING, NAMES) == [5]
    with pytest.raises(TargetError, match="fits 2 classes: 1 tiger cat; 5 wild cat; give an index"):
        parse_targets("hen, cat", RANKING, ["lion", "tiger cat", "dog", "hen", "cock", "wild cat"])


MODULE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)  # the same weights each time
    return nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

def broken():
    raise ValueError("no file")

def number():
    return 3
"""

PLUGIN = """
from dave_vit.methods import METHODS, Explanation, Method, MethodInfo

@METHODS.register("half")
class Half(Method):
    info = MethodInfo("Half of the image.", "mine", "none")

    def _explain(self, images, target, pass_size):
        return Explanation(images.unsqueeze(1) / 2, self._resolve_target(images, target, pass_size).indices)
"""


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(METHODS, "data", dict(METHODS.data))
    Path("net.py").write_text(MODULE)
    Path("half.py").write_text(PLUGIN)
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Path("photos/inner").mkdir(parents=True)
    for name in ("a.png", "inner/b.png"):
        Image.fromarray(pixels).save(Path("photos", name))
    return tmp_path


OWN = ["--model", "net.py:build", "--size", "32", "--mean", "0.5", "--std", "0.5"]


def test_models_methods_and_subfolders_of_ones_own(desk, capsys):
    words = ["explain", "photos", *OWN, "--plugin", "half.py", "--method", "half", "-t", "1"]
    assert cli.run([*words, "--out", "out", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [Path(record["source"]).name for record in records] == ["a.png", "b.png"]
    assert records[0]["method"] == "half"


def test_every_command_takes_models_and_methods_of_ones_own(desk, capsys, monkeypatch):
    plugin = ["--plugin", "half.py"]
    Path("photos/inner").rename("photos/class 0")
    assert cli.run(["doctor", *OWN, *plugin]) == 0
    assert cli.run(["methods", *plugin]) == 0
    assert "half Half of the image." in " ".join(capsys.readouterr().out.split())
    words = ["evaluate", *OWN, *plugin, "--methods", "half", "--metric", "deletion", "--set", "deletion.steps=2"]
    assert cli.run([*words, "--data", "folder:photos", "--target", "predicted", "--out", "run", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["method"], result["n"]) == ("half", 1)  # a.png lies in no folder of a class
    words += ["--data", "folder:photos", "--target", "predicted"]
    Path("half.py").write_text(f"{PLUGIN}\n# changed")
    assert cli.run([*words, "--out", "run"]) == 0  # no number depends on a comment
    Path("half.py").write_text(f"{PLUGIN}\nCHANGED = True")
    assert cli.run([*words, "--out", "run"]) == 2
    assert "has changed since it was imported" in capsys.readouterr().err
    monkeypatch.setattr("dave_vit._internal.registry._PLUGINS", {})  # as in another process
    monkeypatch.delitem(METHODS.data, "half")
    assert cli.run([*words, "--out", "run"]) == 2
    assert "plugins" in capsys.readouterr().err
    assert cli.run([*words, "--fit", "tiles", "--out", "other"]) == 2


def test_a_worker_knows_the_plugins_of_its_plan(desk, monkeypatch):
    plan = Plan.load({"plugins": "half.py", "methods": "half", "metrics": "deletion", "data": "folder:photos"})
    monkeypatch.setattr(METHODS, "data", {})  # as in a process that has just begun
    monkeypatch.setattr("dave_vit._internal.registry._PLUGINS", {})
    Worker(EvalJob(plan), "cpu").close()
    assert list(METHODS) == ["half"]


def test_a_page_of_ones_own_model_says_how_it_was_prepared(desk):
    from dave_vit.cli.serve import ServedOptions, _models

    (served,) = _models(ServedOptions(["net.py:build"], size=32, mean="0.5", std="0.5,0.5,0.4", device="cpu"))
    assert served.model.prepare.flags == ["--size", "32", "--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.4"]
    with pytest.raises(OptionError, match="belong to one --model"):
        _models(ServedOptions(["net.py:build", "builtin"], size=32))
    with pytest.raises(OptionError, match="use pad or squash"):
        _models(ServedOptions(["net.py:build"], fit="tiles"))


def test_targets_are_repeated_or_have_commas_between(desk, capsys):
    words = ["explain", "photos/a.png", *OWN, "--method", "input_x_gradient", "-t", "class 0", "-t", "1,2"]
    assert cli.run([*words, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert [target["index"] for target in record["targets"]] == [0, 1, 2]


def test_what_is_wrong_with_a_module_is_one_line(desk):
    for name, words in (("net.py:broken", "no file"), ("net.py:number", "returned int"), ("net.py:bild", "build")):
        with pytest.raises(ModelError, match=words):
            dave_vit.load_model(name)
    with pytest.raises(ModelError, match="--size 224 --mean"):
        dave_vit.load_model("net.py:build")
    with pytest.raises(OptionError, match="no such file"):
        dave_vit.load_model("gone.py:build")
    assert cli.run(["explain", "photos", "--plugin", "gone.py"]) == 2
