"""Packs what the package ships of the art: one lossless WebP sheet per style, texture halves, and the class table.

    python training/pack_assets.py ART_FOLDER

ART_FOLDER is what fetch_art.py made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "src" / "dave_vit" / "data" / "builtin" / "assets"
STYLES = ("noto", "fluent-emoji-flat", "twemoji", "emojione")
TEXTURES = ("brick", "gravel", "grass")
CELL, COLUMNS = 128, 16


def _save(image: Image.Image, path: Path) -> None:
    image.save(path, "WEBP", lossless=True, quality=100, method=6)


def pack_style(art: Path, style: str) -> dict[str, int]:
    """Writes the sheet of a style and returns the cell of each icon."""
    files = sorted(art.glob(f"{style}__*.png"))
    sheet = Image.new("RGBA", (COLUMNS * CELL, -(-len(files) // COLUMNS) * CELL))
    for cell, file in enumerate(files):
        row, column = divmod(cell, COLUMNS)
        with Image.open(file) as sprite:
            sheet.paste(sprite, (column * CELL, row * CELL))
    _save(sheet, ASSETS / f"{style}.webp")
    return {file.stem.split("__", 1)[1]: cell for cell, file in enumerate(files)}


def pack_textures(art: Path) -> None:
    """Writes the upper half of each photograph, which tests use; training uses the lower one."""
    for name in TEXTURES:
        with Image.open(art / f"{name}.png") as photograph:
            width, height = photograph.size
            _save(photograph.convert("L").crop((0, 0, width, height // 2)), ASSETS / f"{name}.webp")


def main(art: Path) -> None:
    """Writes all assets."""
    cells = {style: pack_style(art, style) for style in STYLES}
    pack_textures(art)
    classes = json.loads((ROOT / "training" / "classes.json").read_text())
    table = {
        group: {
            name: {style: [cells[style][icon] for icon in icons[style]] for style in STYLES if icons.get(style)}
            for name, icons in classes[group].items()
        }
        for group in ("targets", "distractors")
    }
    (ASSETS / "classes.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
