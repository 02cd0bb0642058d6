"""The table of models: which architectures are explained exactly, found out by trying."""

from dave_vit.checks.coverage.checking import LIMIT, Outcome, check
from dave_vit.checks.coverage.entry import Entry
from dave_vit.checks.coverage.table import architectures, markdown

__all__ = ["LIMIT", "Entry", "Outcome", "architectures", "check", "markdown"]
