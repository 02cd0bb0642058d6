"""Make the pictures of the documentation: python docs/pictures.py [--weights FILE].

Each is what one command line draws; gallery.md shows the same lines.
"""

from __future__ import annotations

import argparse
import io
import shlex
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).resolve().parent
MODEL = "timm:deit_tiny_patch16_224"
RIVALS = "dave,gradcam,chefer_lrp,legrad,rollout,attn_lrp,integrated_gradients"
# The picture in docs/figures, the line without its model, and the ending of the file that is shown.
PICTURES = {
    "rivals": (f"dave compare chelsea.jpg --methods {RIVALS}", "chelsea.compare.dave.png"),
    "why-not": ("dave explain coffee.jpg --target espresso --against cup --view signed", "dave.panels.png"),
    "overlay": ("dave explain chelsea.jpg", "chelsea.dave.png"),
    "panels": ("dave explain chelsea.jpg", "chelsea.dave.panels.png"),
    "classes": ("dave explain chelsea.jpg --target 'Egyptian cat,tabby,lynx'", "dave.panels.png"),
    "tiles": ("dave explain chelsea.jpg --fit tiles", "dave.panels.png"),
    "sheet": ("dave explain chelsea.jpg coffee.jpg", "gallery.dave.png"),
}


def command_line(name: str) -> str:
    """Return the command that makes a picture, as the documentation shows it."""
    return f"{PICTURES[name][0]} --model {MODEL}"


def main() -> None:
    """Run every command once, on the photographs in docs/photos."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", help="a local file instead of a download")
    parser.add_argument("--only", help="one picture", choices=PICTURES)
    args = parser.parse_args()
    for name in [args.only] if args.only else PICTURES:
        _make_picture(name, args.weights)


def _make_picture(name: str, weights: str | None) -> None:
    from dave_vit.cli import run

    with tempfile.TemporaryDirectory() as folder:
        arguments = shlex.split(command_line(name))[1:]
        arguments = [str(DOCS / "photos" / word) if word.endswith(".jpg") else word for word in arguments]
        if run([*arguments, "--out", folder, "--quiet", *(["--weights", weights] if weights else [])]):
            raise SystemExit(f"failed: {command_line(name)}")
        result = next(path for path in sorted(Path(folder).iterdir()) if path.name.endswith(PICTURES[name][1]))
        (DOCS / "figures" / f"{name}.jpg").write_bytes(_to_jpeg(result.read_bytes()))


def _to_jpeg(png: bytes) -> bytes:
    """Convert a PNG to a JPEG of high quality, a third of the size."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("RGB").save(buffer, "jpeg", quality=90, subsampling=0, optimize=True)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
