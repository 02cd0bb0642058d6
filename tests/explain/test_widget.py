"""Explanations in notebooks: the traits of the widget, and the picture where there is none."""

from __future__ import annotations

import base64
import sys

import numpy as np
import pytest
import torch

from dave_vit import create_method
from dave_vit.viz.widget import read_script, widget, widget_traits
from tiny_models import SIZE
from web_fixtures import NAMES, adapter, make_picture


@pytest.fixture(scope="module")
def explanation():
    model = adapter()
    inputs = model.preprocess([make_picture(), make_picture((32, 32))])
    return create_method("dave", model, samples=3).explain(inputs, torch.tensor([[0, 1], [2, 3]]))


def test_a_widget_holds_all_maps_and_their_images(explanation):
    traits = widget_traits(explanation)
    assert (traits["width"], traits["height"], traits["images"]) == (SIZE, SIZE, 2)
    assert traits["names"] == NAMES[:4]
    assert traits["unit"] == "logit"
    maps = np.frombuffer(traits["map"], "<f4").reshape(4, SIZE, SIZE)
    np.testing.assert_array_equal(maps[2], explanation.map[1, 0].numpy())
    pixels = np.frombuffer(traits["pictures"], np.uint8).reshape(2, SIZE, SIZE, 4)
    np.testing.assert_allclose(pixels[0, ..., :3], np.asarray(make_picture().resize((SIZE, SIZE))), atol=1)
    assert len(traits["signed"]) == len(traits["certainty"]) == len(traits["map"])


def test_a_notebook_without_the_extra_shows_the_picture(explanation, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    shown = explanation._repr_mimebundle_()
    assert set(shown) == {"image/png", "text/plain"}
    assert base64.b64decode(shown["image/png"]).startswith(b"\x89PNG")
    assert shown["text/plain"] == repr(explanation)


def test_with_the_extra_it_shows_the_widget_and_keeps_the_picture(explanation):
    pytest.importorskip("anywidget", reason="needs the extra notebook")
    shown = explanation._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "image/png"} <= set(shown)
    assert widget(explanation).names == NAMES[:4]
    assert "export default { render }" in read_script()
