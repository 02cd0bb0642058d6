"""Pages of reports: templates, and how numbers and pictures are written into them."""

import base64
import re
from functools import cache
from importlib import resources
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape
from PIL.Image import Image

from dave_vit._internal.atomic_files import image_bytes
from dave_vit.viz.figures import Drawing


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
    options = {"method": 6} if kind == "webp" else {}
    return _data_url(image_bytes(image.convert("RGB"), kind, quality=88, **options), kind)


def _data_url(data: bytes, kind: str) -> str:
    """Return a data URL of an image file."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _inline_svg(drawing: Drawing) -> Markup:
    """Return a plot as SVG without the XML header."""
    return Markup(re.sub(r"^.*?(?=<svg)", "", drawing.to_bytes("svg").decode(), flags=re.DOTALL))
