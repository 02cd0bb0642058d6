"""Explain why a page fits a query: ColPali and ColQwen2 from folders, in total and for each word."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from dave_vit import cli, create_method, load_model
from dave_vit.errors import OptionError
from dave_vit.models.retrieval import MARKS, total_score
from writer_folders import saved_folders  # noqa: F401

QUERY = "the red table"


@pytest.fixture
def page(tmp_path) -> Image.Image:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (84, 84, 3), dtype=np.uint8))
    image.save(tmp_path / "page.png")
    return image


@pytest.mark.parametrize("family", ["ColPali", "ColQwen2"])
def test_the_total_is_the_score_of_the_processor(family, folders, page):
    model = load_model(f"hf:{folders(family)}")
    with torch.no_grad():
        queries = model.model(**model.processor(text=[QUERY])).embeddings
        inputs = {name: value for name, value in model.processor(images=[page]).items() if name != "labels"}
        pages = model.model(**inputs).embeddings
        expected = model.processor.score_retrieval(queries, pages)
    matched = model.with_prompt(page, QUERY)
    assert matched.class_names == [*QUERY.split(), MARKS]
    scores = matched(matched.preprocess(page))
    assert scores.shape == (1, 4)
    torch.testing.assert_close(total_score(scores), expected[0].to(scores), rtol=1e-3, atol=1e-3)


def test_the_maps_of_the_words_add_up_to_that_of_the_total(folders, page):
    model = load_model(f"hf:{folders('ColPali')}").with_prompt(page, QUERY)
    method, inputs = create_method("effective", model), model.preprocess(page)
    words = sum(method.attribute(inputs, lambda scores, word=word: scores[:, word]) for word in range(4))
    torch.testing.assert_close(method.attribute(inputs, total_score), words, rtol=1e-4, atol=1e-5)


def test_files_of_a_page(folders, page, tmp_path, capsys):
    line = ["explain", str(tmp_path / "page.png"), "--model", f"hf:{folders('ColPali')}", "--method", "effective"]
    assert cli.run([*line, "--prompt", QUERY, "--out", str(tmp_path / "out"), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert [word["text"] for word in record["words"]] == [*QUERY.split(), MARKS]
    assert record["value"] == pytest.approx(sum(word["score"] for word in record["words"]), rel=1e-5)
    (figure,) = (tmp_path / "out").glob("*.words.png")
    assert figure.is_file()
    (arrays,) = (tmp_path / "out").glob("*.npz")
    assert set(np.load(arrays)) == {"map", "word1", "word2", "word3", "word4"}
    assert cli.run([*line, "--prompt", QUERY, "--score", "class:red", "--out", str(tmp_path / "red"), "--json"]) == 0
    (red,) = json.loads(capsys.readouterr().out)
    assert red["value"] == pytest.approx(record["words"][1]["score"], rel=1e-5)


def test_a_query_is_needed(folders, page, tmp_path, capsys):
    with pytest.raises(OptionError, match="give one, --prompt"):
        load_model(f"hf:{folders('ColPali')}").with_prompt(page)
    line = ["explain", str(tmp_path / "page.png"), "--model", f"hf:{folders('ColPali')}", "--out", str(tmp_path)]
    assert cli.run(line) == 2
    assert "scores pages by a query" in capsys.readouterr().err
