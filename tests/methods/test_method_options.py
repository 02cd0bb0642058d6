"""One reader of the options of methods, for the command line, the page and plans."""

from __future__ import annotations

from typing import get_args

import pytest

from dave_vit.errors import DaveError, OptionError
from dave_vit.evaluate import Plan
from dave_vit.methods import METHODS, create_method
from dave_vit.methods.options import check_options, declared_options, filter_options, max_samples, parse_options
from tiny_models import vit


@pytest.mark.parametrize("name", METHODS)
def test_what_is_listed_is_taken(name):
    model = vit()
    listed = {key: one.default for key, one in declared_options(name).items() if one.default is not None}
    if name != "bcos":  # which refuses models of other kinds
        create_method(name, model, **listed)
    assert "chunk" in declared_options(name)  # handed on to the base
    assert "model" not in declared_options(name)


def test_single_points_of_the_neighbourhood_are_options_of_dave():
    options = declared_options("dave")
    assert {"rotation", "noise", "noise_level", "antithetic", "samples", "preset"} <= set(options)
    assert get_args(options["noise"].type) == ("variance_preserving", "additive", "none")
    assert options["samples"].default is None  # the preset's own number
    assert declared_options("smoothgrad")["samples"].default == 50
    assert "rotation" in declared_options("equivariant")
    assert "noise" not in declared_options("equivariant")  # it never has any


def test_texts_are_read_as_json_or_as_words():
    texts = {"rotation": "0", "noise": "none", "scale": "[0.9, 1.1]", "wrap": "false", "chunk": "null"}
    assert parse_options("dave", texts) == {
        "rotation": 0,
        "noise": "none",
        "scale": [0.9, 1.1],
        "wrap": False,
        "chunk": None,
    }


@pytest.mark.parametrize(
    ("method", "texts", "words"),
    [
        ("dave", {"rotatoin": "0"}, "method 'dave' has no option 'rotatoin'; did you mean rotation"),
        ("effective", {"xyz": "0"}, "method 'effective' has no option 'xyz'; it takes: chunk"),
        ("rollout", {"heads": "sum"}, "heads of method 'rollout' is 'sum'; expected one of mean, max, min"),
        ("smoothgrad", {"samples": "2.5"}, "samples of method 'smoothgrad' is 2.5; expected int"),
        ("smoothgrad", {"level": "high"}, "level of method 'smoothgrad' is 'high'; expected float"),
        ("saliency", {"absolute": "no"}, "absolute of method 'saliency' is 'no'; expected bool"),
        ("dav", {}, "unknown method 'dav'"),
    ],
)
def test_what_a_method_does_not_take_is_one_line(method, texts, words):
    with pytest.raises(DaveError, match=words) as error:
        parse_options(method, texts)
    assert len(str(error.value).splitlines()) == 1


def test_values_go_where_they_are_taken():
    values = {"samples": 4, "steps": 5, "seed": None}
    assert filter_options("dave", **values) == {"samples": 4}
    assert filter_options("integrated_gradients", **values) == {"steps": 5}
    assert filter_options("effective", **values) == {}


def test_a_method_of_ones_own_is_read_too(monkeypatch):
    class Mine(METHODS["saliency"]):
        def __init__(self, model, width: Width = 3, **options) -> None:  # noqa: F821
            super().__init__(model, **options)

    monkeypatch.setitem(METHODS.data, "mine", Mine)
    assert list(declared_options("mine")) == [*declared_options("saliency"), "width"]
    assert parse_options("mine", {"width": "wide"}) == {"width": "wide"}  # its type is unknown
    with pytest.raises(OptionError, match="has no option 'with'; did you mean width"):
        parse_options("mine", {"with": "3"})


def test_plans_are_read_the_same_way():
    assert Plan.load({"methods": {"method": "dave", "options": {"rotation": 5}}}).methods[0].options == {"rotation": 5}
    with pytest.raises(OptionError, match="did you mean rotation"):
        Plan.load({"methods": {"method": "dave", "options": {"rotatoin": 5}}})
    assert check_options("dave", {"rotation": 5}) == {"rotation": 5}


@pytest.mark.parametrize(
    ("method", "options", "count"),
    [
        ("dave", {}, 20),
        ("dave", {"preset": "paper"}, 50),
        ("dave", {"samples": 7}, 7),
        ("dave", {"samples": "auto"}, 20),
        ("dave", {"samples": "auto", "limit": 12}, 12),
        ("equivariant", {}, 50),
        ("smoothgrad", {}, 50),
    ],
)
def test_how_many_samples_there_will_be(method, options, count):
    assert max_samples(method, options) == count


def test_what_a_method_cannot_take_is_left_out():
    assert filter_options("smoothgrad", samples="auto", seed=1) == {"seed": 1}
    assert filter_options("dave", samples="auto") == {"samples": "auto"}
