"""`dave explain --prompt`: which words, how many tokens, and what goes wrong, each in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import writer_folders
from dave_vit import cli

pytest.importorskip("transformers", reason="needs the extra hf")
QUESTION = "what is on the table ?"
TEXT_ONLY = "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
TEXT_ONLY += "{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return writer_folders.save("LLaVA", tmp_path_factory.mktemp("writer"))


@pytest.fixture
def explain(tmp_path, capsys):
    """Runs the command on a photograph; returns its exit status, records and error."""
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8)).save(
        tmp_path / "photo.png"
    )

    def run(folder: Path, *more: str) -> tuple[int, list, str]:
        line = ["explain", str(tmp_path / "photo.png"), "--model", f"hf:{folder}", "--method", "input_x_gradient"]
        code = cli.run([*line, "--out", str(tmp_path / "out"), "--json", *more])
        out, err = capsys.readouterr()
        return code, json.loads(out) if code == 0 else [], err

    return run


def test_words_are_chosen_by_number_or_text(explain, folder):
    line = ("--prompt", QUESTION, "--answer", "a red cat and a blue dog")
    code, (record,), _ = explain(folder, *line, "--words", "3,Dog,a")
    assert code == 0
    assert [word["word"] for word in record["explained"]] == [3, 7, 1, 5]
    code, _, err = explain(folder, *line, "--words", "bird")
    assert code == 2
    assert err == "error: no word bird in 'a red cat and a blue dog', which has words 1 to 7; see --answer\n"
    assert "no word 8 in" in explain(folder, *line, "--words", "8")[2]
    assert "expected words or their numbers" in explain(folder, *line, "--words", "1,,2")[2]


def test_an_answer_has_at_most_so_many_tokens(explain, folder):
    code, (record,), _ = explain(folder, "--prompt", QUESTION, "--max-tokens", "2", "--words", "1")
    assert code == 0
    assert len(record["tokens"]) == 2
    assert (
        "takes no max_tokens; leave --max-tokens out" in explain(folder, "--score", "token:cat", "--max-tokens", "2")[2]
    )


def test_the_time_of_all_words_is_estimated_before(explain, folder, monkeypatch):
    monkeypatch.setattr("dave_vit.explanations.explainer._SLOW", 0.0)
    monkeypatch.setattr("dave_vit.explanations.explainer._MANY_PASSES", 9)
    line = ("--prompt", QUESTION, "--answer", "a red cat", "--method", "dave", "--samples", "3")
    code, _, err = explain(folder, *line)
    (note,) = [line for line in err.splitlines() if "passes per map" in line]
    assert code == 0
    assert note.startswith("note: dave takes 3 passes per map: about ")
    assert note.endswith(" s for 3 maps")


def test_a_prompt_has_one_slot_for_the_photograph(explain, folder, tmp_path):
    code, _, err = explain(folder, "--prompt", f"<image> {QUESTION}")
    assert (code, err.count("\n")) == (2, 1)
    assert "has an image slot of its own, <image>; leave it out" in err
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text(TEXT_ONLY)
    code, _, err = explain(copy, "--prompt", QUESTION)
    assert (code, err.count("\n")) == (2, 1)
    assert "has no image slot, so that" in err


@pytest.mark.parametrize(
    ("missing", "message"), [("tokenizer", "its Processor cannot be read"), ("processor", "is missing")]
)
def test_a_folder_without_processor_or_tokenizer(explain, folder, tmp_path, missing, message):
    copy = shutil.copytree(folder, tmp_path / "copy")
    for file in copy.glob(f"{missing}*"):
        file.unlink()
    code, _, err = explain(copy, "--prompt", QUESTION)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert "save_pretrained" in err
