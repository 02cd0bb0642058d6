"""Colours: the three colormaps, one hue for each of several targets, and DAVE's own.

The colormaps are named "dave" (dark violet to yellow), "dave_signed" (orange, white, violet) and "dave_uncertainty"
(dark to light green), and matplotlib knows them under these names once this module is imported. Lightness rises
evenly along "dave" and "dave_uncertainty", so that they keep their order in grey print and for colour-blind eyes.
"""

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.colors import Colormap, LinearSegmentedColormap, to_hex, to_rgb

Array = npt.NDArray[np.float64]

DAVE = "#b482c8"  # DAVE's own colour in plots

# Strong on photographs, and apart from each other in hue and lightness.
HUES = ("#b14fe0", "#ffb000", "#12b892", "#2f7dff", "#ff4f4f")

_STOPS = {
    "dave": "1f153b 2a1c52 392368 4b2b79 603287 7c378e 993b90 b73f8b d34778 e45961 ec7150 ef8a40 eda234 edb739 efcb47 "
    "f4dd5a ffed71",
    "dave_signed": "7f3b08 b9641a e09a4f f3cf9f f7f5f3 d3bfe3 a983c6 7a46a0 40175e",
    "dave_uncertainty": "00171d 002730 003943 004b56 005f69 00747b 00888b 2a9c9a 4cb0a9 69c4b8 8dd7c8 b8e8da e4f8f1",
}


def _register(name: str, stops: str) -> Colormap:
    colormap = LinearSegmentedColormap.from_list(name, [f"#{stop}" for stop in stops.split()], N=256)
    matplotlib.colormaps.register(colormap, force=True)
    return colormap


COLORMAPS: dict[str, Colormap] = {name: _register(name, stops) for name, stops in _STOPS.items()}


def hex_colormaps() -> dict[str, list[str]]:
    """Return the 256 colours of each colormap as "#rrggbb", for the browser."""
    return {name: [to_hex(colormap(level)) for level in range(256)] for name, colormap in COLORMAPS.items()}


def colorize(values: Array, colormap: str) -> Array:
    """Map numbers in [0, 1] to colours in [0, 1]: [H, W] -> [H, W, 3]."""
    return np.asarray(COLORMAPS[colormap](values)[..., :3], dtype=np.float64)


def hue(index: int) -> Array:
    """Return the colour of one of several targets, [3]; they repeat after the last."""
    return np.array(to_rgb(HUES[index % len(HUES)]))
