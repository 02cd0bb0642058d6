"""Images in and out: uploads checked by size and content, example images, PNG as text."""

import base64
import io
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath

from PIL import Image
from starlette.requests import Request

from dave_vit._internal.atomic_files import image_bytes
from dave_vit.data.images import LoadedImage, decode_image
from dave_vit.data.sets.builtin import BuiltinDataset
from dave_vit.errors import DaveError, UnknownName

# Split of the embedded benchmark -> name and index. Images with two objects show best what another class changes.
_INDICES = {
    "pair": {"trophy": 14, "sneaker": 26, "camel": 0, "dolphin": 6, "french-fries": 18},
    "single": {"bear": 8, "rabbit": 16, "train": 4},
}
EXAMPLES = {name: (split, index) for split, indices in _INDICES.items() for name, index in indices.items()}
PHOTOS = ("cat", "coffee")  # for models of photographs
_NAME_LENGTH = 80


class UploadTooLarge(DaveError):
    """An upload has more bytes than allowed."""


async def read_upload(request: Request, limit: int) -> bytes:
    """Read the body of a request, never beyond the limit."""
    declared = request.headers.get("content-length", "")
    data = bytearray()
    if not (declared.isdecimal() and int(declared) > limit):
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                break
        else:
            return bytes(data)
    raise UploadTooLarge(f"the file is too large; the limit is {limit / 1e6:.3g} MB, so make the image smaller first")


def read_picture(data: bytes, name: str, max_pixels: int) -> LoadedImage:
    """Decode an upload by its content, whatever its name."""
    picture = decode_image(data, file_name(name), max_pixels=max_pixels)
    return LoadedImage(PurePosixPath(picture.name).stem, picture.image, picture.notes)


def file_name(name: str) -> str:
    """Return the name of an uploaded file without folders and without characters that cannot be printed."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    printable = "".join(letter for letter in last if letter.isprintable()).strip()
    return printable[-_NAME_LENGTH:].lstrip(".-") or "image"


def png_text(image: Image.Image) -> str:
    """Encode an image as PNG in base64."""
    return base64.b64encode(image_bytes(image)).decode()


@cache
def example_png(name: str) -> bytes:
    """Return an example image as a PNG file."""
    if name in EXAMPLES:
        split, index = EXAMPLES[name]
        return image_bytes(BuiltinDataset(split).image(index))
    if name in PHOTOS:
        photo = (files("dave_vit.web") / "photos" / f"{name}.jpg").read_bytes()
        return image_bytes(Image.open(io.BytesIO(photo)))
    raise UnknownName(f"no example {name!r}; there are: {', '.join((*EXAMPLES, *PHOTOS))}")
