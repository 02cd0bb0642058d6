"""Explanations in notebooks: maps with the page's controls where anywidget is installed, and a picture anywhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dave_vit.errors import MissingExtra, missing_extra
from dave_vit.methods import Explanation
from dave_vit.viz.colors import Array, hex_colormaps
from dave_vit.viz.panels import Panel, build_panels
from dave_vit.viz.rendering import MapLike, as_image

_MOST = 64  # maps of a widget: all of them travel to the browser


def read_script() -> str:
    """Return the JavaScript module of the widget: what it shares with the page, and its own controls."""
    folder = files("dave_vit.viz") / "static"
    return "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in ("dom", "paint", "zoom", "widget"))


def widget_traits(explanation: Explanation) -> dict[str, Any]:
    """What a widget is made of: numbers as bytes, by the names of its traits."""
    subject = explanation.subject
    panels = build_panels(explanation, None if subject is None else subject.names)
    height, width = torch.as_tensor(panels[0].map).shape
    pictures = torch.ones(1, 3, height, width) if subject is None else subject.pictures
    shown, kept = _kept(panels, pictures)
    return {
        "width": width,
        "height": height,
        "images": len(kept),
        "names": [panel.target for panel in shown],
        "colormaps": hex_colormaps(),
        "pictures": b"".join(_rgba(as_image(picture)) for picture in kept),
        "map": _numbers([panel.map for panel in shown]),
        "signed": _numbers([panel.signed for panel in shown]),
        "sureness": _numbers([panel.sureness for panel in shown]),
    }


def widget(explanation: Explanation) -> Any:
    """Maps with controls for a notebook. Needs the extra `notebook`."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise missing_extra("anywidget", "notebook") from error
    given = widget_traits(explanation)
    kinds: dict[type, Any] = {int: traitlets.Int, list: traitlets.List, dict: traitlets.Dict, bytes: traitlets.Bytes}
    traits = {name: kinds[type(value)]().tag(sync=True) for name, value in given.items()}
    made = type("DaveWidget", (anywidget.AnyWidget,), {"_esm": read_script(), **traits})
    return made(**given)


def mime_bundle(explanation: Explanation, picture: bytes) -> dict[str, Any]:
    """What a notebook shows: the widget where there can be one, and the picture where a notebook is only read."""
    shown = {"image/png": base64.b64encode(picture).decode(), "text/plain": _text(explanation)}
    try:
        made = widget(explanation)._repr_mimebundle_()
    except MissingExtra:
        return shown
    found = made[0] if isinstance(made, tuple) else made
    return {**(found or {}), **shown}


def _text(explanation: Explanation) -> str:
    images, samples = len(explanation.attribution), explanation.samples
    return f"Explanation of {images} image{'s' if images > 1 else ''}, {samples} sample{'s' if samples > 1 else ''}"


def _kept(panels: Sequence[Panel], pictures: Tensor) -> tuple[Sequence[Panel], Tensor]:
    """So many images, with all their maps, as a notebook can hold."""
    each = max(1, len(panels) // len(pictures))
    images = max(1, min(len(pictures), _MOST // each))
    return panels[: images * each], pictures[:images]


def _numbers(maps: Sequence[MapLike | None]) -> bytes:
    known = [np.asarray(torch.as_tensor(values).detach().cpu(), "<f4") for values in maps if values is not None]
    return b"".join(values.tobytes() for values in known)


def _rgba(image: Array) -> bytes:
    colours = (image.clip(0, 1) * 255).round().astype(np.uint8)
    return np.concatenate([colours, np.full_like(colours[..., :1], 255)], -1).tobytes()
