"""Fetches the art that training needs: emoji from npm packages of pinned versions, three photographed surfaces.

    pip install resvg-py==0.5.0 && pip install --no-deps scikit-image==0.26.0
    python training/fetch_art.py ART_FOLDER

Needs npm, which fetches the packages; resvg (through resvg-py) draws the SVG files at 128 x 128. What is there already
is not made again. About 40 MB are downloaded; the folder gets 1622 sprites STYLE__ICON.png and three textures.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

SIDE = 128
TEXTURES = ("brick", "gravel", "grass")
CLASSES = Path(__file__).parent / "classes.json"
PACKAGES = {
    "noto": "@iconify-json/noto@1.2.9",
    "noto-v1": "@iconify-json/noto-v1@1.2.5",
    "twemoji": "@iconify-json/twemoji@1.2.5",
    "emojione": "@iconify-json/emojione@1.2.3",
    "fxemoji": "@iconify-json/fxemoji@1.2.2",
    "fluent-emoji": "@iconify-json/fluent-emoji@1.2.7",
    "fluent-emoji-flat": "@iconify-json/fluent-emoji-flat@1.2.6",
    "streamline-emojis": "@iconify-json/streamline-emojis@1.2.4",
    "fluent-3d": "@lobehub/fluent-emoji-3d@1.1.0",
}

Draw = Callable[[str], bytes]


def wanted(classes: dict[str, Any]) -> dict[str, list[str]]:
    """The icons of each style that some class shows."""
    found: dict[str, set[str]] = {style: set() for style in PACKAGES}
    for group in ("targets", "distractors"):
        for styles in classes[group].values():
            for style, icons in styles.items():
                found[style].update(icons)
    return {style: sorted(icons) for style, icons in found.items()}


def download(package: str, folder: Path) -> Path:
    """The package's archive, fetched by npm from wherever it is set up to look."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit("npm is not installed; install Node.js, which brings it")
    except subprocess.CalledProcessError as error:
        sys.exit(f"npm could not fetch {package}: {error.stderr.strip() or 'no reason given'}")
    return folder / done.stdout.strip().splitlines()[-1]


def svg_of(collection: dict[str, Any], icon: str) -> str:
    """An icon of an Iconify collection as an SVG document; aliases are followed."""
    while icon in collection.get("aliases", {}):
        alias = collection["aliases"][icon]
        if set(alias) - {"parent", "hidden"}:
            raise ValueError(f"the alias {icon} turns or flips its parent, which is not supported")
        icon = alias["parent"]
    drawing = collection["icons"][icon]
    left, top, width, height = (
        drawing.get(key, collection.get(key, default))
        for key, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}" width="{SIDE}" height="{SIDE}">{drawing["body"]}</svg>'
    )


def resvg(svg: str) -> bytes:
    """An SVG document as PNG."""
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SIDE, height=SIDE, skip_system_fonts=True))


def sprites(archive: Path, icons: list[str], draw: Draw = resvg) -> Iterator[tuple[str, Image.Image]]:
    """Name and picture of each icon in an archive: drawings of an Iconify collection, or rendered WebP files."""
    with tarfile.open(archive) as tar:
        members = {member.name: member for member in tar}

        def read(name: str) -> bytes:
            file = tar.extractfile(members[name])
            return file.read() if file else b""

        collection = json.loads(read("package/icons.json")) if "package/icons.json" in members else None
        for icon in icons:
            content = draw(svg_of(collection, icon)) if collection else read(f"package/assets/{icon}.webp")
            with Image.open(io.BytesIO(content)) as image:
                picture = image.convert("RGBA")
            small = picture.size == (SIDE, SIDE)
            yield icon, picture if small else picture.resize((SIDE, SIDE), Image.Resampling.BOX)


def fetch_textures(folder: Path) -> None:
    """Copies the CC0 photographs that scikit-image's package carries; it is not imported, so its needs do not count."""
    package = find_spec("skimage")
    if package is None or not package.submodule_search_locations:
        sys.exit("scikit-image is not installed; run: pip install --no-deps scikit-image==0.26.0")
    for name in TEXTURES:
        shutil.copyfile(Path(package.submodule_search_locations[0]) / "data" / f"{name}.png", folder / f"{name}.png")


def main() -> None:
    """Fetches what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for style, icons in wanted(json.loads(CLASSES.read_text())).items():
        missing = [icon for icon in icons if not (folder / f"{style}__{icon}.png").exists()]
        if missing:
            with tempfile.TemporaryDirectory() as temporary:
                for icon, sprite in sprites(download(PACKAGES[style], Path(temporary)), missing):
                    sprite.save(folder / f"{style}__{icon}.png")
        sys.stdout.write(f"{style}: {len(icons)} sprites, {len(missing)} of them new\n")
    if not all((folder / f"{name}.png").exists() for name in TEXTURES):
        fetch_textures(folder)


if __name__ == "__main__":
    main()
