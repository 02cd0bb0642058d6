"""Classes by what people type."""

from __future__ import annotations

import pytest

from dave_vit.data.classes import parse_targets
from dave_vit.engine.target_names import find_class
from dave_vit.errors import TargetError

NAMES = ["tench, Tinca tinca", "goldfish", "tabby, tabby cat", "tiger cat", "cat", "Egyptian cat", "catamaran"]


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("0", 0),
        ("6", 6),
        ("goldfish", 1),
        ("GoldFish ", 1),
        ("Tinca tinca", 0),  # a synonym
        ("cat", 4),  # the whole name goes before its parts
        ("egypt", 5),  # a part that only one has
        ("tiger", 3),
        ("tabby", 2),
    ],
)
def test_a_class_is_found(text, index):
    assert find_class(text, NAMES) == index


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("7", ["target 7", "0 to 6"]),
        ("-1", ["target -1", "0 to 6"]),
        ("ti", ["fits 3 classes", "0 tench", "3 tiger cat", "index"]),
        ("godlfish", ["no class", "did you mean 1 goldfish?"]),
        ("egiptian", ["no class", "did you mean 5 Egyptian cat?"]),  # a word of the name
        ("xyzzy", ["no class", "the model has 7"]),
        ("", ["no class"]),
    ],
)
def test_what_fits_none_or_several_is_explained(text, words):
    with pytest.raises(TargetError) as caught:
        find_class(text, NAMES)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_whole_words_go_before_parts_of_words():
    assert find_class("cat", ["catamaran", "tiger cat"]) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, [3]), ("top1", [3]), ("TOP2", [0]), ("top-3", [6]), ("all-top5", [3, 0, 6, 1, 2]), ("goldfish", [1])],
)
def test_targets_by_rank(text, expected):
    assert parse_targets(text, [3, 0, 6, 1, 2, 4, 5], NAMES) == expected


@pytest.mark.parametrize("text", ["top0", "top6", "top99"])
def test_a_rank_beyond_five_is_refused(text):
    with pytest.raises(TargetError, match="top1 to top5"):
        parse_targets(text, list(range(7)), NAMES)


def test_models_with_few_classes_have_a_shorter_top_five():
    assert parse_targets("all-top5", [1, 0], ["a", "b"]) == [1, 0]
    with pytest.raises(TargetError, match="top1 to top2"):
        parse_targets("top3", [1, 0], ["a", "b"])
