"""Pages of reports: templates, and how numbers and pictures are written into them."""

from __future__ import annotations

import base64
import io
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from dave_vit.viz.report_section import estimate_cell

if TYPE_CHECKING:
    from PIL.Image import Image

    from dave_vit.viz import Drawing


def format_estimate(
    mean: float | None, low: float | None, high: float | None, *, digits: int = 3, bold: bool = False
) -> str:
    """Return a mean with its interval as all tables write it: "0.512 [0.498, 0.526]"; "-" if there is none."""
    return estimate_cell(mean, low, high, digits=digits, is_best=bold).format(bold=bold)


def render(template: str, **content: Any) -> str:
    """Render a page.

    Args:
        template: file in the folder ``templates``; content of those that end in ``.html`` is escaped.
        content: variables of the template.
    """
    return _environment().get_template(template).render(**content).rstrip() + "\n"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dave_vit.viz"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"bold": _bold, "source": _encode_image, "data_url": _data_url, "inline": _inline_svg}
    tokens = resources.files("dave_vit.viz") / "static" / "tokens.css"  # reports have the colours of the web page
    environment.globals["tokens"] = tokens.read_text(encoding="utf-8")
    return environment


def _bold(text: str) -> Markup:
    """Return HTML with Markdown's ``**`` as bold; everything else is escaped."""
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", str(escape(text))))


def _encode_image(image: Image, kind: Literal["jpeg", "webp"]) -> str:
    """Return a data URL of a picture."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, kind, quality=88, **({"method": 6} if kind == "webp" else {}))
    return _data_url(buffer.getvalue(), kind)


def _data_url(data: bytes, kind: str) -> str:
    """Return a data URL of an image file."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _inline_svg(drawing: Drawing) -> Markup:
    """Return a plot as SVG without the XML header."""
    return Markup(re.sub(r"^.*?(?=<svg)", "", drawing.to_bytes("svg").decode(), flags=re.DOTALL))
