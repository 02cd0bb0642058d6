"""From what a report shows to its page: templates, and how numbers and pictures are put into them."""

from __future__ import annotations

import base64
import io
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from PIL.Image import Image

    from dave_vit.viz import Drawing


def format_estimate(
    mean: float | None, low: float | None, high: float | None, *, digits: int = 3, bold: bool = False
) -> str:
    """A mean with its interval as all tables write it: "0.512 [0.498, 0.526]"; "-" where there is none."""
    if mean is None:
        return "-"
    stars = "**" if bold else ""
    return f"{stars}{mean:.{digits}f}{stars} [{low:.{digits}f}, {high:.{digits}f}]"


def render(template: str, **content: Any) -> str:
    """A page.

    Args:
        template: of the folder ``templates``; in those that end in ``.html`` all content is escaped.
        content: what the template shows.
    """
    return _environment().get_template(template).render(**content).rstrip() + "\n"


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("dave_vit.viz"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"bold": _bold, "source": _source, "jpeg": _jpeg, "inline": _inline}
    tokens = resources.files("dave_vit.viz") / "static" / "tokens.css"  # reports and the page share colours
    made.globals |= {"estimate": format_estimate, "tokens": tokens.read_text(encoding="utf-8")}
    return made


def _bold(word: str) -> Markup:
    """Markdown's two stars as HTML; everything else is escaped."""
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", str(escape(word))))


def _source(image: Image, kind: Literal["jpeg", "webp"]) -> str:
    """A picture as the address that holds it."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, kind, quality=88, **({"method": 6} if kind == "webp" else {}))
    return _address(buffer.getvalue(), kind)


def _jpeg(data: bytes) -> str:
    """A JPEG file as the address that holds it."""
    return _address(data, "jpeg")


def _address(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _inline(drawing: Drawing) -> Markup:
    """A plot as SVG, without the head that a file of its own has."""
    return Markup(re.sub(r"^.*?(?=<svg)", "", drawing.to_bytes("svg").decode(), flags=re.DOTALL))
