"""Models that write text, from folders of transformers: answers, words, and maps that lie on the photograph."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from dave_vit import cli, conservation_gap, create_method, load_model, with_inputs
from dave_vit.checks.doctor import Float64Mode, diagnose, example_inputs
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


class TestReaders:
    """Pix2Struct, whose patches begin with their place, BLIP for questions, and ViLT, whose answers are classes."""

    @staticmethod
    def generate(writer, inputs):
        special = {"suppress_tokens": writer.tokenizer.all_special_ids, "forced_eos_token_id": None}
        return writer.model.generate(**inputs, max_new_tokens=3, do_sample=False, **special)[0, -3:].tolist()

    @pytest.mark.parametrize("prompt", [None, "a red"])
    @pytest.mark.parametrize("size", [(80, 120), (120, 60)])
    def test_pix2struct_sees_what_its_processor_makes(self, prompt, size, folders):
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
        writer = load_model(f"hf:{folders('Pix2Struct')}").double()
        with Float64Mode():
            answered = writer.with_prompt(image, prompt, max_tokens=3)
            options = {"max_patches": 16, "add_special_tokens": False}  # as saved; the whole processor takes 2048
            inputs = dict(writer.processor(images=image, text=prompt, return_tensors="pt", **options))
            inputs["flattened_patches"] = inputs["flattened_patches"].double()
            assert self.generate(writer, inputs) == list(answered.tokens)
            text = answered.with_answer([]).token_ids
            inputs |= {"decoder_input_ids": text, "decoder_attention_mask": torch.ones_like(text)}
            with torch.no_grad():
                own = writer.model.model(**inputs).logits
                found = answered.with_answer([])(answered.inputs).logits
            torch.testing.assert_close(found, own, atol=1e-6, rtol=0)
            assert conservation_gap(answered, answered.inputs, answered.score(1)) < 1e-9
        assert text[0, 1:].tolist() == (writer.tokenizer(prompt)["input_ids"] if prompt else [])

    def test_pix2struct_with_its_prompt_in_the_picture_is_refused(self, folders, photograph, tmp_path):
        copy = shutil.copytree(folders("Pix2Struct"), tmp_path / "copy")
        for file in copy.glob("*processor_config.json"):
            file.write_text(file.read_text().replace('"is_vqa": false', '"is_vqa": true'))
        with pytest.raises(ModelError, match="draws its prompt into the picture") as error:
            load_model(f"hf:{copy}").with_prompt(photograph, QUESTION)
        assert "\n" not in str(error.value)

    def test_blip_answers_as_the_library(self, folders, photograph):
        writer = load_model(f"hf:{folders('BLIP, questions')}").double()
        with pytest.raises(OptionError, match="answers a prompt"):
            writer.with_prompt(photograph)
        with Float64Mode():
            answered = writer.with_prompt(photograph, QUESTION, max_tokens=3)
            inputs = writer.processor(images=photograph, text=QUESTION, return_tensors="pt")
            inputs["pixel_values"] = inputs["pixel_values"].double()
            assert self.generate(writer, inputs) == list(answered.tokens)
            assert conservation_gap(answered, answered.inputs, answered.score(1)) < 1e-9
            other = writer.with_prompt(photograph, "what is red ?", answer="cat")
            same = writer.with_prompt(photograph, QUESTION, answer="cat")
            assert not torch.allclose(other(other.inputs).logits, same(same.inputs).logits)

    def test_an_answer_of_blip_ends_as_in_the_library(self, folders, photograph):
        writer = load_model(f"hf:{folders('BLIP, questions')}")
        likeliest = writer.with_prompt(photograph, QUESTION, max_tokens=1).tokens[0]
        writer.model.config.text_config.sep_token_id = likeliest
        with pytest.raises(InputError, match="empty answer"):
            writer.with_prompt(photograph, QUESTION)

    @pytest.mark.parametrize("family", ["Pix2Struct", "BLIP, questions", "ViLT"])
    def test_a_mark_is_found_where_it_is(self, family, folders):
        reader, image = load_model(f"hf:{folders(family)}"), marked()
        bound = reader.with_prompt(image, QUESTION)
        inputs = bound.preprocess(image)
        score = bound.task.check_score if family == "ViLT" else bound.score(0)
        attribution = create_method("effective", bound).attribute(inputs, score)
        attribution[inputs.abs() < 0.01] = 0  # no grey of Pix2Struct is exactly nothing
        relevance = Geometry.measure(reader.preprocessing, image.size).to_photo(attribution[0].sum(0)).abs()
        assert relevance[-MARK:, -MARK:].sum() > 0.9 * relevance.sum() > 0

    def test_vilt_answers_with_classes(self, folders, photograph, tmp_path, capsys):
        photograph.save(tmp_path / "photo.png")
        line = ["explain", str(tmp_path / "photo.png"), "--model", f"hf:{folders('ViLT')}", "--method", "effective"]
        line += ["--out", str(tmp_path / "out"), "--json"]
        assert cli.run([*line, "--prompt", QUESTION, "--target", "top2"]) == 0
        (record,) = json.loads(capsys.readouterr().out)
        model = load_model(f"hf:{folders('ViLT')}").model
        inputs = load_model(f"hf:{folders('ViLT')}").processor(images=photograph, text=QUESTION, return_tensors="pt")
        with torch.no_grad():
            own = model(**inputs).logits[0].softmax(0)
        assert record["prompt"] == QUESTION
        assert [one["index"] for one in record["top5"]] == own.argsort(descending=True)[:5].tolist()
        assert record["targets"][0]["probability"] == pytest.approx(float(own.sort().values[-2]), rel=1e-5)
        assert cli.run(line) == 2
        assert "answers a question; give one, --prompt" in capsys.readouterr().err

    def test_the_patches_of_vilt_stay_in_order(self, folders, photograph):
        """Without positions, a photograph that is moved by a patch has a map that is moved as far."""
        bound = load_model(f"hf:{folders('ViLT')}").with_prompt(photograph, QUESTION).double()
        with Float64Mode():
            inputs = bound.preprocess(photograph)
            assert conservation_gap(bound, inputs, 0) < 1e-9
            bound.get_parameter("model.model.model.vilt.embeddings.position_embeddings").data.zero_()
            rollout = create_method("rollout", bound)
            still, moved = (rollout.attribute(inputs.roll(pixels, -1), 0) for pixels in (0, 16))
        inside = slice(24, -8)  # the edges of maps are interpolated
        torch.testing.assert_close(still.roll(16, -1)[..., inside], moved[..., inside])

    def test_a_vilt_in_memory_has_no_places(self, folders, photograph):
        loaded = load_model(f"hf:{folders('ViLT')}")
        tokens = loaded.processor.tokenizer(QUESTION, return_tensors="pt")
        bound = with_inputs(loaded.model.model, **tokens)
        inputs = loaded.preprocess(photograph)
        for method in ("rollout", "gradcam"):
            with pytest.raises(UnsupportedOperator, match="may shuffle its patches"):
                create_method(method, bound).attribute(inputs, 0)
        assert create_method("effective", bound).attribute(inputs, 0).abs().max() > 0

    def test_a_vilt_for_another_task_is_refused(self, folders, photograph, tmp_path):
        import transformers

        copy = shutil.copytree(folders("ViLT"), tmp_path / "copy")
        config = transformers.AutoConfig.from_pretrained(copy)
        transformers.ViltForMaskedLM(config).save_pretrained(copy)
        with pytest.raises(ModelError, match="no trained answer head"):
            load_model(f"hf:{copy}")


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


@pytest.mark.parametrize(
    "family",
    [
        *("LLaVA", "Idefics 3", "Qwen2.5-VL", "Gemma 4", "Llama 3.2 Vision", "Pix2Struct", "GIT"),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("InternVL 3", "BLIP-2", "BLIP, captions", "Florence-2")
        ),
    ],
)
def test_the_doctor_says_whether_methods_on_tokens_work(family, folders):
    writer, inputs = example_inputs(load_model(f"hf:{folders(family)}"))
    diagnosis = diagnose(writer, inputs)
    try:
        for method in ("rollout", "gradcam"):
            create_method(method, writer).attribute(inputs, writer.score(0))
    except UnsupportedOperator:
        assert "attention-based methods do not apply to it" in diagnosis.verdict
        assert isinstance(diagnosis.layout, str)
    else:
        assert "rollout and gradcam work as well" in diagnosis.verdict
        assert not isinstance(diagnosis.layout, str)


def test_the_doctor_asks_by_itself(folders, capsys):
    assert cli.run(["doctor", "--model", f"hf:{folders('Qwen2-VL')}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] < 1e-9
