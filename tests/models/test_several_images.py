"""Prompts about several photographs: the library's own logits, parts that add up, and a map for each photograph."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from dave_vit import cli, conservation_gap, create_method, load_model
from dave_vit.checks.doctor import Float64Mode
from dave_vit.errors import InputError, ModelError, OptionError
from dave_vit.explanations.evidence import compute_evidence
from writer_folders import CAPTIONERS, PROCESSORS, QUESTION, SLOTS, saved_folders  # noqa: F401

QUICK = ("LLaVA", "Idefics 3", "Qwen3-VL", "LLaVA-NeXT")  # one of each form in which pictures are taken
ONE = ("BLIP-2", "InstructBLIP", "Florence-2", "Kosmos-2", *CAPTIONERS)
OTHER_FORM = ("LLaVA-OneVision", "Llama 3.2 Vision")
UNLIKE = {**dict.fromkeys(PROCESSORS, (60, 120)), "Perception LM": (120, 80)}  # width and height of the second
FAMILIES = [
    one if one in QUICK else pytest.param(one, marks=pytest.mark.slow)
    for one in PROCESSORS
    if one not in (*ONE, *OTHER_FORM)
]


def draw(seed: int, width: int = 120, height: int = 80) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_library_and_parts_add_up(family, folders):
    writer = load_model(f"hf:{folders(family)}").double()
    pair, slot = [draw(0), draw(1, *UNLIKE[family])], SLOTS.get(family, "<image> ")
    with Float64Mode():
        answered = writer.with_prompt(pair, QUESTION, max_tokens=3)
        inputs = writer.processor(images=[pair], text=[slot + slot + QUESTION], return_tensors="pt")
        own = {name: one.double() if one.is_floating_point() else one for name, one in inputs.items()}
        own.pop("labels", None)
        with torch.no_grad():
            expected = writer.model(**own).logits[0, -1]
            found = answered.with_answer([])(answered.inputs).logits[0, -1]
            alone = answered(answered.inputs).logits
            together = answered(torch.cat([0.5 * answered.inputs, answered.inputs])).logits
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)
        torch.testing.assert_close(together[1:], alone)
        assert (together[0] - alone[0]).abs().max() > 1e-6
        assert conservation_gap(answered, answered.inputs, answered.score(1)) < 1e-9
        attribution = create_method("effective", answered).attribute(answered.inputs, answered.score(1))
    assert attribution.shape == answered.inputs.shape
    assert attribution.abs().sum((0, 2, 3, 4)).min() > 0


@pytest.mark.parametrize("family", ONE)
def test_models_of_one_photograph_say_so(family, folders):
    prompt = None if family in CAPTIONERS else QUESTION
    with pytest.raises(ModelError, match="takes one photograph; leave out --together"):
        load_model(f"hf:{folders(family)}").with_prompt([draw(0), draw(1)], prompt)


@pytest.mark.parametrize("family", [*OTHER_FORM, "Perception LM"])
def test_photographs_that_take_another_form_together_are_refused(family, folders):
    pair = [draw(0), draw(1, 60, 120) if family == "Perception LM" else draw(1)]  # cut into another number of tiles
    with pytest.raises(ModelError, match="in another form where a prompt has several") as error:
        load_model(f"hf:{folders(family)}").with_prompt(pair, QUESTION)
    assert "\n" not in str(error.value)


class TestSlots:
    def test_each_photograph_stands_where_its_slot_is(self, folders):
        writer = load_model(f"hf:{folders('Qwen3-VL')}")
        pair = [draw(0), draw(1)]
        between = writer.with_prompt(pair, "cat <image> dog <image> on", answer="").token_ids[0].tolist()
        expected = writer.tokenizer("cat dog on", add_special_tokens=False)["input_ids"]
        framed = (58, 59, 60)  # the image and what is around it
        assert [token for token in between if token not in framed] == expected
        cat, dog, on = (between.index(token) for token in expected)
        assert 60 in between[cat:dog]
        assert 60 in between[dog:on]
        first = writer.with_prompt(pair, "cat dog on", answer="").token_ids[0].tolist()
        assert first[-3:] == expected
        own = writer.with_prompt(pair, "cat <|image_pad|> dog <|image_pad|> on", answer="")
        assert own.token_ids[0].tolist() == between

    def test_their_number_is_that_of_the_photographs(self, folders):
        writer = load_model(f"hf:{folders('Qwen3-VL')}")
        with pytest.raises(OptionError, match="1 of 2 image slots; give one for each file, or none"):
            writer.with_prompt([draw(0), draw(1)], "<image> on")
        with pytest.raises(OptionError, match="several with --together"):
            writer.with_prompt(draw(0), "<image> on")

    def test_no_photograph(self, folders):
        with pytest.raises(InputError, match="no pictures"):
            load_model(f"hf:{folders('Qwen3-VL')}").with_prompt([], "on")


def test_the_part_of_the_image_is_the_sum_of_those_of_all(folders):
    answered = load_model(f"hf:{folders('LLaVA')}").double().with_prompt([draw(0), draw(1)], QUESTION, max_tokens=2)
    for evidence in compute_evidence(answered, answered.scores([0, 1]), views=2):
        assert len(evidence.images) == 2
        assert sum(part.value for part in evidence.images) == pytest.approx(evidence.parts["image"].value, abs=1e-12)
        assert sum(part.value for part in evidence.parts.values()) == pytest.approx(evidence.score, abs=1e-9)
        assert f"({evidence.images[0].value:+.2f}, {evidence.images[1].value:+.2f})" in evidence.describe()


class TestCommand:
    @pytest.fixture
    def files(self, tmp_path):
        """A photograph that is nothing but a mark in its lower right corner, and a tall one of nothing at all."""
        wide, tall = (np.full((*size, 3), 128, dtype=np.uint8) for size in ((80, 120), (120, 60)))
        wide[-32:, -32:] = 255
        names = [str(tmp_path / name) for name in ("wide.png", "tall.png")]
        for name, pixels in zip(names, (wide, tall), strict=True):
            Image.fromarray(pixels).save(name)
        return names

    @pytest.mark.parametrize("order", [1, -1])
    def test_a_map_for_each_photograph_and_word(self, order, files, folders, tmp_path, capsys):
        files = files[::order]
        line = ["explain", *files, "--together", "--model", f"hf:{folders('Qwen3-VL')}", "--prompt", QUESTION]
        line += ["--answer", "red cat", "--out", str(tmp_path / "out"), "--json", "--method"]
        assert cli.run([*line, "effective"]) == 0
        (record,) = json.loads(capsys.readouterr().out)
        assert (record["source"], record["together"]) == (files[0], files[1:])
        parts = [each["evidence"]["images"] for each in record["explained"]]
        assert [len(each) for each in parts] == [2, 2]
        with np.load(next(path for path in record["files"] if path.endswith(".npz"))) as arrays:
            maps = [arrays[f"word2_image{number}"] for number in (1, 2)][::order]
            assert len(arrays.files) == 4
        assert [one.shape for one in maps] == [(80, 120), (120, 60)]
        relevance = np.abs(maps[0])
        assert relevance[-32:, -32:].sum() > 0.9 * relevance.sum() > 0
        assert np.abs(maps[1]).sum() < 1e-6 * relevance.sum()
        assert cli.run([*line, "rollout"]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_one_file_is_asked_about_by_itself(self, files, folders, tmp_path, capsys):
        line = ["explain", files[0], "--model", f"hf:{folders('Qwen3-VL')}", "--prompt", QUESTION, "--json"]
        line += ["--answer", "red", "--method", "effective", "--out", str(tmp_path)]
        values = []
        for more in ([], ["--together"]):
            assert cli.run([*line, *more]) == 0
            values.append(json.loads(capsys.readouterr().out)[0]["explained"][0]["value"])
        assert values[0] == values[1]

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            ([], "builtin explains classes and takes no together; leave --together out"),
            (["--animate", "gif", "--model", "builtin-captions"], "animations are of one photograph"),
            (["--model", "builtin-captions"], "takes one photograph; leave out --together"),
        ],
    )
    def test_refusals(self, more, said, files, tmp_path, capsys):
        assert cli.run(["explain", *files, "--together", "--out", str(tmp_path / "out"), *more]) == 2
        assert said in capsys.readouterr().err
