"""Read clips: evenly spaced frames of a video file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageSequence

from dave_vit.data.images import check_size, to_rgb
from dave_vit.errors import ImageError, escape_unprintable, first_line, require_extra

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
    with require_extra("PyAV", "video"):
        import av
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ImageError(f"{path}: it contains no video")
        yield from container.decode(video=0)


def _to_image(frame: Any) -> Image.Image:
    image: Image.Image = frame.copy() if isinstance(frame, Image.Image) else frame.to_image()
    return image
