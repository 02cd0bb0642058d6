"""ImageNet in its layouts, on a tiny copy; and the real one where it is present."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dave_vit.data import DATASETS, open_dataset
from dave_vit.data.batches import load_batch
from dave_vit.data.geometry import GeometryCache
from dave_vit.data.sets.imagenet import ImageNet
from dave_vit.errors import DataError

XML = "<annotation>{}</annotation>"
OBJECT = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"


def picture(path: Path, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 120, 30)).save(path, "JPEG")


@pytest.fixture
def kaggle(tmp_path: Path) -> Path:
    for name in ("b", "a", "c"):
        picture(tmp_path / "images" / f"{name}.JPEG")
    (tmp_path / "LOC_synset_mapping.txt").write_text("n00000001 tench, Tinca tinca\nn00000002 goldfish\n")
    rows = ["ImageId,PredictionString", "a,n00000002 1 2 20 25 ", "b,n00000001 0 0 9 9 n00000001 10 10 20 20 "]
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join([*rows, "elsewhere,n00000001 1 1 2 2"]))
    return tmp_path


def test_kaggle_layout(kaggle):
    data = ImageNet(kaggle)
    assert [(item.name, item.label) for item in data] == [("images/a.JPEG", 1), ("images/b.JPEG", 0)]
    assert data[1].boxes == ((0, 0, 9, 9), (10, 10, 20, 20))
    assert data.class_names == ["tench, Tinca tinca", "goldfish"]
    assert data.unlabelled == 1
    assert data.image(0).size == (40, 30)
    assert len(ImageNet(kaggle, limit=1)) == 1


def test_flat_folder_with_xml(tmp_path):
    picture(tmp_path / "ILSVRC2012_val_00000001.JPEG")
    folder = tmp_path / "ILSVRC2012_bbox_val_v3" / "val"
    folder.mkdir(parents=True)
    objects = [("n01443537", 1, 2, 3, 4), ("n01440764", 5, 5, 6, 6), ("n01443537", 7, 8, 9, 10)]
    (folder / "ILSVRC2012_val_00000001.xml").write_text(XML.format("".join(OBJECT.format(*row) for row in objects)))
    item = ImageNet(tmp_path)[0]
    assert item.label == 1  # numbered as timm does, without a mapping in the folder
    assert item.boxes == ((1, 2, 3, 4), (7, 8, 9, 10))


def test_class_folders(tmp_path):
    picture(tmp_path / "val" / "n01443537" / "x.JPEG")
    picture(tmp_path / "val" / "n01440764" / "y.JPEG")
    data = ImageNet(tmp_path)
    names = ["val/n01443537/x.JPEG", "val/n01440764/y.JPEG"]
    assert [(item.name, item.label, item.boxes) for item in data] == [(names[0], 1, ()), (names[1], 0, ())]


def test_images_of_one_stem_have_names_of_their_own(tmp_path, monkeypatch):
    for folder in ("n01443537", "n01440764"):
        picture(tmp_path / "val" / folder / "0.JPEG")
        picture(tmp_path / "val" / folder / "0.png")
    data = open_dataset(f"imagenet:{tmp_path}")
    assert len({item.name for item in data}) == len(data) == 4
    data.items.append(data.items[0])
    monkeypatch.setattr(DATASETS, "data", {"twice": lambda rest, limit: data})
    with pytest.raises(DataError, match=r"2 images are called 'val/.*/0.JPEG'; give each a name of its own"):
        open_dataset("twice")


@pytest.mark.parametrize("row", ["a,n00000002 1 2 20", "a,", "a", "a,n00000002 1 2 x 5"])
def test_a_malformed_table_is_named_with_its_line(kaggle, row):
    (kaggle / "LOC_val_solution.csv").write_text(f"ImageId,PredictionString\n{row}\n")
    with pytest.raises(DataError, match=r"LOC_val_solution.csv, line 2: expected"):
        ImageNet(kaggle)


def test_what_is_missing_is_said(tmp_path, kaggle):
    with pytest.raises(DataError, match="no such folder"):
        ImageNet(tmp_path / "absent")
    (kaggle / "LOC_val_solution.csv").unlink()
    with pytest.raises(DataError, match=r"3 images and no label for any; looked for LOC_val_solution.csv"):
        ImageNet(kaggle)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images; looked in"):
        ImageNet(tmp_path / "empty")
    (kaggle / "LOC_val_solution.csv").write_text("a,n99999999 1 2 3 4\n")
    with pytest.raises(DataError, match="n99999999"):
        ImageNet(kaggle)


def test_a_damaged_xml_is_named(tmp_path):
    picture(tmp_path / "x.JPEG")
    folder = tmp_path / "ILSVRC2012_bbox_val_v3"
    folder.mkdir()
    for text in ("<annotation>", XML.format(""), XML.format(OBJECT.format("n01440764", "?", 1, 2, 3))):
        (folder / "x.xml").write_text(text)
        with pytest.raises(DataError, match=r"x\.xml: expected an <annotation>"):
            ImageNet(tmp_path)


def test_damaged_images_are_reported_and_skipped(kaggle):
    import torch

    path = kaggle / "images" / "a.JPEG"
    path.write_bytes(path.read_bytes()[:200])
    geometries = GeometryCache(lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255)
    batch = load_batch(ImageNet(kaggle), range(2), geometries)
    assert batch.indices == [1]
    assert [index for index, _ in batch.failures] == [0]
    assert "a.JPEG" in batch.failures[0][1]
    assert batch.regions.sum().item() == 81 + 100
    assert load_batch(ImageNet(kaggle), [0], geometries).indices == []


@pytest.mark.realdata
def test_real_boxes_follow_the_crop_of_timm(data_dir, deit_tiny):
    from timm.data import create_transform, resolve_model_data_config

    data = ImageNet(data_dir / "imagenet-val-300")
    assert len(data) == 300
    geometries = GeometryCache(create_transform(**resolve_model_data_config(deit_tiny)))
    batch = load_batch(data, range(8), geometries)
    for i, region in enumerate(batch.regions.numpy()):
        width, height = data.image(i).size
        scale = 248 / min(width, height)
        expected = np.zeros((224, 224), bool)
        shift = [(int(side * scale) - 224) / 2 for side in (width, height)]
        for left, top, right, bottom in data[i].boxes:
            x0, x1 = (round(max(0, v * scale - shift[0])) for v in (left, right))
            y0, y1 = (round(max(0, v * scale - shift[1])) for v in (top, bottom))
            expected[y0:y1, x0:x1] = True
        assert (region ^ expected).mean() < 0.02  # within a pixel along the edges
