"""Models that write text, from folders of transformers: answers, words, and maps that lie on the photograph."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from dave_vit import cli, conservation_gap, create_method, load_model
from dave_vit.checks.doctor import Float64Mode
from dave_vit.data.geometry import Geometry
from dave_vit.errors import InputError, ModelError, OptionError
from dave_vit.models.pixel_formats import process_image
from dave_vit.models.text_generation import AnswerWord, split_words
from writer_folders import PROCESSORS, QUESTION, SLOTS, saved_folders  # noqa: F401

WIDTH, HEIGHT, MARK = 120, 80, 32
QUICK = ("LLaVA", "Idefics 3", "Qwen2-VL")  # one of each form in which pictures are taken
FAMILIES = [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in PROCESSORS]


def marked(nothing: int = 128) -> Image.Image:
    """A photograph, wider than high, that is nothing but a mark in its lower right corner."""
    pixels = np.full((HEIGHT, WIDTH, 3), nothing, dtype=np.uint8)
    pixels[-MARK:, -MARK:] = 255
    return Image.fromarray(pixels)


@pytest.fixture
def photograph() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mark_is_found_where_it_is_in_the_photograph(family, folders):
    writer = load_model(f"hf:{folders(family)}")
    image = marked(0 if family == "Gemma 4" else 128)  # which does not centre its pixels
    prompted = writer.with_prompt(image, QUESTION, max_tokens=3)
    assert len(prompted.words) == len(prompted.tokens) == 3
    attribution = create_method("effective", prompted).attribute(prompted.inputs, prompted.score(1))
    relevance = Geometry.measure(writer.preprocessing, image.size).to_photo(attribution[0].sum(0)).abs()
    assert relevance[-MARK:, -MARK:].sum() > 0.9 * relevance.sum() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_the_one_of_the_library_and_its_parts_add_up(family, folders, photograph):
    writer = load_model(f"hf:{folders(family)}").double()
    with Float64Mode():
        prompted = writer.with_prompt(photograph, QUESTION, max_tokens=2)
    text = SLOTS.get(family, "<image> ") + QUESTION
    inputs = writer.processor(images=[photograph], text=[text], return_tensors="pt")
    inputs = {
        name: inputs[name].double() if name == "pixel_values" else inputs[name] for name in inputs if name != "labels"
    }
    if writer.model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[2]])
    with torch.no_grad(), Float64Mode():
        own = writer.model(**inputs).logits[0, -1]
        found = prompted.with_answer([])(prompted.inputs).logits[0, -1]
    torch.testing.assert_close(found, own, atol=1e-5, rtol=0)
    own[writer.tokenizer.all_special_ids] = -torch.inf
    assert int(own.argmax()) == prompted.tokens[0]
    with Float64Mode():
        assert conservation_gap(prompted, prompted.inputs, prompted.score(1)) < 1e-9


def test_tokens_becomesplit_words():
    class Pieces:
        def decode(self, tokens):
            return "".join([" the", " tab", "le", ",", " red", "-", "ish", "."][token] for token in tokens)

    words = split_words(Pieces(), range(8))
    assert [word.text for word in words] == ["the", "table", ",", "red", "-ish", "."]
    assert words[1] == AnswerWord("table", (1, 2))


class TestCommand:
    @pytest.fixture
    def photo(self, photograph, tmp_path):
        photograph.save(tmp_path / "photo.png")
        return str(tmp_path / "photo.png")

    def test_one_map_for_each_word(self, folders, photo, tmp_path, capsys):
        line = ["explain", photo, "--model", f"hf:{folders('Qwen2-VL')}", "--prompt", QUESTION, "--words", "1,3"]
        assert cli.run([*line, "--method", "effective", "--out", str(tmp_path / "out"), "--json"]) == 0
        (record,) = json.loads(capsys.readouterr().out)
        assert record["prompt"] == QUESTION
        assert record["answer"].split() == record["words"]
        assert [each["word"] for each in record["explained"]] == [1, 3]
        (kept,) = [path for path in record["files"] if path.endswith(".npz")]
        with np.load(kept) as arrays:
            assert arrays["word3"].shape == (HEIGHT, WIDTH)
        (drawn,) = [path for path in record["files"] if path.endswith("words.png")]
        with Image.open(drawn) as strip:
            assert 2 * 200 < strip.width < 3 * 200

    def test_the_score_of_a_word_after_the_prompt(self, folders, photo, tmp_path, capsys):
        line = ["explain", photo, "--model", f"hf:{folders('LLaVA')}", "--prompt", QUESTION, "--method", "effective"]
        line += ["--out", str(tmp_path), "--json", "--score"]
        assert cli.run([*line, "token:cat"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["score"] == "token:cat"
        assert cli.run([*line, "token:unheard"]) == 2
        assert "'unheard' is not one token" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ([], "give one, --prompt"),
            (["--prompt", QUESTION, "--words", "99"], "word 99"),
            (["--prompt", QUESTION, "--words", "x"], "no word x"),
        ],
    )
    def test_refusals(self, folders, photo, tmp_path, capsys, options, said):
        assert cli.run(["explain", photo, "--model", f"hf:{folders('LLaVA')}", "--out", str(tmp_path), *options]) == 2
        assert said in capsys.readouterr().err

    def test_a_prompt_to_a_model_that_writes_nothing(self, photo, capsys):
        assert cli.run(["explain", photo, "--prompt", QUESTION]) == 2
        assert "takes no prompt" in capsys.readouterr().err


def test_what_cannot_be_followed_is_refused(folders, photograph):
    with pytest.raises(ModelError, match=r"pixels shaped \[1, 5, 3, 8, 8\]"):
        process_image(lambda **options: {"pixel_values": torch.zeros(1, 5, 3, 8, 8)}, "hf:other", photograph)
    with pytest.raises(InputError, match=r"call \.with_prompt"):
        load_model(f"hf:{folders('LLaVA')}")(torch.zeros(1, 3, 64, 64))
    with pytest.raises(OptionError, match="answers a prompt"):
        load_model(f"hf:{folders('LLaVA')}").with_prompt(photograph)


def test_a_folder_without_a_vocabulary(folders, photograph, tmp_path):
    copy = shutil.copytree(folders("Qwen2-VL"), tmp_path / "copy")
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer there, with save_pretrained"):
        load_model(f"hf:{copy}").with_prompt(photograph, QUESTION)


def test_the_doctor_asks_by_itself(folders, capsys):
    assert cli.run(["doctor", "--model", f"hf:{folders('Qwen2-VL')}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] < 1e-9
