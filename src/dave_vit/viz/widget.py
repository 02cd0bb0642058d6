"""Explanations in notebooks: a widget with the page's controls if anywidget is installed, and a static picture."""

import base64
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dave_vit.errors import MissingExtra, require_extra
from dave_vit.methods import Explanation
from dave_vit.viz.colors import Array, hex_colormaps
from dave_vit.viz.panels import build_panels
from dave_vit.viz.rendering import MapLike, Panel, as_image

_MAX_MAPS = 64  # of a widget: all of them are sent to the browser


def read_script() -> str:
    """Return the JavaScript module of the widget: what it shares with the page, and its own controls."""
    folder = files("dave_vit.viz") / "static"
    return "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in ("dom", "paint", "zoom", "widget"))


def widget_traits(explanation: Explanation) -> dict[str, Any]:
    """Return the traits of a widget by name, numbers as bytes."""
    subject = explanation.subject
    panels = build_panels(explanation, None if subject is None else subject.names)
    height, width = torch.as_tensor(panels[0].map).shape
    pictures = torch.ones(1, 3, height, width) if subject is None else subject.pictures
    shown, kept = _limit_images(panels, pictures)
    return {
        "width": width,
        "height": height,
        "images": len(kept),
        "names": [panel.target for panel in shown],
        "unit": panels[0].unit or explanation.unit,
        "colormaps": hex_colormaps(),
        "pictures": b"".join(_encode_pixels(as_image(picture)) for picture in kept),
        "map": _encode_maps([panel.map for panel in shown]),
        "signed": _encode_maps([panel.signed for panel in shown]),
        "certainty": _encode_maps([panel.certainty for panel in shown]),
    }


def widget(explanation: Explanation) -> Any:
    """Create a notebook widget of maps with controls. Needs the extra `notebook`."""
    with require_extra("anywidget", "notebook"):
        import anywidget
        import traitlets
    values = widget_traits(explanation)
    traits = {name: traitlets.Any().tag(sync=True) for name in values}
    return type("DaveWidget", (anywidget.AnyWidget,), {"_esm": read_script(), **traits})(**values)


def mime_bundle(explanation: Explanation, picture: bytes) -> dict[str, Any]:
    """Return what a notebook displays: the widget if possible, and the picture for notebooks that are only read."""
    shown = {"image/png": base64.b64encode(picture).decode(), "text/plain": repr(explanation)}
    try:
        interactive = widget(explanation)._repr_mimebundle_()
    except MissingExtra:
        return shown
    content = interactive[0] if isinstance(interactive, tuple) else interactive
    return {**(content or {}), **shown}


def _limit_images(panels: Sequence[Panel], pictures: Tensor) -> tuple[Sequence[Panel], Tensor]:
    """Return as many images, with all their maps, as a notebook can hold."""
    each = max(1, len(panels) // len(pictures))
    images = max(1, min(len(pictures), _MAX_MAPS // each))
    return panels[: images * each], pictures[:images]


def _encode_maps(maps: Sequence[MapLike | None]) -> bytes:
    known = [np.asarray(torch.as_tensor(values).detach().cpu(), "<f4") for values in maps if values is not None]
    return b"".join(values.tobytes() for values in known)


def _encode_pixels(image: Array) -> bytes:
    colours = (image.clip(0, 1) * 255).round().astype(np.uint8)
    return np.concatenate([colours, np.full_like(colours[..., :1], 255)], -1).tobytes()
