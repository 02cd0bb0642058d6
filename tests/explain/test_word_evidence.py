"""Where a word comes from: parts of the image, the prompt, the words before and the constants, which add up."""

from __future__ import annotations

import json
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

import writer_folders
from dave_vit import cli, create_method, effective_transformation, load_model
from dave_vit.checks.doctor import Float64Mode
from dave_vit.data.builtin import compose_edited_scene, compose_scene
from dave_vit.engine.gradient import compute_balances
from dave_vit.engine.targets import ScoreSet
from dave_vit.errors import OptionError
from dave_vit.explanations.evidence import SOURCES, compute_evidence
from dave_vit.viz.pictures import ShadedWord, sentence_cell

QUESTION = "what is on the table ?"
QUICK = ("LLaVA", "Idefics 3", "Qwen2-VL")
CAPTIONERS = (*writer_folders.CAPTIONERS, "Pix2Struct")
WRITERS = (*writer_folders.PROCESSORS, *CAPTIONERS, "BLIP, questions")
FAMILIES = [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in WRITERS]


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def caption():
    """The embedded captioner in float64, with a caption of two objects."""
    scene = compose_scene(0, "pair", seed=62_000)
    return load_model("builtin-captions").double().with_prompt(Image.fromarray(scene.image))


@pytest.mark.parametrize("family", FAMILIES)
def test_image_text_and_constants_add_up_to_each_word(family, photograph, tmp_path):
    writer = load_model(f"hf:{writer_folders.save(family, tmp_path)}").double()
    question = None if family in CAPTIONERS else QUESTION
    with Float64Mode():
        answered = writer.with_prompt(photograph, question, max_tokens=3)
        model, scores = answered.with_text_embeddings(), ScoreSet(tuple(answered.scores(range(3))))
        balances = list(compute_balances(model, model.join(answered.inputs), scores))
        own = answered.model.model.get_input_embeddings()(answered.token_ids)
        weight = effective_transformation(model, model.join(answered.inputs), scores)
        alone = effective_transformation(answered, answered.inputs, scores)
    assert torch.equal(model.embedded, own)
    assert len(balances) == 3
    assert max(balance.gap for balance in balances) < 1e-9
    image, text = model.split(weight)
    torch.testing.assert_close(image, alone, rtol=1e-6, atol=1e-9)
    assert image.abs().amax((0, 2, 3, 4)).min() > 0
    prompt = text.shape[2] - 3
    assert text[0, 0, prompt:].abs().max() == 0  # the first word rests on no word of the answer
    assert text[0, 1, prompt].abs().max() > 0
    assert text[0, 1, prompt + 1 :].abs().max() == 0


def test_parts_add_up_to_the_score(caption):
    words = caption.scores(range(len(caption.words)))
    first, *others = compute_evidence(caption, words, views=3)
    for evidence in (first, *others):
        assert set(evidence.parts) == set(SOURCES)
        assert sum(part.value for part in evidence.parts.values()) == pytest.approx(evidence.score, abs=1e-9)
        assert all(part.standard_error >= 0 for part in evidence.parts.values())
    assert first.parts["answer"].value == 0
    assert first.parts["image"].value > 0
    assert first.is_grounded
    assert -1 <= first.image_share <= 1


def test_the_image_part_is_the_sum_of_the_exact_map(caption, monkeypatch):
    (word,) = caption.scores([0])
    (moved,) = compute_evidence(caption, [word], views=2)
    monkeypatch.setattr("dave_vit.explanations.evidence._SHIFT", 0.0)
    monkeypatch.setattr("dave_vit.explanations.evidence._NOISE", 0.0)
    (evidence,) = compute_evidence(caption, [word], views=2)
    exact = create_method("effective", caption).attribute(caption.inputs, word).sum()
    assert evidence.parts["image"].value == pytest.approx(float(exact))
    assert evidence.parts["image"].standard_error == pytest.approx(0, abs=1e-9)
    assert moved.parts["image"].standard_error > 1e-3


def test_a_word_is_explained_against_its_rivals(caption):
    alone, against = caption.scores([0], against="none"), caption.scores([0])
    with torch.no_grad():
        output = caption(caption.inputs)
    logits = output.logits[0, against[0].positions[0]]
    others = logits.clone()
    others[against[0].tokens[0]] = -torch.inf
    own = logits[against[0].tokens[0]]
    assert float(alone[0](output)) == pytest.approx(float(own))
    assert float(against[0](output)) == pytest.approx(float(own - others.softmax(0).nan_to_num() @ logits))
    with pytest.raises(OptionError, match="rivals, none"):
        caption.scores([0], against="cat")
    probabilities = caption.probabilities()
    assert probabilities[0] == pytest.approx(float(logits.softmax(0)[against[0].tokens[0]]))


