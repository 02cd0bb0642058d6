"""Boxes and masks through preprocessings whose geometry is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from dave_vit.data.geometry import Axis, Geometry, GeometryCache
from dave_vit.errors import DataError


def as_tensor(picture: Image.Image) -> torch.Tensor:
    return (torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255 - 0.45) / 0.22


def resize_and_crop(short: int, crop: int):
    def preprocess(picture):
        scale = short / min(picture.size)
        size = tuple(round(side * scale) for side in picture.size)
        left, top = ((side - crop) // 2 for side in size)
        return as_tensor(picture.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + crop, top + crop)))

    return preprocess


@pytest.mark.parametrize("size", [(500, 375), (333, 500), (90, 70), (1500, 1000), (64, 64)])
def test_resize_and_crop_is_found(size):
    geometry = GeometryCache(resize_and_crop(72, 64)).get(*size)
    for axis, side in zip((geometry.x, geometry.y), size, strict=True):
        resized = round(side * 72 / min(size))
        scale, offset = side / resized, (resized - 64) // 2 * side / resized
        assert axis.size == 64
        for output in (0, 32, 64):  # within a seventh of an output pixel everywhere
            assert axis.scale * output + axis.offset == pytest.approx(scale * output + offset, abs=0.15 * scale)


def test_a_large_photograph_is_measured_in_steps_of_grey():
    geometry = Geometry.measure(as_tensor, (6000, 30))
    assert geometry.x.scale == pytest.approx(1, abs=1e-3)
    assert geometry.x.offset == pytest.approx(0, abs=3)


def test_squashing_and_padding_are_found():
    squashed = GeometryCache(lambda picture: as_tensor(picture.resize((64, 64)))).get(128, 96)
    assert squashed.x.scale == pytest.approx(2, abs=0.01)
    assert squashed.y.scale == pytest.approx(1.5, abs=0.01)
    padded = GeometryCache(lambda picture: as_tensor(ImageOps.pad(picture, (64, 64), color=(9, 9, 9)))).get(128, 64)
    assert (padded.y.scale, padded.y.offset) == (pytest.approx(2, abs=0.01), pytest.approx(-32, abs=0.5))


def test_a_batch_of_one_and_more_channels_are_accepted():
    def preprocess(picture):
        tensor = resize_and_crop(72, 64)(picture)
        return torch.cat([tensor, -tensor])[None]

    # the inverted channels cancel unless signs are kept apart
    assert GeometryCache(preprocess).get(72, 72).x.offset == pytest.approx(4, abs=0.15)


def test_what_is_no_resize_and_crop_is_refused():
    with pytest.raises(DataError, match="not a resize and crop"):
        GeometryCache(lambda picture: as_tensor(picture.transpose(Image.Transpose.ROTATE_90))).get(64, 64)


GEOMETRY = Geometry(x=Axis(50, 10, 2.0, 20.0), y=Axis(16, 8, 2.0, 0.0))  # shows source x 20..40, y 0..16


def where(region: np.ndarray) -> tuple[int, int, int, int] | None:
    rows, columns = np.nonzero(region)
    return (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) if len(rows) else None


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ((20, 0, 40, 16), (0, 0, 10, 8)),
        ((24, 4, 30, 8), (2, 2, 5, 4)),
        ((0, 0, 100, 100), (0, 0, 10, 8)),  # clipped to the crop
        ((0, 0, 24, 4), (0, 0, 2, 2)),
        ((0, 0, 20, 16), None),  # left of the crop
        ((40, 0, 60, 16), None),
        ((24, 16, 30, 20), None),  # below
        ((30, 6, 31, 7), (5, 3, 6, 4)),  # one source pixel: smaller than an output pixel
        ((39, 15, 40, 16), (9, 7, 10, 8)),
        ((30, 6, 30, 7), None),  # no width
        ((30, 8, 24, 4), None),  # corners the wrong way round
    ],
)
def test_boxes(box, expected):
    assert where(GEOMETRY.boxes_to_mask([box])) == expected


def test_boxes_are_united():
    region = GEOMETRY.boxes_to_mask([(20, 0, 24, 4), (36, 12, 40, 16)])
    assert region.sum() == 8
    assert not GEOMETRY.boxes_to_mask([]).any()


def test_a_mask_is_read_at_pixel_centres():
    mask = np.zeros((16, 50), bool)
    mask[4:8, 24:30] = True
    assert np.array_equal(GEOMETRY.mask_to_input(mask), GEOMETRY.boxes_to_mask([(24, 4, 30, 8)]))
    assert not GEOMETRY.mask_to_input(np.ones((4, 10), bool)).any()  # the picture ends before the crop begins
