"""The architectures that were checked for this release, as `dave models` lists them."""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class CheckedArchitecture:
    """One row of the table; `python docs/check_models.py` measures it.

    Attributes:
        library: where the architecture comes from.
        family: its name in papers.
        architecture: its name in the library.
        state: "exact", or "unsupported" where it is refused with UnsupportedOperator.
        gap: what the conservation identity leaves unexplained, relative to the image's part of the logit.
        default_gap: the same under the rules that DAVE averages by default, for a photograph.
        forward_difference: largest change of the float32 logits under interception, relative to the largest logit.
        reason: why it is unsupported.
    """

    library: str
    family: str
    architecture: str
    state: str
    gap: float | None = None
    default_gap: float | None = None
    forward_difference: float | None = None
    reason: str | None = None


@cache
def _table() -> dict[str, Any]:
    text = (resources.files("dave_vit.checks") / "architectures.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that were checked."""
    return dict(_table()["versions"])


def checked_architectures(pattern: str | None = None) -> list[CheckedArchitecture]:
    """Return the rows of which library, family or name contain a text, or match one with * and ?."""
    text = (pattern or "").lower()
    text = text if any(sign in text for sign in "*?[") else f"*{text}*"
    rows = [CheckedArchitecture(**row) for row in _table()["architectures"]]
    names = [(row.library, row.family, row.architecture, f"{row.library}:{row.architecture}") for row in rows]
    return [row for row, own in zip(rows, names, strict=True) if any(fnmatchcase(one.lower(), text) for one in own)]
