"""Data sets by their specs: class folders, COCO, VOC and the embedded one, on tiny copies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dave_vit.data import DATASETS, open_dataset
from dave_vit.errors import DataError, ImageError, OptionError, UnknownName


def picture(path: Path, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 120, 30)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("dog/b.png", "cat/a.jpg", "cat/c.png"):
        picture(tmp_path / name)
    return tmp_path


def test_class_folders(folder):
    data = open_dataset(f"folder:{folder}")
    assert data.class_names == ["cat", "dog"]
    assert [(item.name, item.label) for item in data] == [("cat/a.jpg", 0), ("cat/c.png", 0), ("dog/b.png", 1)]
    assert data.image(0).size == (40, 30)
    assert data.mask(0) is None
    assert len(open_dataset(f"folder:{folder}", limit=2)) == 2


def test_class_folders_with_boxes_and_masks(folder):
    table = "image,left,top,right,bottom\ncat/a.jpg,1,2,3,4\ncat/a.jpg,5,6,7.5,8\n"
    (folder / "boxes.csv").write_text(table)
    pixels = np.zeros((30, 40), np.uint8)
    pixels[3, 5] = 255
    (folder / "masks" / "dog").mkdir(parents=True)
    Image.fromarray(pixels).save(folder / "masks" / "dog" / "b.png")
    data = open_dataset(f"folder:{folder}")
    assert data.class_names == ["cat", "dog"]  # masks are no class
    assert data[0].boxes == ((1, 2, 3, 4), (5, 6, 7.5, 8))
    assert np.argwhere(data.mask(2)).tolist() == [[3, 5]]


def test_a_folder_without_classes_has_no_labels(tmp_path):
    picture(tmp_path / "x.png")
    data = open_dataset(f"folder:{tmp_path}")
    assert [(item.name, item.label) for item in data] == [("x.png", None)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("image,x0,y0,x1,y1\n", "expected image, left, top, right, bottom"),
        ("image,left,top,right,bottom\ncat/a.jpg,1,2,3\n", "line 2: expected four numbers"),
        ("image,left,top,right,bottom\ncat/a.jpg,1,2,x,4\n", "line 2: expected four numbers"),
        ("image,left,top,right,bottom\na.jpg,1,2,3,4\n", "no image 'a.jpg'"),
    ],
)
def test_a_malformed_table_of_boxes_is_named(folder, table, message):
    (folder / "boxes.csv").write_text(table)
    with pytest.raises(DataError, match=message):
        open_dataset(f"folder:{folder}")


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    for name in ("1.jpg", "2.jpg"):
        picture(tmp_path / "val2017" / name)
    boxes = [(1, 18, [1, 2, 10, 20], 0), (1, 3, [0, 0, 5, 5], 0), (1, 18, [8, 8, 2, 2], 0), (2, 3, [1, 1, 3, 3], 1)]
    content = {
        "images": [{"id": 1, "file_name": "1.jpg"}, {"id": 2, "file_name": "2.jpg"}],
        "categories": [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}],
        "annotations": [{"image_id": i, "category_id": k, "bbox": at, "iscrowd": c} for i, k, at, c in boxes],
    }
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    return tmp_path


def test_coco_gives_an_item_per_image_and_category(coco):
    for spec in (f"coco:{coco}", f"coco:{coco}/annotations/instances_val2017.json"):
        data = open_dataset(spec)
        assert data.class_names == ["car", "dog"]
        assert [(item.name, item.label) for item in data] == [("1.jpg#car", 0), ("1.jpg#dog", 1)]  # no crowd
        assert data[1].boxes == ((1, 2, 11, 22), (8, 8, 10, 10))
        assert data[0].picture == data[1].picture == "1.jpg"
        assert data.image(1).size == (40, 30)


def test_what_coco_lacks_is_said(coco):
    (coco / "val2017").rename(coco / "elsewhere")
    with pytest.raises(DataError, match=r"no image '1.jpg'; looked in"):
        open_dataset(f"coco:{coco}")
    path = coco / "annotations" / "instances_val2017.json"
    for text in ("{", "[]", '{"images": []}'):
        path.write_text(text)
        with pytest.raises(DataError, match="expected a JSON file with images, categories and annotations"):
            open_dataset(f"coco:{coco}")
    path.unlink()
    with pytest.raises(DataError, match="no annotations; looked for"):
        open_dataset(f"coco:{coco}")


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    thing = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>2</ymin><xmax>9</xmax><ymax>8</ymax></bndbox></object>"
    (tmp_path / "Annotations").mkdir()
    for name, objects in (("a", ["person", "dog", "dog"]), ("b", ["cat"]), ("c", [])):
        picture(tmp_path / "JPEGImages" / f"{name}.jpg")
        body = "".join(thing.format(kind, number) for number, kind in enumerate(objects))
        (tmp_path / "Annotations" / f"{name}.xml").write_text(f"<annotation>{body}</annotation>")
    return tmp_path


def test_voc_gives_an_item_per_image_and_class(voc):
    data = open_dataset(f"voc:{voc}")
    assert len(data.class_names) == 20
    assert [(item.name, data.class_names[item.label]) for item in data] == [
        ("a.jpg#dog", "dog"),
        ("a.jpg#person", "person"),
        ("b.jpg#cat", "cat"),
    ]
    assert data[0].boxes == ((1, 2, 9, 8), (2, 2, 9, 8))
    (voc / "ImageSets" / "Main").mkdir(parents=True)
    (voc / "ImageSets" / "Main" / "val.txt").write_text("b\n")
    assert [item.name for item in open_dataset(f"voc:{voc}")] == ["b.jpg#cat"]


def test_what_voc_lacks_is_said(voc, tmp_path):
    (voc / "Annotations" / "a.xml").write_text("<annotation>")
    with pytest.raises(DataError, match=r"a\.xml: expected an <annotation>"):
        open_dataset(f"voc:{voc}")
    with pytest.raises(DataError, match="JPEGImages and Annotations"):
        open_dataset(f"voc:{tmp_path / 'JPEGImages'}")


def test_builtin_pairs_give_an_item_per_target():
    data = open_dataset("builtin:pair", limit=3)
    assert len(data) == 3
    first, second = data[0], data[1]
    assert first.picture == second.picture != data[2].picture
    assert first.label != second.label
    assert (data.mask(0) & data.mask(1)).sum() == 0
    assert data.image(0).tobytes() == data.image(1).tobytes()
    left, top, right, bottom = map(int, first.boxes[0])
    assert data.mask(0)[top:bottom, left:right].sum() == data.mask(0).sum() > 0
    assert len({item.name for item in data}) == 3


def test_builtin_specs():
    assert len(open_dataset("builtin")) == 1000
    assert open_dataset("builtin:plain", 4).digest() != open_dataset("builtin:plain", 5).digest()
    assert open_dataset("builtin:single:unseen", 2)[0].name.startswith("single-unseen")


def test_another_seed_gives_fresh_pictures():
    usual, same, fresh = (open_dataset(f"builtin{rest}", 1) for rest in ("", ":single:seen:0", ":single:seen:7"))
    assert usual.digest() == same.digest() != fresh.digest()
    assert np.array_equal(usual.image(0), same.image(0))
    assert not np.array_equal(usual.image(0), fresh.image(0))
    for wrong in ("builtin:single:seen:x", "builtin:single:seen:1:2"):
        with pytest.raises(OptionError, match="builtin:SPLIT:FAMILY:SEED"):
            open_dataset(wrong)
    with pytest.raises(OptionError, match="split 'triple'"):
        open_dataset("builtin:triple")


def test_the_digest_follows_the_content_and_not_the_place(folder, tmp_path_factory):
    before = open_dataset(f"folder:{folder}").digest()
    elsewhere = folder.rename(tmp_path_factory.mktemp("moved") / "x")
    assert open_dataset(f"folder:{elsewhere}").digest() == before
    picture(elsewhere / "cat" / "a.jpg", (80, 90))
    assert open_dataset(f"folder:{elsewhere}").digest() != before


def test_specs_that_name_nothing_are_refused(tmp_path):
    with pytest.raises(UnknownName, match="did you mean imagenet"):
        open_dataset("imagnet:x")
    for spec, limit in (("coco:", None), ("builtin", 0)):
        with pytest.raises(OptionError):
            open_dataset(spec, limit)
    with pytest.raises(DataError, match="no images; looked in"):
        open_dataset(f"folder:{tmp_path}")
    with pytest.raises(DataError, match="no such folder"):
        open_dataset(f"voc:{tmp_path}/absent")


def test_a_registered_data_set_is_opened_by_its_name(folder, monkeypatch):
    monkeypatch.setattr(DATASETS, "data", dict(DATASETS.data))
    calls = []

    @DATASETS.register("mine")
    def mine(rest, limit):
        calls.append((rest, limit))
        return open_dataset(f"folder:{folder}", limit)

    assert len(open_dataset("mine:a:b", 2)) == 2
    assert calls == [("a:b", 2)]
    with pytest.raises(UnknownName, match="did you mean mine"):
        open_dataset("min:x")


def test_a_file_that_is_no_image_is_named(folder):
    (folder / "cat" / "a.jpg").write_bytes(b"text")
    with pytest.raises(ImageError, match=r"a\.jpg"):
        open_dataset(f"folder:{folder}").image(0)
