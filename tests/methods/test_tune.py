"""The neighbourhood that fits a model: the choice, the preset file, and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_models
from dave_vit import DAVE, cli, tune
from dave_vit.analysis import tuning
from dave_vit.cli.options import ModelOptions
from dave_vit.errors import InputError
from dave_vit.models import Adapter, Preprocessing

X = tiny_models.images(2)


@pytest.mark.parametrize(
    ("survival", "chosen"),
    [
        ([0.9, 0.95, 1.0, 1.0, 1.0], 0),
        ([0.3, 0.84, 0.86, 0.9, 1.0], 2),
        ([0.1, 0.1, 0.1, 0.4, 0.5], 4),
        ([0.1, 0.1, 0.1, 0.43, 0.5], 3),
        ([0.0, 0.0, 0.0, 0.0, 0.0], 0),
    ],
)
def test_the_widest_that_keeps_most_of_what_the_narrowest_keeps(survival, chosen):
    assert tuning.choose_widest(survival) == chosen


def test_survival_is_measured_on_the_views_of_each_rung():
    model = tiny_models.vit()
    found = tune(model, X)
    assert [(rung.rotation, rung.translation) for rung in found.neighborhoods] == [
        step[:2] for step in tuning.CANDIDATES
    ]
    clean = model(X).softmax(1).max(1)
    for rung in found.neighborhoods:
        around = DAVE(model, preset="default", **rung.switches).neighborhood
        views = around.views((3, 32, 32), samples=8)
        seen = model(views.apply(X).flatten(0, 1)).softmax(1).unflatten(0, (8, 2))
        left = (seen[:, torch.arange(2), clean.indices] / clean.values).detach()
        assert rung.survival == pytest.approx(float(left.mean()), rel=1e-4)
    assert found.chosen == tuning.choose_widest([rung.survival for rung in found.neighborhoods])


def test_the_file_is_a_preset(tmp_path):
    model = tiny_models.vit()
    found = tune(model, X)
    found.save(tmp_path / "mine.toml")
    dave = DAVE(model, preset=str(tmp_path / "mine.toml"))
    assert dave.neighborhood == DAVE(model, **found.switches).neighborhood
    assert dave.narrower == ()


def test_what_was_measured_is_not_measured_again():
    model, told = tiny_models.vit(), []
    first = tune(model, X, report=lambda number, rung: told.append(number))
    assert told == list(range(len(tuning.CANDIDATES)))
    known = {number: rung for number, rung in enumerate(first.neighborhoods) if number != 3}
    again = tune(model, X, known=known, report=lambda number, rung: told.append(number))
    assert told[len(tuning.CANDIDATES) :] == [3]
    assert again == first


def test_nothing_to_look_at_is_one_line():
    with pytest.raises(InputError, match="at least one"):
        tune(tiny_models.vit(), torch.empty(0, 3, 32, 32))
    with pytest.raises(InputError, match="no preprocess"):
        tune(tiny_models.vit(), ["a.png"])


class TestCommand:
    @pytest.fixture(autouse=True)
    def tiny(self, monkeypatch, tmp_path):
        def transform(image: Image.Image) -> torch.Tensor:
            pixels = np.asarray(image.resize((32, 32)), dtype=np.float32) / 255
            return torch.from_numpy(pixels).permute(2, 0, 1) * 2 - 1

        names = [f"class {number}" for number in range(tiny_models.CLASSES)]
        model = Adapter(tiny_models.vit(), Preprocessing(transform), names, spec="tiny")
        monkeypatch.setattr(ModelOptions, "load", lambda options: model)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "photos").mkdir()
        for number in range(2):
            pixels = np.random.default_rng(number).integers(0, 255, (24, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")

    def test_writes_a_preset_that_explain_takes(self, capsys):
        assert cli.run(["tune", "--data", "photos", "--out", "mine.toml", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["images"] == 2
        assert len(told["rungs"]) == len(tuning.CANDIDATES)
        assert cli.run(["explain", "photos/0.png", "--preset", "mine.toml", "--samples", "3", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)[0]
        chosen = told["rungs"][told["chosen"]]
        assert record["neighborhood"]["spatial"]["rotation"] == chosen["rotation"]

    def test_goes_on_where_it_was(self, monkeypatch, capsys):
        assert cli.run(["tune", "--data", "photos"]) == 0
        monkeypatch.setattr(tuning, "_measure", None)
        capsys.readouterr()
        assert cli.run(["tune", "--data", "photos", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["rungs"]) == len(tuning.CANDIDATES)

    def test_other_images_are_measured_anew(self, monkeypatch):
        assert cli.run(["tune", "--data", "photos"]) == 0
        monkeypatch.setattr(tuning, "_measure", None)
        with pytest.raises(TypeError):
            cli.run(["tune", "--data", "photos", "--limit", "1"])

    def test_a_folder_without_images_is_one_line(self, tmp_path, capsys):
        (tmp_path / "empty").mkdir()
        assert cli.run(["tune", "--data", "empty"]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