@pytest.mark.parametrize("family", ["LLaVA", "Qwen2-VL"])
def test_words_share_their_forward_passes(family, photograph, tmp_path, monkeypatch):
    writer = load_model(f"hf:{writer_folders.save(family, tmp_path)}").double()
    answered = writer.with_prompt(photograph, QUESTION, max_tokens=3)
    scores = ScoreSet(tuple(answered.scores(range(2))))
    together = create_method("effective", answered).attribute(answered.inputs, scores)
    alone = [create_method("effective", answered).attribute(answered.inputs, one) for one in scores.parts]
    torch.testing.assert_close(together, torch.stack(alone, 1))
    passes: Counter[str] = Counter()
    module = sys.modules["dave_vit.engine.gradient"]  # the package has a function of this name

    def count_forward(*args, run=module.forward):  # a hook that counts would be a change of the model
        passes["forward"] += 1
        return run(*args)

    def count(scores, leaves, differentiate=module.derivatives):
        passes["backward"] += scores.shape[1]
        return differentiate(scores, leaves)

    monkeypatch.setattr(module, "forward", count_forward)
    monkeypatch.setattr(module, "derivatives", count)
    counts = []
    for target in (scores, scores.parts[0]):
        method = create_method("dave", answered, samples=2)
        for _ in range(2):  # which check the model, once more where its first pass changes it
            method.explain(answered.inputs, target)
        passes.clear()
        method.explain(answered.inputs, target)
        counts.append(dict(passes))
    # Two rule sets on the clean image, and the views.
    assert counts[0]["forward"] == counts[1]["forward"] == 3
    assert (counts[0]["backward"], counts[1]["backward"]) == (6, 3)


def test_the_figure_marks_words_that_do_not_come_from_the_image(caption):
    words = [ShadedWord("cat", 0.9), ShadedWord("and", None), ShadedWord("dog", -0.5, is_marked=True)]
    cell = sentence_cell(words, columns=2)
    assert cell.span == 2
    line = np.array([196, 69, 47]) / 255  # the colour of the line under "dog"
    assert np.isclose(cell.colours, line).all(-1).any()
    assert not np.isclose(sentence_cell(words[:2], columns=2).colours, line).all(-1).any()
    assert sentence_cell(words * 9, columns=1).colours.shape[0] > 3 * cell.colours.shape[0]


def test_command_writes_shares_and_probabilities(tmp_path, capsys):
    Image.fromarray(compose_scene(1, "pair", seed=62_000).image).save(tmp_path / "photo.png")
    line = ["explain", str(tmp_path / "photo.png"), "--model", "builtin-captions", "--method", "effective", "--json"]
    assert cli.run([*line, "--out", str(tmp_path / "out")]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["against"] == "rivals"
    assert len(record["explained"]) == len(record["words"])
    for word in record["explained"]:
        evidence = word["evidence"]
        parts = sum(evidence[name]["value"] for name in SOURCES)
        assert parts == pytest.approx(evidence["score"], abs=1e-3)
        assert 0 <= word["probability"] <= 1
        assert evidence["grounded"] == (evidence["image"]["value"] > 2 * evidence["image"]["standard_error"])
    assert cli.run([*line, "--against", "none", "--words", "1", "--out", str(tmp_path / "out")]) == 0
    (alone,) = json.loads(capsys.readouterr().out)
    assert alone["against"] == "none"
    assert alone["explained"][0]["value"] != record["explained"][0]["value"]
    assert cli.run([*line, "--against", "cat", "--out", str(tmp_path / "out")]) == 2
    assert "rivals, none" in capsys.readouterr().err


def test_command_explains_an_answer_that_is_given(tmp_path, capsys):
    Image.fromarray(compose_edited_scene(0, 0, seed=62_000)).save(tmp_path / "photo.png")
    line = ["explain", str(tmp_path / "photo.png"), "--model", "builtin-captions", "--method", "effective", "--json"]
    line += ["--out", str(tmp_path / "out"), "--answer"]
    assert cli.run([*line, "strawberry and eyeglasses"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    gone, _, shown = record["explained"]
    assert (gone["text"], shown["text"]) == ("strawberry", "eyeglasses")
    assert not gone["evidence"]["grounded"]
    assert shown["evidence"]["grounded"]
    assert cli.run([*line, ""]) == 2
    assert "the answer has no words" in capsys.readouterr().err
