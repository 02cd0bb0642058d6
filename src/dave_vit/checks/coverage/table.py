"""The table of models as text."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from itertools import groupby

from dave_vit.checks.coverage import hf_entries, hf_language, hf_tasks, other_entries, timm_entries
from dave_vit.checks.coverage.checking import LIMIT, Outcome
from dave_vit.checks.coverage.entry import Entry

LIBRARIES = {
    "timm": "timm",
    "transformers": "transformers",
    "torchvision": "torchvision",
    "open_clip": "open_clip_torch",
    "bcos": "bcos",
    "torch": "torch",
}

_HEAD = """# Models

<!-- Written by `dave models --write docs/models.md`; do not edit. -->

Every line is the result of a check. The architecture is built by its own library, made small where possible, with
random parameters in float64, and the conservation identity is added up: the logit must equal `<W, x>` plus the parts of
all additive constants. *Gap* is the rest, relative to `<W, x>`. *Forward* is the difference between logits under the
interception and the model's own, in float32.

**exact** means a gap below {limit:g}. **unsupported** means that the model is [refused](refusals.md). Check a
model that is not listed with `dave doctor --model SPEC`.

Checked with {versions}: {exact} architectures exact, {refused} unsupported.
"""
_TABLE_HEAD = """
## {library}

| family | architecture | state | gap | forward |
|---|---|---|---|---|
"""


def architectures(pattern: str | None = None) -> list[Entry]:
    """All architectures of the table, or those that fit a pattern."""
    rooms = (timm_entries, hf_entries, hf_tasks, hf_language, other_entries)
    entries = [entry for room in rooms for entry in room.entries()]
    return [entry for entry in entries if pattern is None or entry.matches(pattern)]


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The page that documents the outcomes."""
    installed = {}
    for name, package in LIBRARIES.items():
        try:
            installed[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    head = _HEAD.format(
        limit=LIMIT,
        versions=", ".join(f"{name} {version}" for name, version in installed.items()),
        exact=sum(one.state == "exact" for one in outcomes),
        refused=sum(one.state == "unsupported" for one in outcomes),
    )
    tables = [
        _TABLE_HEAD.format(library=library) + "".join(f"{_line(one)}\n" for one in group)
        for library, group in groupby(outcomes, key=lambda one: one.entry.library)
    ]
    # What a message advises after the colon is on the page of refusals.
    reasons = [
        f"- **{one.entry.family}** (`{one.entry.name}`): {one.reason.partition(': ')[0]}\n"
        for one in outcomes
        if one.reason
    ]
    return head + "".join(tables) + "\n## Why some are unsupported\n\n" + "".join(reasons)


def _line(one: Outcome) -> str:
    measured = one.state in ("exact", "inexact")
    numbers = [f"{value:.0e}" if value else "0" for value in (one.gap, one.forward)] if measured else ["", ""]
    cells = (one.entry.family, f"`{one.entry.name}`", one.state, *numbers)
    return f"| {' | '.join(cells)} |"
