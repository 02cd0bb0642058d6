"""Names of places in an image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_CORNER, _BORDER = 3, 10  # a corner is a third of the side, a border a tenth
_DENSE = 2.0  # times the mean density from which on evidence belongs to a place


def name_place(evidence: Floats) -> str:
    """Return where evidence ``[h, w]`` lies: a corner, the border, the centre, or "spread out"."""
    total = evidence.sum()
    if total <= 0:
        return "nowhere"
    shares = {name: (float(evidence[mask].sum() / total), mask.mean()) for name, mask in _places(*evidence.shape)}
    dense = {name: share for name, (share, area) in shares.items() if share >= _DENSE * area}
    return max(dense, key=lambda name: dense[name]) if dense else "spread out"


def _places(height: int, width: int) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    """Return names of places and their masks ``[h, w]``."""
    y, x = np.mgrid[:height, :width]
    top, left = y < height / _CORNER, x < width / _CORNER
    bottom, right = y >= height - height / _CORNER, x >= width - width / _CORNER
    edge_y, edge_x = max(1, round(height / _BORDER)), max(1, round(width / _BORDER))
    border = (y < edge_y) | (y >= height - edge_y) | (x < edge_x) | (x >= width - edge_x)
    return [
        ("upper left corner", top & left),
        ("upper right corner", top & right),
        ("lower left corner", bottom & left),
        ("lower right corner", bottom & right),
        ("border", border),
        ("centre", ~(top | bottom | left | right)),
    ]
