"""Explanations in notebooks: a widget with the page's controls if anywidget is installed, and a static picture."""

import base64
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from dave_vit._internal.atomic_files import image_bytes
from dave_vit.errors import MissingExtra, import_optional
from dave_vit.methods import Explanation
from dave_vit.viz.colors import hex_colormaps
from dave_vit.viz.figures import MAX_CERTAINTY
from dave_vit.viz.panels import build_panels, show
from dave_vit.viz.rendering import MapLike, as_image, as_map, scale_map, to_pillow

# All maps of a view are one picture, one below the other, and so are the photographs: as numbers they would take twelve
# times the space in the file of a notebook.
_MAX_ROWS = 16_000  # of pixels in a picture that a browser reads
_REACH = 4.0  # largest number of a map that is sent, in limits of its colour scale
_LEVELS, _CERTAINTY_LEVELS = 127, 24  # of numbers on each side of zero


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
    each = max(1, len(panels) // len(pictures))
    images = max(1, min(len(pictures), _MAX_ROWS // (each * pictures.shape[-2])))
    shown, kept = panels[: images * each], pictures[:images]  # as many as a browser can read, with all their maps
    maps, signed = [panel.map for panel in shown], [panel.values("signed") for panel in shown]
    sure = [panel.certainty for panel in shown if panel.certainty is not None]
    limits = {"map": [scale_map(each).limit for each in maps], "certainty": [MAX_CERTAINTY] * len(sure)}
    limits["signed"] = [scale_map(each, signed=True).limit for each in signed]
    tops = limits | {view: [_REACH * limit for limit in limits[view]] for view in ("map", "signed")}
    if all(map(torch.equal, map(as_map, maps), map(as_map, signed))):
        signed, tops["signed"] = [], tops["map"]  # the widget takes the map
    chances = explanation.probability
    return {
        "width": width,
        "height": height,
        "images": images,
        "names": [panel.target for panel in shown],
        "probabilities": [] if chances is None else chances.flatten().tolist()[: len(shown)],
        "unit": panels[0].unit or explanation.unit,
        "colormaps": hex_colormaps(),
        "limits": limits,
        "tops": tops,
        "pictures": image_bytes(to_pillow(np.concatenate([as_image(picture) for picture in kept])), "webp"),
        "map": _encode_maps(maps, tops["map"]),
        "signed": _encode_maps(signed, tops["signed"]),
        "certainty": _encode_maps(sure, tops["certainty"], _CERTAINTY_LEVELS),
    }


def widget(explanation: Explanation) -> Any:
    """Create a notebook widget of maps with controls. Needs the extra `notebook`."""
    anywidget, traitlets = (import_optional(one, "anywidget", extra="notebook") for one in ("anywidget", "traitlets"))
    values = widget_traits(explanation)
    traits = {name: traitlets.Any().tag(sync=True) for name in values}
    return type("DaveWidget", (anywidget.AnyWidget,), {"_esm": read_script(), **traits})(**values)


def mime_bundle(explanation: Explanation) -> dict[str, Any]:
    """Return what a notebook displays: the widget if possible, and a picture for notebooks that are only read."""
    figure = show(explanation)

    def static(dpi: int) -> dict[str, Any]:
        picture = base64.b64encode(figure._repr_png_(dpi=dpi)).decode()
        return {"image/png": picture, "text/plain": repr(explanation)}

    try:
        interactive = widget(explanation)._repr_mimebundle_()
    except MissingExtra:
        return static(110)
    content = interactive[0] if isinstance(interactive, tuple) else interactive
    return {**(content or {}), **static(72)}


def _encode_maps(maps: Sequence[MapLike], tops: Sequence[float], levels: int = _LEVELS) -> bytes:
    """Return maps in grey: zero is 127, and the square root of a number's share of the largest one moves it."""
    if not maps:
        return b""
    values = np.concatenate([as_map(each).numpy() / top for each, top in zip(maps, tops, strict=True)]).clip(-1, 1)
    roots = (np.sqrt(np.abs(values)) * levels).round() / levels
    return image_bytes(to_pillow((127 * (1 + np.sign(values) * roots)) / 255))
