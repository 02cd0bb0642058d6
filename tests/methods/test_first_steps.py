"""What people try first in Python: a file instead of a tensor, a name instead of a model, a misspelt option."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from dave_vit import DAVE, create_method
from dave_vit.engine.targets import class_names
from dave_vit.errors import InputError, OptionError
from tiny_adapters import adapter
from tiny_models import CLASSES, SIZE, images, vit


def test_a_file_and_a_picture_are_preprocessed(tmp_path):
    model = adapter()
    path = tmp_path / "photo.png"
    picture = Image.effect_noise((40, 30), 60).convert("RGB")
    picture.save(path)
    method = create_method("input_x_gradient", model)
    expected = method.attribute(model.preprocess(picture), 1)
    for given in (path, str(path), picture):
        assert torch.equal(method.attribute(given, 1), expected)
    *_, last = DAVE(model, samples=2).refine(str(path), 1)
    assert last.attribution.shape == expected.shape


def test_a_picture_for_a_bare_model_says_what_to_give(tmp_path):
    with pytest.raises(InputError, match="has no preprocess; give a preprocessed float tensor"):
        DAVE(vit()).explain("photo.jpg")
    with pytest.raises(InputError, match="inputs are of type list; give a float tensor"):
        DAVE(vit()).explain([1, 2])


def test_the_name_of_a_model_says_how_to_load_it():
    with pytest.raises(InputError, match=r"the model is 'timm:vit'; .* dave_vit.load_model\('timm:vit'\)"):
        DAVE("timm:vit")
    with pytest.raises(InputError, match="load_model"):
        create_method("saliency", "timm:vit")


def test_a_misspelt_option_suggests_the_nearest():
    with pytest.raises(OptionError, match="no option 'sample'; did you mean samples"):
        DAVE(vit(), sample=5)
    with pytest.raises(OptionError, match="no option 'sample'; did you mean samples"):
        create_method("rise", vit(), sample=5)
    with pytest.raises(OptionError, match=r"no option 'xyz'; it takes: .*samples"):
        create_method("rise", vit(), xyz=5)


def test_the_heatmap_is_between_zero_and_one():
    explanation = DAVE(vit(), samples=2).explain(images(2), [[0, 1], [2, 3]])
    assert explanation.heatmap.shape == (2, 2, SIZE, SIZE)
    assert float(explanation.heatmap.min()) == 0
    assert float(explanation.heatmap.max()) == 1
    one = create_method("saliency", vit()).explain(images(1), 0)
    assert one.heatmap.shape == (1, SIZE, SIZE)


def test_the_repr_is_short():
    explanation = DAVE(vit(), samples=3).explain(images(2), 1)
    assert repr(explanation) == f"Explanation(2 images [3, {SIZE}, {SIZE}], target [1, 1], 3 samples)"
    many = create_method("saliency", vit()).explain(images(30), 1)
    assert len(repr(many)) < 100
    scored = create_method("saliency", vit()).explain(images(1), lambda out: out[:, 0])
    assert repr(scored) == f"Explanation(1 image [3, {SIZE}, {SIZE}], a score)"


def test_names_of_a_transformers_model_are_targets():
    model = vit()
    model.config = SimpleNamespace(id2label={index: f"thing {index}" for index in range(CLASSES)})
    assert class_names(model)[2] == "thing 2"
    expected = create_method("saliency", model).attribute(images(1), 2)
    assert torch.equal(create_method("saliency", model).attribute(images(1), "thing 2"), expected)
