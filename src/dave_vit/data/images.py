"""Find image files and read them as upright RGB images, with notes on any conversion; read frames of clips."""

import io
import itertools
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, ImageSequence, UnidentifiedImageError

from dave_vit.errors import ImageError, escape_unprintable, first_line, import_optional

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")  # by content, not by suffix
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
MAX_PIXELS = 100_000_000  # a small file can unpack to any size; this one needs 300 MB
MAX_RATIO = 100  # models bring the short side to their size before they crop: 1 x 20,000 pixels would become 3 GB
STDIN = "-"
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class LoadedImage:
    """An image as read from a file.

    Attributes:
        name: the file's name without its suffix, or "stdin".
        image: RGB, upright.
        notes: conversions, such as "transparent areas drawn on white".
    """

    name: str
    image: Image.Image
    notes: tuple[str, ...] = ()


def boxes_beside(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """Return the places (left, top, right, bottom) of pictures of these widths and heights beside each other."""
    starts = itertools.accumulate((width for width, _ in sizes), initial=0)
    return [(left, 0, left + width, height) for left, (width, height) in zip(starts, sizes, strict=False)]


def join_pictures(pictures: Sequence[LoadedImage]) -> LoadedImage:
    """Return pictures beside each other, on white."""
    boxes = boxes_beside([one.image.size for one in pictures])
    page = Image.new("RGB", (boxes[-1][2], max(box[3] for box in boxes)), "white")
    for one, box in zip(pictures, boxes, strict=True):
        page.paste(one.image, box)
    notes = tuple(note for one in pictures for note in one.notes)
    return LoadedImage("+".join(one.name for one in pictures), page, notes)


def find_images(sources: Iterable[str | Path]) -> list[str]:
    """Return the given files and, for folders, their images and those of subfolders, sorted, each once; `-` is kept.

    Missing files and folders without images are kept too: reading them raises an error.
    """
    unique: dict[str, str] = {}
    for source in map(str, sources):
        for path in _images_in(Path(source)) if source != STDIN and Path(source).is_dir() else [source]:
            unique.setdefault(os.path.abspath(path), path)
    return list(unique.values())


def _images_in(folder: Path) -> list[str]:
    """Return the images of a folder without hidden ones and results of this package, such as cat.dave.png."""
    images = (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES and path.is_file())
    shown = (path for path in images if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return [str(path) for path in shown if ".dave" not in path.suffixes[:-1]] or [str(folder)]


def read_image(source: str | Path, *, max_pixels: int = MAX_PIXELS) -> LoadedImage:
    """Read an image file, or standard input for `-`.

    Raises:
        ImageError: it is missing, empty, no image, damaged or too large.
    """
    if str(source) == STDIN:
        return decode_image(sys.stdin.buffer.read(), "stdin", max_pixels=max_pixels)
    path = Path(source)
    try:
        data = path.read_bytes()
    except (FileNotFoundError, ValueError) as error:  # no file can have a name with a null byte
        raise ImageError(f"{source}: no such file") from error
    except IsADirectoryError as error:
        raise ImageError(f"{source}: no image in this folder") from error
    except OSError as error:
        raise ImageError(f"{source}: cannot be read ({error.strerror})") from error
    picture = decode_image(data, str(source), max_pixels=max_pixels)
    return LoadedImage(escape_unprintable(path.stem), picture.image, picture.notes)


def decode_image(data: bytes, name: str, *, max_pixels: int = MAX_PIXELS) -> LoadedImage:
    """Decode the bytes of an image file, called `name` in messages.

    Raises:
        ImageError: they are empty, no image, damaged or too large.
    """
    image = load_pixels(data, name, max_pixels)
    rgb, changes = to_rgb(ImageOps.exif_transpose(image))
    return LoadedImage(name, rgb, (*_frames(image), *changes))


def load_pixels(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode the bytes of an image file as stored, in its own mode and orientation; raises as `decode_image` does."""
    if not data:
        raise ImageError(f"{name}: empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked below, damage raises
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            check_size(image.size, name, max_pixels)
            image.load()
            return image
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: too large; at most {max_pixels / 1e6:.0f} million pixels are read") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: not an image that can be read (PNG, JPEG, WebP, BMP, TIFF or GIF)") from error
    except ImageError:
        raise
    except Exception as error:  # decoders raise any exception on hostile bytes
        raise ImageError(f"{name}: damaged or cut off ({first_line(error)})") from error


def to_rgb(image: Image.Image) -> tuple[Image.Image, tuple[str, ...]]:
    """Return the image in RGB, 8 bits a channel, and notes on what was lost."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return _from_deep(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return _on_white(image.convert("RGBA"))
    if image.mode == "CMYK":
        return image.convert("RGB"), ("CMYK turned into RGB without its colour profile",)
    return image.convert("RGB"), ()


def arrays_to_pictures(values: np.ndarray[Any, Any]) -> list[Image.Image]:
    """Return the pictures of colours ``[H, W, 3]`` or ``[B, H, W, 3]``, as bytes or in 0 to 1; channels may come first.

    Raises:
        ImageError: the shape or the values are no colours.
    """
    channels_last = values if values.ndim < 3 or values.shape[-1] in _CHANNELS else np.moveaxis(values, -3, -1)
    pages = channels_last.reshape(-1, *channels_last.shape[-3:]) if values.ndim > 2 else channels_last[None, ..., None]
    is_float = np.issubdtype(values.dtype, np.floating)
    if pages.ndim != 4 or pages.shape[-1] not in _CHANNELS or not (is_float or values.dtype == np.uint8):
        how = "give colours [H, W, 3], as bytes or in 0 to 1"
        raise ImageError(f"an array of {values.dtype} with shape {values.shape}; {how}")
    if is_float and not (values.min() >= 0 and values.max() <= 1):
        raise ImageError("colours outside of 0 to 1; divide by 255, or give a preprocessed float tensor [B, C, H, W]")
    pages = (pages * 255).round().astype(np.uint8) if is_float else pages
    return [Image.fromarray(page.squeeze(-1) if page.shape[-1] == 1 else page) for page in pages]


def check_size(size: tuple[int, int], name: str, max_pixels: int = MAX_PIXELS) -> None:
    """Raise ImageError for a width and height that are too large or too elongated.

    Raises:
        ImageError: it has more pixels than allowed, or one side is more than ``MAX_RATIO`` times the other.
    """
    width, height = size
    if width * height > max_pixels:
        limit = f"at most {max_pixels / 1e6:.3g} million are read; make it smaller first"
        raise ImageError(f"{name}: {width} x {height} pixels; {limit}")
    if max(size) > MAX_RATIO * min(size):
        limit = f"no side may be more than {MAX_RATIO} times the other; cut a part out of it first"
        raise ImageError(f"{name}: {width} x {height} pixels; {limit}")


def _frames(image: Image.Image) -> tuple[str, ...]:
    count = getattr(image, "n_frames", 1)
    # the further frames of an MPO, which cameras write into a .jpg, are previews
    return (f"the first of {count} frames taken",) if count > 1 and image.format != "MPO" else ()


def _on_white(image: Image.Image) -> tuple[Image.Image, tuple[str, ...]]:
    rgb = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return rgb, () if image.getchannel("A").getextrema()[0] == 255 else ("transparent areas drawn on white",)


def _from_deep(image: Image.Image) -> tuple[Image.Image, tuple[str, ...]]:
    """Convert grey values of more than 8 bits; Pillow itself would clip everything above 255."""
    values = np.asarray(image).astype(np.float64)
    if image.mode == "F" or values.max() > 65535 or values.min() < 0:
        finite = np.nan_to_num(values, posinf=0, neginf=0)
        low, span = finite.min(), np.ptp(finite)
        grey = (finite - low) / (span or 1.0) * 255
        note = f"values from {low:.4g} to {low + span:.4g} spread over 8 bits"
    else:
        grey = values / 257  # 65535 -> 255
        note = "16 bits reduced to 8"
    return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB"), (note,)


ANIMATIONS = frozenset({".gif", ".webp"})
"""Formats that Pillow reads; PyAV reads the others."""
MAX_FRAMES = 20_000  # read to find the ones that are taken: eleven minutes at thirty a second


@dataclass(frozen=True)
class Clip:
    """Frames of a video.

    Attributes:
        name: the file's name without its suffix.
        frames: RGB, of one size.
        numbers: indices of these frames in the file.
    """

    name: str
    frames: tuple[Image.Image, ...]
    numbers: tuple[int, ...]


def read_clip(source: str | Path, frames: int) -> Clip:
    """Read a number of frames, evenly spaced from the first to the last; some are repeated where the file has fewer.

    Raises:
        ImageError: it is missing, no video, damaged, too large or too long.
        MissingExtra: PyAV is needed and not installed.
    """
    path = Path(source)
    if not path.is_file():
        raise ImageError(f"{source}: no such file; give a video, or an animation (GIF, WebP)")
    total = sum(1 for _ in _decode_frames(path))
    if total == 0:
        raise ImageError(f"{source}: it contains no frames")
    indices = [round(place * (total - 1) / max(1, frames - 1)) for place in range(frames)]
    frames_at = {index: to_rgb(_to_image(one))[0] for index, one in enumerate(_decode_frames(path)) if index in indices}
    check_size(frames_at[indices[0]].size, str(source))
    return Clip(escape_unprintable(path.stem), tuple(frames_at[index] for index in indices), tuple(indices))


def _decode_frames(path: Path) -> Iterator[Any]:
    """Yield the frames of a file as the library returns them."""
    read_frames = _read_animation if path.suffix.lower() in ANIMATIONS else _read_video
    try:
        for number, frame in enumerate(read_frames(path)):
            if number >= MAX_FRAMES:
                raise ImageError(f"{path}: more than {MAX_FRAMES} frames; cut a part out of it first")
            yield frame
    except (OSError, ValueError) as error:  # PyAV's errors are among these
        raise ImageError(f"{path}: not a video that can be read ({first_line(error)[:120]})") from error


def _read_animation(path: Path) -> Iterator[Any]:
    with Image.open(path, formats=("GIF", "WEBP")) as image:
        yield from ImageSequence.Iterator(image)


def _read_video(path: Path) -> Iterator[Any]:
    av = import_optional("av", "PyAV", extra="video")
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ImageError(f"{path}: it contains no video")
        yield from container.decode(video=0)


def _to_image(frame: Any) -> Image.Image:
    return frame.copy() if isinstance(frame, Image.Image) else frame.to_image()  # type: ignore[no-any-return]
