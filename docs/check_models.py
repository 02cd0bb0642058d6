"""Check all architectures of the coverage table and record the results: `python docs/check_models.py`.

Each is built by its own library, in small and with random weights, so nothing is downloaded; all take some minutes, and
`--missing` checks those alone that have no row yet.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import generate

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src" / "dave_vit" / "checks" / "architectures.json"
PACKAGES = {
    "timm": "timm",
    "transformers": "transformers",
    "torchvision": "torchvision",
    "open_clip": "open_clip_torch",
    "bcos": "bcos",
    "monai": "monai",
    "torch": "torch",
}


def measure_row(entry: Any) -> dict[str, Any]:
    """Check one architecture and return its row of the table."""
    from model_coverage import check

    outcome = check(entry)
    if outcome.state not in ("exact", "unsupported"):
        raise SystemExit(f"{entry.library}:{entry.name} is {outcome.state}: gap {outcome.gap:.1e} {outcome.reason}")
    row = {"library": entry.library, "family": entry.family, "architecture": entry.name, "state": outcome.state}
    if outcome.reason:
        return {**row, "reason": outcome.reason}
    numbers = {"gap": outcome.gap, "default_gap": outcome.default_gap, "forward_difference": outcome.forward}
    return row | {name: float(f"{number:.2g}") for name, number in numbers.items()}


def read_rows() -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the rows of the present table by library, family and name."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["architectures"]
    return {(row["library"], row["family"], row["architecture"]): row for row in rows}


def main() -> None:
    """Measure all rows, write them into the package and update docs/models.md."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from model_coverage import architectures

    versions = {name: importlib.metadata.version(package) for name, package in PACKAGES.items()}
    known = read_rows() if "--missing" in sys.argv else {}
    entries = [(entry, (entry.library, entry.family, entry.name)) for entry in architectures()]
    rows = ",\n".join(json.dumps(known.get(key) or measure_row(entry)) for entry, key in entries)
    TABLE.write_text(f'{{"versions": {json.dumps(versions)},\n"architectures": [\n{rows}\n]}}\n', encoding="utf-8")
    del sys.argv[1:]  # which the next command would read
    generate.main()


if __name__ == "__main__":
    main()
