"""Files that nobody should trust: pictures, weights, tables and plans that are damaged, absurd or made to do harm."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file


def png(width: int, height: int) -> bytes:
    """A white PNG of this size, one bit a pixel: few bytes, whatever it unpacks to."""
    row, packer = b"\0" + b"\xff" * ((width + 7) // 8), zlib.compressobj(9)
    at_once = min(height, 100_000)
    data = b"".join(packer.compress(row * at_once) for _ in range(height // at_once))
    data += packer.compress(row * (height % at_once)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_part(kind, content) for kind, content in parts)


def _part(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def good_png(side: int = 32) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).convert("RGB").save(buffer, "png")
    return buffer.getvalue()


LONG = {"1x20000": (1, 20_000), "20000x1": (20_000, 1), "1x100000": (1, 100_000), "1x39999999": (1, 39_999_999)}
"""Pictures whose short side is next to nothing, and whose long side a model would blow up with it."""

PICTURES: dict[str, bytes] = {
    **{name: png(*size) for name, size in LONG.items() if max(size) < 10**6},
    "empty": b"",
    "text": b"no picture",
    "cut off": good_png()[:60],
    "header only": good_png()[:33],
    "huge claim": good_png()[:16] + struct.pack(">II", 2**31 - 1, 2**31 - 1) + good_png()[24:],
    "no pixels": good_png()[:16] + struct.pack(">II", 0, 0) + good_png()[24:],
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
    "zip": b"PK\x03\x04" + b"\0" * 64,
    "gif without frames": b"GIF89a" + b"\1\0\1\0" + b"\0\0\0;",
    "jpeg of zeros": b"\xff\xd8\xff\xe0" + b"\0" * 200,
    "tiff in a circle": b"II*\0\x08\0\0\0" + b"\0\0" + b"\x08\0\0\0",
    "webp of noise": b"RIFF\x40\0\0\0WEBPVP8 " + bytes(range(64)),
    "bmp of another size": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 99, 0, 0, 54, 40, 9, -9, 1, 24, 0, 0, 0, 0, 0, 0),
}
"""Files called .png that are no picture for any model."""


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


BOX_TABLES: dict[str, bytes] = {
    "nan": b"image,left,top,right,bottom\nred/0.png,nan,0,9,9\n",
    "inf": b"image,left,top,right,bottom\nred/0.png,0,0,inf,9\n",
    "overflow": b"image,left,top,right,bottom\nred/0.png,0,0,1e999,9\n",
    "words": b"image,left,top,right,bottom\nred/0.png,a,b,c,d\n",
    "short": b"image,left,top,right,bottom\nred/0.png,1,2\n",
    "latin-1": b"image,left,top,right,bottom\nred/caf\xe9.png,0,0,9,9\n",
    "utf-16": "image,left,top,right,bottom\nred/0.png,0,0,9,9\n".encode("utf-16"),
    "nul": b"image,left,top,right,bottom\nred/0.png,0,0,\0,9\n",
    "no columns": b"\n",
    "empty": b"",
    "another image": b"image,left,top,right,bottom\nred/none.png,0,0,9,9\n",
    "open quote": b'image,left,top,right,bottom\n"red/0.png,0,0,9,9\n',
}
"""Contents of boxes.csv."""

COCO_FILES: dict[str, bytes] = {
    "nan box": json.dumps(
        {
            "images": [{"id": 1, "file_name": "a.png"}],
            "categories": [{"id": 1, "name": "x"}],
            "annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, float("nan"), 1]}],
        }
    ).encode(),
    "list": b"[]",
    "null": b"null",
    "wrong types": b'{"images": 3, "categories": "x", "annotations": {}}',
    "nested": _nested(100_000),
    "latin-1": b'{"images": "caf\xe9"}',
}
"""Contents of a COCO file of annotations."""


def _state() -> dict[str, torch.Tensor]:
    from dave_vit import load_model

    return {name: value.clone() for name, value in load_model("builtin").model.state_dict().items()}


def _spoilt(value: float) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        state = _state()
        next(tensor for tensor in state.values() if tensor.is_floating_point()).flatten()[0] = value
        save_file(state, folder / "spoilt.safetensors")
        return folder / "spoilt.safetensors"

    return write


def _pickled(content: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save(content, folder / "weights.pth")
        return folder / "weights.pth"

    return write


def _written(data: bytes, name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


def _circular() -> dict[str, object]:
    circle: dict[str, object] = {}
    circle["model"] = circle
    return circle


WEIGHTS: dict[str, Callable[[Path], Path]] = {
    "nan": _spoilt(float("nan")),
    "infinity": _spoilt(float("inf")),
    "contains itself": _pickled(_circular()),
    "list": _pickled([torch.zeros(1)]),
    "nothing": _pickled(None),
    "empty dict": _pickled({}),
    "numbers": _pickled({"a": 1}),
    "another model": _pickled({"a": torch.zeros(1)}),
    "empty pth": _written(b"", "weights.pth"),
    "empty safetensors": _written(b"", "weights.safetensors"),
    "noise pth": _written(bytes(range(256)), "weights.pth"),
    "safetensors with a huge header": _written(b"\xff" * 16, "weights.safetensors"),
    "pickle that runs": _written(b"cos\nsystem\n(S'echo hi'\ntR.", "weights.pth"),
}
"""Writers of files of weights: given a folder, the path of the file."""
