"""The neighbourhood that fits a model: the choice, the preset file, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_models
from dave_vit import DAVE, cli, tune
from dave_vit.analysis import tuning
from dave_vit.cli.options import ModelOptions
from dave_vit.data.grids import GridCandidate, GridOptions, choose_grids, compose_grids
from dave_vit.errors import InputError
from dave_vit.metrics import Perturbation, area, deletion, gridpg
from dave_vit.models import Adapter, Preprocessing

X = tiny_models.images(2)


def measure(
    survival: float, gain: float, images: int = 8, localization: tuple[float, ...] = (0.8, 0.9, 0.7)
) -> tuning.MeasuredNeighborhood:
    """Return measurements whose scores exceed 0.5 by a gain, give or take 0.01 in turn."""
    scores = tuple(0.5 + gain + 0.01 * (-1) ** number * bool(gain) for number in range(images))
    return tuning.MeasuredNeighborhood(10.0, 0.1, 0.05, survival, 0.5, 0.5, scores, localization)


@pytest.mark.parametrize(
    ("survival", "gains", "chosen"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0], tuning.DEFAULT),
        ([1.0, 1.0, 1.0, 1.0, 1.0], [-0.2, -0.1, 0.0, -0.1, -0.2], tuning.DEFAULT),
        ([0.9, 0.95, 1.0, 1.0, 1.0], [0.05, 0.1, 0.0, 0.02, 0.02], 1),
        ([0.3, 0.84, 1.0, 1.0, 1.0], [0.2, 0.2, 0.0, 0.05, 0.02], 3),
        ([0.1, 0.43, 0.5, 0.5, 0.5], [0.2, 0.1, 0.0, 0.0, 0.0], 1),
        ([1.0, 1.0, 1.0, 1.0, 1.0], [0.005, 0.0, 0.0, 0.0, 0.0], tuning.DEFAULT),
    ],
)
def test_only_a_neighbourhood_that_is_better_and_fits_replaces_the_default(survival, gains, chosen):
    assert tuning.choose([measure(*pair) for pair in zip(survival, gains, strict=True)]) == chosen


def test_what_localizes_worse_never_replaces_the_default():
    default, narrow = measure(1.0, 0.0), measure(1.0, 0.2)
    assert tuning.choose([default, default, default, default, narrow]) == 4
    worse = replace(narrow, localization=(0.7, 0.8, 0.65))
    assert tuning.choose([default, default, default, default, worse]) == tuning.DEFAULT
    unknown = [replace(one, localization=()) for one in (default, default, default, default, narrow)]
    assert tuning.choose(unknown) == 4  # fewer than four classes make no grid


def test_localization_is_gridpg_of_the_predictions():
    model, images = tiny_models.vit(), tiny_models.images(4)
    logits = 5 * torch.eye(tiny_models.CLASSES)[torch.tensor([2, 0, 3, 1])]
    dave = DAVE(model, 3)
    shares = tuning._localization(dave, images, logits)
    (grid,) = choose_grids([GridCandidate(i, k, 1.0) for i, k in enumerate((2, 0, 3, 1))], GridOptions(grids=1))
    composed = compose_grids(images[list(grid.images)][None])
    maps = torch.stack([dave.explain(composed, label).map for label in grid.labels], 1)
    assert shares == pytest.approx(gridpg(maps).nan_to_num().flatten().tolist(), rel=1e-3, abs=1e-5)
    assert tuning._localization(dave, images, logits[:1].expand(4, -1)) == ()


def test_few_images_keep_the_default():
    few = [measure(1.0, gain, images=5) for gain in (0.3, 0.2, 0.0, 0.1, 0.1)]
    assert tuning.choose(few) == tuning.DEFAULT
    assert "5 images show no difference" in tuning.Tuning(tuple(few), tuning.DEFAULT).warning


def test_the_row_of_the_default_is_the_default_itself():
    model = tiny_models.vit()
    row = tune(model, X).neighborhoods[tuning.DEFAULT]
    target = model(X).argmax(1)
    maps = DAVE(model).explain(X, target).map
    steps = tuple(step / 10 for step in range(11))
    curves = deletion(model, X, maps, target, Perturbation(steps))
    assert row.deletion == pytest.approx(float(area(curves, steps).mean()), rel=1e-4)


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
    assert found.chosen == tuning.choose(found.neighborhoods)


def test_the_file_is_a_preset(tmp_path):
    model = tiny_models.vit()
    found = replace(tune(model, X), chosen=1)
    found.save(tmp_path / "mine.toml")
    dave = DAVE(model, preset=str(tmp_path / "mine.toml"))
    assert dave.neighborhood == DAVE(model, **found.switches).neighborhood
    assert dave.narrower == ()
    assert "# * rotation 10, shift 0.1" in found.text()


def test_the_file_of_the_default_changes_nothing(tmp_path):
    model = tiny_models.vit()
    kept = replace(tune(model, X), chosen=tuning.DEFAULT)
    kept.save(tmp_path / "mine.toml")
    dave, default = DAVE(model, preset=str(tmp_path / "mine.toml")), DAVE(model)
    assert (dave.neighborhood, dave.narrower) == (default.neighborhood, default.narrower)
    assert kept.switches == {}


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
        assert len(told["neighborhood_levels"]) == len(tuning.CANDIDATES)
        assert cli.run(["explain", "photos/0.png", "--preset", "mine.toml", "--samples", "3", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)[0]
        chosen = told["neighborhood_levels"][told["chosen"]]
        assert record["neighborhood"]["spatial"]["rotation"] == chosen["rotation"]

    def test_shows_the_criterion_the_default_and_a_warning(self, capsys):
        assert cli.run(["tune", "--data", "photos"]) == 0
        shown = capsys.readouterr()
        assert "at least" in shown.out
        assert "standard errors" in shown.out
        assert sum("default" in line and "±" not in line for line in shown.out.splitlines()) >= 1
        assert "2 images show no difference; give at least 6" in shown.err

    def test_goes_on_where_it_was(self, monkeypatch, capsys):
        assert cli.run(["tune", "--data", "photos"]) == 0
        monkeypatch.setattr(tuning, "_measure", None)
        capsys.readouterr()
        assert cli.run(["tune", "--data", "photos", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["neighborhood_levels"]) == len(tuning.CANDIDATES)

    def test_other_images_are_measured_anew(self, monkeypatch):
        assert cli.run(["tune", "--data", "photos"]) == 0
        monkeypatch.setattr(tuning, "_measure", None)
        with pytest.raises(TypeError):
            cli.run(["tune", "--data", "photos", "--limit", "1"])

    def test_a_folder_without_images_is_one_line(self, tmp_path, capsys):
        (tmp_path / "empty").mkdir()
        assert cli.run(["tune", "--data", "empty"]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
