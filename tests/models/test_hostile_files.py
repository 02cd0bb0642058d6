"""Every file that a stranger or a broken disk can hand over ends in one line that names it, soon and in little room."""

from __future__ import annotations

import io
import os
import time

import numpy as np
import pytest
import torch
from PIL import Image

from dave_vit import load_model
from dave_vit.data import open_dataset
from dave_vit.data.batches import load_batch
from dave_vit.data.geometry import GeometryCache
from dave_vit.data.images import MAX_RATIO, decode_image
from dave_vit.errors import DataError, DaveError, ImageError, ModelError, OptionError, escape_unprintable
from dave_vit.viz.panels import Panel, draw_side_by_side
from dave_vit.viz.plots import add_legend, create_plots
from hostile_files import BOX_TABLES, COCO_FILES, LONG, PICTURES, WEIGHTS, good_png, png


@pytest.mark.parametrize("name", PICTURES)
def test_no_picture_is_one_line(name):
    started = time.perf_counter()
    with pytest.raises(ImageError) as failure:
        load_model("builtin").preprocess(decode_image(PICTURES[name], "cat.png").image)
    assert str(failure.value).startswith("cat.png: ")
    assert len(str(failure.value).splitlines()) == 1
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("name", LONG)
def test_long_pictures_are_refused_before_they_are_resized(name, tmp_path):
    data = png(*LONG[name])
    with pytest.raises(ImageError, match=f"no side may be more than {MAX_RATIO} times the other"):
        decode_image(data, name)
    (tmp_path / "long.png").write_bytes(data)
    with pytest.raises(ImageError, match=r"long\.png: .* pixels; no side"):
        load_model("builtin").preprocess(tmp_path / "long.png")
    if max(LONG[name]) < 10**6:
        with pytest.raises(ImageError, match="no side may be more than"):
            load_model("builtin").preprocess(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("size", [(600, 60), (60, 600), (30, 30 * MAX_RATIO), (1, 1), (7, 700)])
def test_panoramas_are_prepared_as_ever(size):
    draw = np.random.default_rng(0)
    picture = Image.fromarray(draw.integers(0, 256, (size[1], size[0], 3)).astype(np.uint8))
    model = load_model("builtin")
    transformed = model.preprocessing.transform(picture)
    assert torch.equal(model.preprocess(picture), transformed.reshape(1, *transformed.shape[-3:]))


def test_pictures_that_cannot_be_prepared_do_not_end_a_batch(tmp_path):
    (tmp_path / "a.png").write_bytes(good_png())
    (tmp_path / "b.png").write_bytes(png(1, 39_999_999))
    (tmp_path / "c.png").write_bytes(good_png())
    batch = load_batch(open_dataset(f"folder:{tmp_path}"), [0, 1, 2], GeometryCache(load_model("builtin").preprocess))
    assert batch.indices == [0, 2]
    assert [index for index, _ in batch.failures] == [1]
    assert "b.png: 1 x 39999999 pixels" in batch.failures[0][1]


@pytest.mark.parametrize("error", [OverflowError("too far"), MemoryError(), RuntimeError("no kernel"), TypeError("x")])
def test_whatever_a_preprocessing_raises_drops_one_picture(tmp_path, error):
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(good_png(32 if name == "a" else 33))

    def preprocess(picture):
        if picture.width == 33:
            raise error
        return torch.zeros(1, 3, 8, 8)

    batch = load_batch(open_dataset(f"folder:{tmp_path}"), [0, 1], GeometryCache(preprocess))
    assert batch.indices == [0]
    assert (str(error) or type(error).__name__) in batch.failures[0][1]


@pytest.mark.parametrize("name", BOX_TABLES)
def test_tables_of_boxes(name, tmp_path):
    (tmp_path / "red").mkdir()
    (tmp_path / "red" / "0.png").write_bytes(good_png())
    (tmp_path / "boxes.csv").write_bytes(BOX_TABLES[name])
    with pytest.raises(DataError, match=r"boxes\.csv") as failure:
        open_dataset(f"folder:{tmp_path}")
    assert len(str(failure.value).splitlines()) == 1


@pytest.mark.parametrize("name", COCO_FILES)
def test_coco_files(name, tmp_path):
    (tmp_path / "a.png").write_bytes(good_png())
    (tmp_path / "annotations.json").write_bytes(COCO_FILES[name])
    with pytest.raises(DataError, match=r"annotations\.json"):
        open_dataset(f"coco:{tmp_path / 'annotations.json'}")


@pytest.mark.parametrize("name", ["LOC_val_solution.csv", "LOC_synset_mapping.txt"])
def test_tables_of_imagenet_that_are_no_utf8(name, tmp_path):
    (tmp_path / "x.png").write_bytes(good_png())
    (tmp_path / name).write_bytes(b"ImageId,PredictionString\nx,n01440764 \xe9 0 1 1\n")
    with pytest.raises(DataError, match=f"{name}: not UTF-8 text"):
        open_dataset(f"imagenet:{tmp_path}")


def test_a_mask_of_another_size_is_refused(tmp_path):
    (tmp_path / "masks").mkdir()
    (tmp_path / "a.png").write_bytes(good_png(32))
    (tmp_path / "masks" / "a.png").write_bytes(good_png(16))
    batch = load_batch(open_dataset(f"folder:{tmp_path}"), [0], GeometryCache(load_model("builtin").preprocess))
    assert batch.failures == [(0, "a.png: mask of 16 x 16 pixels for a picture of 32 x 32")]


@pytest.mark.parametrize("name", WEIGHTS)
def test_files_of_weights(name, tmp_path):
    path = WEIGHTS[name](tmp_path)
    started = time.perf_counter()
    with pytest.raises(ModelError) as failure:
        load_model("builtin", weights=path)
    assert path.name in str(failure.value)
    assert len(str(failure.value).splitlines()) == 1
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("device", ["", "bogus", "meta", "hpu", "privateuseone", "cuda:99", "cpu:-1", "opengl", "0"])
def test_devices_that_are_not_there(device):
    with pytest.raises(OptionError, match="is not available on this machine"):
        load_model("builtin", device=device)


@pytest.mark.parametrize("name", ["$x^_y$", r"a_b^c \frac { %", "$$$", "€\t日本"])
@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_are_no_formulas(name):
    image, heat = np.zeros((8, 8, 3)), torch.rand(8, 8)
    figure = draw_side_by_side(image, [Panel(heat, name), Panel(heat, name)], title=name)
    plot, (axes,) = create_plots()
    axes.set(title=name, xlabel=name, ylabel=name, yscale="log")
    axes.plot([1, 2], [1, 10], label=name)
    add_legend(axes)
    for drawing in (figure, plot):
        assert drawing.to_bytes("png").startswith(b"\x89PNG")
        assert drawing.to_bytes("svg").startswith(b"<?xml")


@pytest.mark.skipif(os.name == "nt", reason="names are text there")
def test_file_names_that_are_no_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / os.fsdecode(b"\xff\xfe.png")).write_bytes(good_png())
    data = open_dataset(f"folder:{tmp_path}")
    assert data.class_names == [r"caf\udce9"]
    assert data[0].name == r"caf\udce9/\udcff\udcfe.png"
    assert data.image(0).size == (32, 32)
    data.digest()
    (folder / "bad.png").write_bytes(b"")
    with pytest.raises(DaveError) as failure:
        open_dataset(f"folder:{tmp_path}").image(0)
    assert escape_unprintable(str(failure.value)).encode().startswith(b"bad.png")
