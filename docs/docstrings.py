"""Let mkdocs render the docstring section "Example:" as code, like "Examples:"."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section, which griffe would render as a text box."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of one module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
