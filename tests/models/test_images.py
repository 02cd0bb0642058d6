"""Images as people have them: every common kind is read upright into RGB, and every broken one is one clear line."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dave_vit.data.images import decode_image, find_images, read_image
from dave_vit.errors import ImageError

RED, GREEN = (255, 0, 0), (0, 128, 0)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def two_colours(size: tuple[int, int] = (40, 20)) -> Image.Image:
    """Red at the left, green at the right."""
    image = Image.new("RGB", size, RED)
    image.paste(GREEN, (size[0] // 2, 0, *size))
    return image


def near(image: Image.Image, at: tuple[int, int], colour: tuple[int, ...], tolerance: int = 12) -> bool:
    return bool(np.abs(np.array(image.getpixel(at)) - colour).max() <= tolerance)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"])
def test_common_formats_are_read(kind):
    picture = decode_image(encoded(two_colours(), kind), "x")
    assert (picture.image.mode, picture.image.size, picture.notes) == ("RGB", (40, 20), ())
    assert near(picture.image, (5, 10), RED)
    assert near(picture.image, (35, 10), GREEN)


@pytest.mark.parametrize(
    ("orientation", "size", "red_at"),
    [(1, (40, 20), (5, 10)), (3, (40, 20), (35, 10)), (6, (20, 40), (10, 5)), (8, (20, 40), (10, 35))],
)
def test_the_orientation_tag_is_respected(orientation, size, red_at):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = decode_image(encoded(two_colours(), "JPEG", exif=exif), "x").image
    assert image.size == size
    assert near(image, red_at, RED)


OLD_PILLOW = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="Pillow 12 cannot read what it writes")


@pytest.mark.parametrize("mode", ["1", "L", "P", pytest.param("YCbCr", marks=OLD_PILLOW), "CMYK"])
def test_other_modes_become_rgb(mode):
    kind = "TIFF" if mode in ("YCbCr", "CMYK") else "PNG"
    picture = decode_image(encoded(Image.new("RGB", (8, 8), "white").convert(mode), kind), "x")
    assert picture.image.mode == "RGB"
    assert near(picture.image, (4, 4), (255, 255, 255))
    assert bool(picture.notes) == (mode == "CMYK")


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_set_on_white_and_said(mode):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 4, 8))
    picture = decode_image(encoded(image.convert(mode)), "x")
    assert picture.image.getpixel((1, 4)) == (255, 255, 255)
    assert picture.image.getpixel((6, 4)) == (0, 0, 0)
    assert picture.notes == ("transparent areas drawn on white",)


def test_half_transparent_is_mixed_with_white():
    picture = decode_image(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 128))), "x")
    assert near(picture.image, (1, 1), (127, 127, 127), 1)


def test_a_palette_with_a_transparent_colour_is_set_on_white():
    image = Image.new("P", (4, 4), 0)
    image.putpalette([255, 0, 0, 0, 255, 0])
    assert decode_image(encoded(image, transparency=0), "x").image.getpixel((1, 1)) == (255, 255, 255)


def test_an_opaque_alpha_channel_is_no_news():
    assert decode_image(encoded(Image.new("RGBA", (4, 4), "red")), "x").notes == ()


@pytest.mark.parametrize(("value", "grey"), [(0, 0), (32896, 128), (65535, 255), (255, 1)])
def test_sixteen_bits_are_scaled_not_cut(value, grey):
    picture = decode_image(encoded(Image.fromarray(np.full((4, 4), value, np.uint16))), "x")
    assert picture.image.getpixel((0, 0)) == (grey,) * 3
    assert picture.notes == ("16 bits reduced to 8",)


def test_floating_point_values_are_spread():
    values = np.linspace(-1, 3, 16, dtype=np.float32).reshape(4, 4)
    picture = decode_image(encoded(Image.fromarray(values), "TIFF"), "x")
    assert picture.image.getpixel((0, 0)) == (0, 0, 0)
    assert picture.image.getpixel((3, 3)) == (255, 255, 255)
    assert "-1 to 3" in picture.notes[0]


def test_of_an_animation_the_first_frame_is_taken():
    data = encoded(
        Image.new("RGB", (4, 4), "red"), "GIF", save_all=True, append_images=[Image.new("RGB", (4, 4), "blue")]
    )
    picture = decode_image(data, "x")
    assert picture.image.getpixel((0, 0)) == (255, 0, 0)
    assert picture.notes == ("the first of 2 frames taken",)


def huge_png(width: int, height: int) -> bytes:
    """A few bytes that claim to be an image of any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "x: empty"),
        (b"hello, I am text", "x: not an image that can be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "x: not an image that can be read"),
        (encoded(two_colours((200, 200)))[:-150], "x: damaged or cut off"),
        (encoded(two_colours((200, 200)), "JPEG")[:900], "x: damaged or cut off"),
        (huge_png(10_001, 10_000), "x: 10001 x 10000 pixels; at most 100 million"),
        (huge_png(60_000, 60_000), "x: too large; at most 100 million"),
    ],
    ids=["empty", "text", "svg", "truncated png", "truncated jpeg", "large", "bomb"],
)
def test_what_is_no_image_is_one_clear_line(data, expected):
    with pytest.raises(ImageError, match=r"^x: ") as caught:
        decode_image(data, "x")
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_hostile_bytes_never_raise_anything_else(data):
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"]))
    content = bytearray(encoded(two_colours((24, 16)), kind))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ImageError):
        assert decode_image(bytes(content[: data.draw(st.integers(0, len(content)))]), "x").image.mode == "RGB"


def test_a_missing_file_and_an_empty_folder_say_so(tmp_path):
    with pytest.raises(ImageError, match=r"cat\.png: no such file"):
        read_image(tmp_path / "cat.png")
    with pytest.raises(ImageError, match="no image in this folder"):
        read_image(find_images([tmp_path])[0])


def test_folders_give_their_images_in_order(tmp_path):
    for name in ("b.png", "a.JPG", "notes.txt", ".hidden.png"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "c.png").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d.png").write_bytes(b"")
    inside = [str(tmp_path / name) for name in ("a.JPG", "b.png", "inner/c.png")]
    expected = ["-", *inside, "missing.png"]
    assert find_images(["-", tmp_path, "missing.png"]) == expected


def test_standard_input_is_read(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(encoded(two_colours()))))
    picture = read_image("-")
    assert (picture.name, picture.image.size) == ("stdin", (40, 20))
