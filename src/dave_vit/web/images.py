"""Pictures in and out: uploads checked by size and content, examples of the embedded benchmark, PNG as text."""

from __future__ import annotations

import base64
import io
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath

from PIL import Image
from starlette.requests import Request

from dave_vit._internal.atomic_files import png_bytes
from dave_vit.data.images import LoadedImage, decode_image
from dave_vit.data.sets.builtin import Embedded
from dave_vit.errors import DaveError, UnknownName

# Number of the item in its split; two targets in a picture show best what another class changes.
EXAMPLES = {
    "1": ("pair", 14),
    "2": ("pair", 26),
    "3": ("pair", 0),
    "4": ("pair", 6),
    "5": ("pair", 18),
    "6": ("single", 8),
    "7": ("single", 16),
    "8": ("single", 4),
}
PHOTOS = ("cat", "coffee")  # what models of photographs know
_NAME_LENGTH = 80


class TooLarge(DaveError):
    """An upload has more bytes than allowed."""


async def read_upload(request: Request, limit: int) -> bytes:
    """The body of a request, which is never read beyond the limit."""
    declared = request.headers.get("content-length", "")
    data = bytearray()
    if not (declared.isdecimal() and int(declared) > limit):
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                break
        else:
            return bytes(data)
    raise TooLarge(f"the file is too large; at most {limit / 1e6:.3g} MB are taken, so make the image smaller first")


def read_picture(data: bytes, name: str, max_pixels: int) -> LoadedImage:
    """The image in an upload, by what it holds and not by what it is called."""
    picture = decode_image(data, file_name(name), max_pixels=max_pixels)
    return LoadedImage(PurePosixPath(picture.name).stem, picture.image, picture.notes)


def file_name(name: str) -> str:
    """A name that a stranger gave to a file, without folders and without what cannot be printed."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    printable = "".join(letter for letter in last if letter.isprintable()).strip()
    return printable[-_NAME_LENGTH:].lstrip(".-") or "image"


def png_text(image: Image.Image) -> str:
    """A PNG file in base64."""
    return base64.b64encode(png_bytes(image)).decode()


@cache
def example(name: str) -> bytes:
    """The PNG file of an example."""
    if name not in (*EXAMPLES, *PHOTOS):
        raise UnknownName(f"no example {name!r}; there are: {', '.join((*EXAMPLES, *PHOTOS))}")
    return png_bytes(_picture(name))


def _picture(name: str) -> Image.Image:
    if name in EXAMPLES:
        split, index = EXAMPLES[name]
        return Embedded(split).image(index)
    return Image.open(io.BytesIO((files("dave_vit.web") / "photos" / f"{name}.jpg").read_bytes()))
