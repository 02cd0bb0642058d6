"""One call from an image to its explanation: `dave_vit.explain`, `dave_vit.pipeline` and what an explanation offers."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

import dave_vit
from dave_vit import Explanation
from dave_vit.errors import ImageError, InputError, MissingExtra, OptionError
from tiny_adapters import NAMES, adapter
from tiny_models import SIZE, huggingface_vit, images, vit

PICTURE = Image.effect_noise((40, 30), 60).convert("RGB")
COLOURS = np.asarray(PICTURE)


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return dave_vit.explain([PICTURE, PICTURE.rotate(90)], adapter(), [1, 2], samples=3)


@pytest.mark.parametrize(
    "form", ["path", "PIL", "bytes", "floats", "channels first", "batch", "tensor", "preprocessed"]
)
def test_every_form_of_an_image_gives_the_same_map(form, tmp_path):
    model = adapter()
    PICTURE.save(tmp_path / "photo.png")
    given = {
        "path": tmp_path / "photo.png",
        "PIL": PICTURE,
        "bytes": COLOURS,
        "floats": COLOURS / 255,
        "channels first": COLOURS.transpose(2, 0, 1),
        "batch": COLOURS[None],
        "tensor": torch.tensor(COLOURS).permute(2, 0, 1),
        "preprocessed": model.preprocess(PICTURE)[0].double().numpy(),
    }
    found = dave_vit.explain(given[form], model, 1, method="saliency")
    expected = dave_vit.create_method("saliency", model).attribute(model.preprocess(PICTURE), 1)
    torch.testing.assert_close(found.attribution, expected)


def test_a_spec_is_loaded(monkeypatch):
    monkeypatch.setattr("dave_vit.models.loading.load_model", lambda spec: adapter(spec))
    assert isinstance(dave_vit.explain(PICTURE, "timm:tiny", samples=2), Explanation)


def test_a_loaded_transformers_model_takes_its_processor():
    from transformers import ViTImageProcessor

    model, processor = huggingface_vit(), ViTImageProcessor(size={"height": SIZE, "width": SIZE})
    model.config.id2label = dict(enumerate(NAMES))
    found = dave_vit.explain(PICTURE, model, "dog", processor=processor, method="input_x_gradient")
    inputs = processor(images=PICTURE, return_tensors="pt")["pixel_values"]
    expected = dave_vit.create_method("input_x_gradient", model).attribute(inputs, 2)
    torch.testing.assert_close(found.attribution, expected)
    shown = torch.tensor(np.asarray(PICTURE.resize((SIZE, SIZE), Image.Resampling.BILINEAR)) / 255).permute(2, 0, 1)
    torch.testing.assert_close(found.subject.pictures[0].double(), shown, atol=0.01, rtol=0)


def test_a_function_or_the_configuration_of_timm_preprocesses_for_a_bare_model():
    half = transforms.Normalize([0.5] * 3, [0.5] * 3)
    steps = transforms.Compose([transforms.Resize((SIZE, SIZE)), transforms.ToTensor(), half])
    found = dave_vit.explain(PICTURE, vit(), 0, processor=steps, method="saliency")
    expected = dave_vit.create_method("saliency", vit()).attribute(steps(PICTURE)[None], 0)
    torch.testing.assert_close(found.attribution, expected)
    model = vit()
    model.pretrained_cfg = {"input_size": (3, SIZE, SIZE), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    assert dave_vit.explain(PICTURE, model, 0, method="saliency").attribution.shape == (1, 3, SIZE, SIZE)


def test_what_cannot_be_explained_says_why():
    with pytest.raises(InputError, match="give processor="):
        dave_vit.explain(PICTURE, vit())
    with pytest.raises(InputError, match="the image is of type int"):
        dave_vit.explain(3, adapter())
    with pytest.raises(ImageError, match="divide by 255"):
        dave_vit.explain(COLOURS.astype(float), adapter())
    with pytest.raises(ImageError, match=r"int64 with shape \(30, 40, 3\)"):
        dave_vit.explain(COLOURS.astype(np.int64), adapter())
    with pytest.raises(OptionError, match="did you mean samples"):
        dave_vit.explain(PICTURE, adapter(), sample=3)
    with pytest.raises(OptionError, match="processor is of type str"):
        dave_vit.explain(PICTURE, vit(), processor="vit")
    with pytest.raises(OptionError, match="unknown task 'image-classification'; there is 'image-attribution'"):
        dave_vit.pipeline("image-classification")


def test_a_pipeline_returns_dictionaries():
    model = adapter()
    attribute = dave_vit.pipeline("image-attribution", model=model, samples=2)
    row = attribute(PICTURE, target="dog")
    shares = model(model.preprocess(PICTURE)).detach().softmax(1)[0]
    assert (row["label"], row["target"]) == ("dog", 2)
    assert row["score"] == pytest.approx(float(shares[2]))
    assert row["heatmap"].shape == row["standard_error"].shape == (SIZE, SIZE)
    assert 0 <= row["heatmap"].min() <= row["heatmap"].max() == 1
    rows = attribute([PICTURE, COLOURS], [1, None])
    assert [each["target"] for each in rows] == [1, int(shares.argmax())]
    scored = attribute(PICTURE, lambda logits: logits[:, 0])
    assert scored["label"] is scored["score"] is None
    several = attribute(PICTURE, [[0, 2]])
    assert several["label"] == ["cat", "dog"]
    assert several["heatmap"].shape == (2, SIZE, SIZE)


def test_a_mask_is_where_the_heatmap_is_high(explanation):
    mask = explanation.mask(0.3)
    assert mask.dtype == torch.bool
    assert mask.shape == (2, SIZE, SIZE)
    assert torch.equal(mask, explanation.heatmap >= 0.3)
    assert 0 < int(mask.sum()) < mask.numel()


def test_a_table_has_a_row_for_each_map(explanation, monkeypatch):
    pytest.importorskip("pandas")
    table = explanation.to_dataframe()
    assert table["target"].tolist() == [1, 2]
    assert table["label"].tolist() == ["tiger cat", "dog"]
    assert table["samples"].tolist() == [3, 3]
    for number, row in table.iterrows():
        values = explanation.map[number]
        assert float(values[row["y"], row["x"]]) == float(values.max())
        assert row["positive"] + row["negative"] == pytest.approx(float(values.sum()), abs=1e-5)
    several = dave_vit.create_method("saliency", vit()).explain(images(2), [[0, 1], [2, 3]]).to_dataframe()
    assert several["image"].tolist() == [0, 0, 1, 1]
    assert several["target"].tolist() == [0, 1, 2, 3]
    assert several["noise_share"].isna().all()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match="pandas is not installed; run: pip install pandas"):
        explanation.to_dataframe()


def test_reports_show_it_as_html(explanation):
    assert explanation._repr_html_().startswith(
        '<img alt="Explanation(2 images [3, 32, 32], target [1, 2], 3 samples)"'
    )
