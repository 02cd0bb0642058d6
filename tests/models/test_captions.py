"""The embedded model that names objects in words: what it says, and where its words look."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from dave_vit import cli, conservation_gap, create_method, load_model
from dave_vit.data.builtin import CLASS_NAMES, compose_scene
from dave_vit.errors import ModelError, OptionError
from dave_vit.metrics import energypg
from dave_vit.models.adapter import domain_advice
from dave_vit.models.architectures.captioner import caption, vocabulary

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "training"))

SCENES = [compose_scene(index, "pair", seed=62_000) for index in range(3)]  # neither training nor its settings saw them


@pytest.fixture(scope="module")
def answers():
    writer = load_model("builtin-captions")
    return [writer.with_prompt(Image.fromarray(scene.image)) for scene in SCENES]


def test_it_says_that_it_knows_emoji():
    assert "emoji" in domain_advice(load_model("builtin-captions"))


def test_it_names_the_objects(answers):
    captions = [set(prompted.answer.split(" and ")) for prompted in answers]
    meant = [{thing.name for thing in scene.targets} for scene in SCENES]
    assert sum(len(own & true) for own, true in zip(captions, meant, strict=True)) >= 5  # of 6


def test_a_word_looks_at_its_object(answers):
    prompted, scene = answers[0], SCENES[0]
    for number, word in enumerate(prompted.words):
        things = sorted(scene.targets, key=lambda thing: word.text not in thing.name.split())
        if word.text not in things[0].name.split():
            continue
        relevance = create_method("effective", prompted).explain(prompted.inputs, prompted.score(number)).map
        own, other = (float(energypg(relevance, torch.from_numpy(thing.mask)[None])) for thing in things)
        assert own > 2 * other
        assert own > 4 * things[0].mask.mean()


def test_the_parts_of_a_word_add_up(answers):
    prompted = (
        load_model("builtin-captions").double().with_prompt(Image.fromarray(SCENES[0].image), answer="cat and dog")
    )
    assert [word.text for word in prompted.words] == ["cat", "and", "dog"]
    assert conservation_gap(prompted, prompted.inputs, prompted.score(2)) < 1e-9


def test_its_encoder_is_the_embedded_model():
    inputs = load_model("builtin").preprocess(Image.fromarray(SCENES[0].image))
    embedded, captions = load_model("builtin").model, load_model("builtin-captions").model
    with torch.no_grad():
        tokens = captions.encoder(inputs).last_hidden_state
        torch.testing.assert_close(embedded.head(tokens[:, 0]), embedded(inputs), atol=1e-4, rtol=1e-4)


def test_every_name_can_be_written():
    words = vocabulary()
    assert len(words) == len(set(words))
    assert all(word in words for name in CLASS_NAMES for word in caption([name, "cat"]).split())


def test_command(tmp_path, capsys):
    Image.fromarray(SCENES[1].image).save(tmp_path / "photo.png")
    line = ["explain", str(tmp_path / "photo.png"), "--model", "builtin-captions", "--out", str(tmp_path / "out")]
    assert cli.run([*line, "--method", "effective", "--words", "1", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["explained"][0]["text"] == record["words"][0]
    assert cli.run([*line, "--prompt", "what is this?"]) == 2
    assert "takes no prompt" in capsys.readouterr().err


def test_refusals(tmp_path):
    from safetensors.torch import save_file

    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="of another model"):
        load_model("builtin-captions", tmp_path / "other.safetensors")
    with pytest.raises(OptionError, match="takes no prompt"):
        load_model("builtin-captions", "random").with_prompt(Image.fromarray(SCENES[0].image), "what?")


class TestTraining:
    def test_captions_go_from_left_to_right_and_end(self):
        import captions

        scene = SCENES[0]
        numbers = captions.words_of(scene)
        left, right = sorted(scene.targets, key=lambda thing: thing.box[0] + thing.box[2])
        assert captions.objects(numbers) == [left.name, right.name]
        assert numbers[0] == 1
        assert numbers[-1] == 0

    @pytest.mark.slow
    def test_tokens_are_kept_and_a_decoder_learns_from_them(self, tmp_path, monkeypatch):
        import captions

        first = captions.kept(tmp_path, 1, 4, math.inf)
        monkeypatch.setattr(captions, "encoded", None)  # what is kept is not computed again
        tokens, words = captions.kept(tmp_path, 1, 4, math.inf)
        assert torch.equal(tokens, first[0])
        ticks = itertools.count(step=0.5)  # a hundred steps, however busy the machine is
        clock = SimpleNamespace(monotonic=lambda: next(ticks))
        monkeypatch.setattr(captions, "time", clock)
        model = captions.train(tokens, words, (tokens, words), seconds=50.0, batch=4)
        assert captions.loss_of(model, tokens.float(), words) < 0.5 * np.log(len(vocabulary()))
        captions.save(model, tmp_path / "decoder.safetensors")
        load_model("builtin-captions", tmp_path / "decoder.safetensors")
