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
from dave_vit.errors import InputError, ModelError, OptionError, UnsupportedOperator
from dave_vit.models.families.hf import _adjust_image_processor
from dave_vit.models.pixel_formats import process_image
from dave_vit.models.text_generation import AnswerWord, split_words
from writer_folders import CAPTIONERS, PROCESSORS, QUESTION, SLOTS, saved_folders  # noqa: F401

WIDTH, HEIGHT, MARK = 120, 80, 32
QUICK = ("LLaVA", "Idefics 3", "Qwen2-VL", "LLaVA-NeXT", "Gemma 4")  # one of each form in which pictures are taken
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
        prompted = writer.with_prompt(photograph, QUESTION, max_tokens=3)
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
        special = writer.tokenizer.all_special_ids
        options = {"max_new_tokens": 3, "do_sample": False, "suppress_tokens": special, "forced_eos_token_id": None}
        assert tuple(writer.model.generate(**inputs, **options)[0, -3:].tolist()) == prompted.tokens
    torch.testing.assert_close(found, own, atol=1e-5, rtol=0)
    with Float64Mode():
        assert conservation_gap(prompted, prompted.inputs, prompted.score(1)) < 1e-9


TILED = {  # sizes of photographs, and the rows and columns into which they are cut
    "LLaVA-NeXT": {(120, 80): (2, 2), (40, 120): (2, 1), (60, 60): (1, 1)},
    "LLaVA-OneVision": {(300, 200): (2, 2), (40, 120): (2, 1)},
    "InternVL 3": {(120, 80): (2, 3), (40, 120): (3, 1)},
    "Aya Vision": {(2500, 80): (1, 6)},
    "Llama 3.2 Vision": {(120, 80): (2, 2), (40, 120): (2, 1), (30, 300): (4, 1), (60, 60): (1, 1)},
    "Llama 4": {(120, 80): (2, 2), (300, 40): (1, 4)},
    "Perception LM": {(120, 60): (1, 2), (60, 120): (2, 1)},
    "Idefics 3": {(120, 80): (2, 2)},
}


@pytest.mark.parametrize("family", TILED)
def test_tiles_are_those_of_the_processor(family):
    processor = PROCESSORS[family]()
    own = _adjust_image_processor(processor)
    for size, grid in TILED[family].items():
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
        made, expected = (
            process_image(own, family, image),
            own(images=image, return_tensors="pt")["pixel_values"].float(),
        )
        assert (made.arrange.rows, made.arrange.columns) == grid
        first = int(made.arrange.whole == "first")
        tiles = expected.flatten(0, -4)[first : first + grid[0] * grid[1]]
        for number, tile in enumerate(tiles):
            top, left = 64 * (number // grid[1]), 64 * (number % grid[1])
            assert torch.equal(made.image[0, :, top : top + 64, left : left + 64], tile)
        cut = made.arrange(made.image)["pixel_values"]
        torch.testing.assert_close(cut, expected, atol=1e-6, rtol=0)
        twice = made.arrange(torch.cat([made.image, 0 * made.image]))["pixel_values"]
        assert twice.shape == (2 * len(expected), *expected.shape[1:])
        torch.testing.assert_close(twice[: len(expected)], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["LLaVA-NeXT", "InternVL 3", "Llama 4"])
def test_the_whole_image_beside_its_tiles_follows_the_photograph(family):
    """What a smooth change of the photograph makes of it is what the same change of the explained image makes."""
    own = _adjust_image_processor(PROCESSORS[family]())
    rows, columns = np.mgrid[0:200, 0:300]
    pair = []
    for shift in (0, 40):
        waves = 128 + 60 * np.sin((columns + shift) / 30) * np.cos(rows / 25)
        pair.append(Image.fromarray(np.repeat(waves[..., None], 3, 2).astype(np.uint8)))
    before, after = (process_image(own, family, image) for image in pair)
    expected = own(images=pair[1], return_tensors="pt")["pixel_values"].float()
    found = before.arrange(after.image)["pixel_values"]
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)  # of colours that change by 1
    assert (before.arrange(before.image)["pixel_values"] - expected).abs().max() > 0.5


@pytest.mark.parametrize("method", ["gradcam", "rollout", "tam"])
@pytest.mark.parametrize("family", ["LLaVA-NeXT", "InternVL 3", "Llama 3.2 Vision"])
def test_tokens_of_several_tiles_are_no_grid(family, method, folders, photograph):
    answered = load_model(f"hf:{folders(family)}").with_prompt(photograph, QUESTION, max_tokens=1)
    with pytest.raises(UnsupportedOperator, match="use dave"):
        create_method(method, answered).attribute(answered.inputs, answered.score(0))


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


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("Pix2Struct", "takes flattened_patches, attention_mask, which cannot be followed back"),
        ("ViLT", "answers questions with classes, not words; bind one with dave_vit.with_inputs"),
        ("BLIP, questions", "keeps the logits of its answers to itself"),
    ],
)
def test_what_writes_no_words_is_refused_in_one_line(family, message, folders, photograph):
    with pytest.raises(ModelError, match=message) as error:
        load_model(f"hf:{folders(family)}").with_prompt(photograph, QUESTION)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", CAPTIONERS)
def test_captioners_continue_a_prompt(family, folders, photograph):
    writer = load_model(f"hf:{folders(family)}")
    caption = writer.with_prompt(photograph, max_tokens=2)
    assert caption.token_ids.shape == (1, 3)
    special = {"suppress_tokens": writer.tokenizer.all_special_ids, "forced_eos_token_id": None}
    options = {"max_new_tokens": 2, "do_sample": False, **special}
    own = writer.model.generate(pixel_values=caption.inputs, **options)
    if family == "TrOCR":
        with pytest.raises(OptionError, match="takes no prompt"):
            writer.with_prompt(photograph, "a red")
    else:
        red = writer.tokenizer("a red", add_special_tokens=False)["input_ids"]
        prompted = writer.with_prompt(photograph, "a red", max_tokens=2)
        assert prompted.token_ids[0, -4:-2].tolist() == red
        assert prompted.token_ids.shape[1] == (4 if family == "Donut" else 5)
    assert own[0, -2:].tolist() == list(caption.tokens)


def test_a_folder_without_a_vocabulary(folders, photograph, tmp_path):
    copy = shutil.copytree(folders("Qwen2-VL"), tmp_path / "copy")
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer there, with save_pretrained"):
        load_model(f"hf:{copy}").with_prompt(photograph, QUESTION)


def test_the_doctor_asks_by_itself(folders, capsys):
    assert cli.run(["doctor", "--model", f"hf:{folders('Qwen2-VL')}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] < 1e-9
