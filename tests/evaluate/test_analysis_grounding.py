"""The analysis of words whose object was removed: edited pictures, areas under the ROC curve, and its table."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from dave_vit import cli, load_model
from dave_vit._internal import registry
from dave_vit.analysis import ANALYSES
from dave_vit.data.builtin import compose_edited_scene, compose_scene

SEED = 63_000
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "grounding.py"


@pytest.fixture
def grounding(monkeypatch) -> ModuleType:
    """The script, whose analysis no other test knows of."""
    monkeypatch.setattr(ANALYSES, "data", dict(ANALYSES.data))
    return registry.import_file(SCRIPT)


def test_only_the_edited_object_changes():
    scene = compose_scene(1, "pair", seed=SEED)
    removed = compose_edited_scene(1, 0, seed=SEED)
    swapped = compose_edited_scene(1, 0, "cat", seed=SEED)
    own = scene.targets[0].mask
    for edited in (removed, swapped):
        changed = (edited != scene.image).any(-1)
        assert changed[own].mean() > 0.7
        assert not changed[scene.targets[1].mask].mean() > 0.3
    assert (removed != scene.image).any(-1)[~own].mean() < 0.05  # its shadow
    assert (removed != swapped).any()


def test_area_under_the_roc_curve(grounding):
    draws = np.random.default_rng(0)
    values, shown = draws.integers(0, 6, 60).astype(float), draws.random(60) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in values[shown] for b in values[~shown]]
    assert grounding.roc_area(values, shown) == pytest.approx(np.mean(pairs))
    assert grounding.roc_area(np.array([1.0, 0.0]), np.array([True, False])) == 1
    assert np.isnan(grounding.roc_area(np.ones(2), np.array([True, True])))


def test_words_of_a_removed_object_lose_their_evidence(grounding):
    writer = load_model("builtin-captions")
    words = list(grounding.score_picture(writer, 0, grounding.GroundingOptions(n=1, views=2)))
    assert {word.edit for word in words} == {"none", "removed", "swapped"}
    assert all(word.is_shown for word in words if word.edit == "none")
    lost = {(word.edit, word.word): word.image for word in words if not word.is_shown}
    before = {word.word: word.image for word in words if word.edit == "none"}
    assert len(lost) >= 2
    assert all(value < before[word] for (_, word), value in lost.items())
    answered = writer.with_prompt(Image.fromarray(compose_scene(0, "pair", seed=SEED).image))
    shares = grounding.attention_shares(answered)
    assert len(shares) == len(answered.words)
    assert all(0 < share < 1 for share in shares)


def test_it_is_a_command_of_a_plugin_and_no_section_of_the_papers_report(monkeypatch, capsys):
    assert "grounding" not in ANALYSES
    monkeypatch.setattr(ANALYSES, "data", dict(ANALYSES.data))
    monkeypatch.setattr(registry, "_PLUGINS", {})
    assert cli.run(["analyze", "--plugin", str(SCRIPT), "grounding", "--help"]) == 0
    assert "--views" in capsys.readouterr().out


@pytest.mark.slow
def test_the_table_has_an_area_for_each_signal(grounding):
    section = ANALYSES["grounding"].run(grounding.GroundingOptions(n=3, views=2))
    (table,) = section.tables
    assert [row[0] for row in table.rows] == ["removed", "swapped"]
    assert float(table.rows[0][3].split()[0]) > 0.7
    assert len(section.rows) == section.facts["words"]
