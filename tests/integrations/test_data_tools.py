"""Quantus, FiftyOne and COCO."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import dave_vit
from dave_vit.errors import InputError, MissingExtra
from dave_vit.integrations.fiftyone import add_heatmaps, encode_mask, to_coco_masks
from dave_vit.integrations.quantus import explain_func
from tiny_adapters import adapter
from tiny_models import SIZE, images, vit

X = images()


def test_the_function_for_quantus_returns_maps():
    found = explain_func(vit(), X.numpy(), np.array([0, 1, 2]), method="input_x_gradient", device="cpu")
    expected = dave_vit.create_method("input_x_gradient", vit()).explain(X, [0, 1, 2]).map
    np.testing.assert_allclose(found[:, 0], expected.numpy(), rtol=1e-5)


def test_quantus_scores_our_maps():
    quantus = pytest.importorskip("quantus")
    batch = {"model": vit(), "x_batch": X.numpy(), "y_batch": np.array([0, 1, 2]), "device": "cpu"}
    options = {"explain_func": explain_func, "explain_func_kwargs": {"method": "input_x_gradient"}}
    metric = quantus.MaxSensitivity(nr_samples=2, lower_bound=0.1, disable_warnings=True, return_aggregate=False)
    scores = metric(**batch, **options)
    assert len(scores) == 3
    assert all(score > 0 for score in scores)
    flipped = quantus.PixelFlipping(features_in_step=256, perturb_baseline="black", disable_warnings=True)
    assert len(flipped(**batch, **options)) == 3


class Sample(dict):
    """What FiftyOne's samples have in common with dictionaries, and a file."""

    def __init__(self, path) -> None:
        super().__init__()
        self.filepath, self.saved = str(path), 0

    def save(self) -> None:
        self.saved += 1


def test_heatmaps_of_fiftyone_lie_in_the_frame_of_the_photograph(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fiftyone", SimpleNamespace(Heatmap=lambda **fields: SimpleNamespace(**fields)))
    Image.effect_noise((64, 48), 60).convert("RGB").save(tmp_path / "photo.png")
    model, sample = adapter(), Sample(tmp_path / "photo.png")
    add_heatmaps([sample], model, 1, field="evidence", method="saliency")
    found = sample["evidence"]
    assert sample.saved == 1
    assert found.range == [0, 1]
    assert found.map.shape == (48, 64)
    heatmap = dave_vit.explain(sample.filepath, model, 1, method="saliency").heatmap
    enlarged = torch.nn.functional.interpolate(heatmap[None], (48, 64), mode="bilinear")[0, 0]
    np.testing.assert_allclose(found.map[4:-4, 4:-4], enlarged[4:-4, 4:-4], atol=0.05)
    with pytest.raises(InputError, match="processor="):
        add_heatmaps([sample], vit())
    monkeypatch.setitem(sys.modules, "fiftyone", None)
    with pytest.raises(MissingExtra, match="pip install fiftyone"):
        add_heatmaps([sample], model)


@pytest.mark.slow
def test_fiftyone_takes_the_heatmaps(tmp_path, monkeypatch):
    monkeypatch.setenv("FIFTYONE_DO_NOT_TRACK", "true")
    fiftyone = pytest.importorskip("fiftyone")
    Image.effect_noise((64, 48), 60).convert("RGB").save(tmp_path / "photo.png")
    sample = fiftyone.Sample(str(tmp_path / "photo.png"))
    monkeypatch.setattr(type(sample), "save", lambda self: None)  # a sample of no data set needs no database
    add_heatmaps([sample], adapter(), 1, method="saliency")
    assert isinstance(sample["dave"], fiftyone.Heatmap)
    assert sample["dave"].map.shape == (48, 64)
    assert sample["dave"].range == [0, 1]


def decode(rle: dict) -> np.ndarray:
    """Runs of zeros and ones in turn, down the columns."""
    values = np.concatenate([np.full(count, number % 2) for number, count in enumerate(rle["counts"])])
    return values.reshape(rle["size"][::-1]).T.astype(bool)


@pytest.mark.parametrize("fill", ["random", "ones", "zeros", "first"])
def test_masks_of_coco_decode_to_the_mask(fill):
    mask = torch.rand(7, 11, generator=torch.Generator().manual_seed(0)) < {"random": 0.5, "ones": 2.0}.get(fill, -1.0)
    mask[0, 0] = fill != "zeros"
    rle = encode_mask(mask)
    assert sum(rle["counts"]) == mask.numel()
    np.testing.assert_array_equal(decode(rle), mask.numpy())
    coco = pytest.importorskip("pycocotools.mask")
    np.testing.assert_array_equal(coco.decode(coco.frPyObjects(rle, 7, 11)).astype(bool), mask.numpy())


def test_masks_show_what_is_high_and_significant():
    explanation = dave_vit.DAVE(vit(), samples=4).explain(X, 1)
    expected = (explanation.heatmap >= 0.2) & (explanation.certainty >= 2)
    found = np.stack([decode(rle) for rle in to_coco_masks(explanation, 0.2)])
    np.testing.assert_array_equal(found, expected.numpy())
    plain = dave_vit.create_method("saliency", vit()).explain(X, 1)
    assert len(to_coco_masks(plain)) == 3
    assert to_coco_masks(plain)[0]["size"] == [SIZE, SIZE]
