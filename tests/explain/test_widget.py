"""Explanations in notebooks: the traits of the widget, and the picture where there is none."""

from __future__ import annotations

import base64
import io
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import dave_vit
from dave_vit import create_method, load_model
from dave_vit.data import open_dataset
from dave_vit.maps import normalize
from dave_vit.viz.widget import read_script, widget, widget_traits
from tiny_models import SIZE
from web_fixtures import NAMES, adapter, make_picture


def decoded(traits: dict, view: str) -> np.ndarray:
    """The numbers of a view, as the widget reads them, [K, H, W]."""
    roots = np.asarray(Image.open(io.BytesIO(traits[view]))).reshape(-1, SIZE, SIZE) / 127 - 1.0
    return np.array(traits["tops"][view])[:, None, None] * roots * np.abs(roots)


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
    sent, limit = decoded(traits, "map"), traits["limits"]["map"][2]
    assert limit == pytest.approx(float(normalize(explanation.map[1, :1])[1]))
    whole = explanation.map[1, 0].numpy().clip(-4 * limit, 4 * limit)
    assert np.abs(sent[2] - whole).max() < 8 * limit / 127  # of the largest number: half a level of 127
    np.testing.assert_allclose(sent[2][np.abs(whole) < limit], whole[np.abs(whole) < limit], atol=limit / 60)
    certainty = explanation.certainty.flatten(0, 1).numpy().clip(0, 5)
    assert traits["limits"]["certainty"] == [5.0] * 4  # as in every figure
    assert np.abs(decoded(traits, "certainty") - certainty).max() < 10 / 48 + 10 / 254  # half a level, and half a byte
    assert sent.min() < 0 < sent.max()
    assert not traits["signed"]  # the same as the map
    assert traits["tops"]["signed"] == traits["tops"]["map"]
    pixels = np.asarray(Image.open(io.BytesIO(traits["pictures"]))).reshape(2, SIZE, SIZE, 3).astype(float)
    rest = (pixels[0] - np.asarray(make_picture().resize((SIZE, SIZE)))).reshape(4, SIZE // 4, 4, SIZE // 4, 3)
    assert np.abs(rest.mean((1, 3))).max() < 4  # lossy: of random colours only the average of a block is kept


def test_a_widget_holds_what_speaks_against_a_class_where_the_map_does_not(explanation):
    kept = replace(explanation, attribution=explanation.attribution.clamp(min=0), is_signed=False)
    traits, signed = widget_traits(kept), explanation.mean.flatten(0, 1).numpy()
    assert (decoded(traits, "signed") * signed >= 0).all()
    assert decoded(traits, "signed").min() < 0 == decoded(traits, "map").min()


def test_a_widget_says_how_probable_its_classes_are(explanation):
    model = adapter()
    inputs = model.preprocess([make_picture(), make_picture((32, 32))])
    chances = model(inputs).detach().softmax(1)
    expected = [chances[0, 0], chances[0, 1], chances[1, 2], chances[1, 3]]
    np.testing.assert_allclose(widget_traits(explanation)["probabilities"], [float(one) for one in expected], rtol=1e-5)
    others = [create_method("saliency", model).explain(inputs), dave_vit.explain(inputs, model, method="saliency")]
    assert widget_traits(others[0])["probabilities"] == []
    np.testing.assert_allclose(widget_traits(others[1])["probabilities"], chances.amax(1).tolist(), rtol=1e-5)


@pytest.mark.realdata
def test_five_explanations_of_a_notebook_take_less_than_a_megabyte(data_dir):
    """Pictures and state of the widget, as Jupyter saves both: binary parts in base64, in lines of 76 letters."""
    pytest.importorskip("anywidget", reason="needs the extra notebook")
    model = load_model("timm:deit_tiny_patch16_224", data_dir / "weights" / "deit_tiny_patch16_224.safetensors")
    data = open_dataset(f"imagenet:{data_dir / 'imagenet-val-300'}", 5)
    total = 0
    for index in range(5):
        explanation = dave_vit.explain(data.image(index), model, samples=8)
        traits = {**widget_traits(explanation), "_esm": read_script()}
        binary = [value for value in traits.values() if isinstance(value, bytes)]
        text = {name: value for name, value in traits.items() if not isinstance(value, bytes)}
        shown = explanation._repr_mimebundle_()
        assert "application/vnd.jupyter.widget-view+json" in shown
        total += len(json.dumps([text, shown])) + sum(len(base64.encodebytes(value)) for value in binary)
    assert total < 1e6


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
