"""The coverage table: small versions of many architectures, each checked for an exact explanation."""

from __future__ import annotations

from model_coverage import (
    hf_detection,
    hf_documents,
    hf_entries,
    hf_language,
    hf_tasks,
    hf_vision_language,
    other_entries,
    timm_entries,
)
from model_coverage.checking import LIMIT, Outcome, check
from model_coverage.entry import Entry

__all__ = ["LIMIT", "Entry", "Outcome", "architectures", "check", "find"]


def architectures(library: str | None = None) -> list[Entry]:
    """Return all architectures of the table, or those of one library."""
    modules = (
        timm_entries,
        hf_entries,
        hf_tasks,
        hf_detection,
        hf_language,
        hf_vision_language,
        hf_documents,
        other_entries,
    )
    entries = [entry for module in modules for entry in module.entries()]
    return [entry for entry in entries if library in (None, entry.library)]


def find(name: str) -> Entry:
    """Return the first architecture of a name."""
    return next(entry for entry in architectures() if entry.name == name)
