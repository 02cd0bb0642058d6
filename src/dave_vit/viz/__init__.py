"""Pictures: maps over images, grids with scale bars, animations. Importing this loads matplotlib, not pyplot."""

from dave_vit.viz.animation import Step, animate, font, moving, save_animation
from dave_vit.viz.cells import (
    contour_cell,
    image_cell,
    map_cell,
    overlay_cell,
    signed_cell,
    sureness_cell,
    targets_cell,
    uncertainty_cell,
)
from dave_vit.viz.colors import COLORMAPS, DAVE, HUES
from dave_vit.viz.figures import Cell, Drawing, draw
from dave_vit.viz.layers import Scaled, blend, enlarged, heat, overlay, scale, soften, to_pillow
from dave_vit.viz.panels import Panel, Scales, View, comparison, panel_cells, panels_of, show, side_by_side
from dave_vit.viz.photo import Photo, photo_overlay
from dave_vit.viz.strip import strip

__all__ = [
    "COLORMAPS",
    "DAVE",
    "HUES",
    "Cell",
    "Drawing",
    "Panel",
    "Photo",
    "Scaled",
    "Scales",
    "Step",
    "View",
    "animate",
    "blend",
    "comparison",
    "contour_cell",
    "draw",
    "enlarged",
    "font",
    "heat",
    "image_cell",
    "map_cell",
    "moving",
    "overlay",
    "overlay_cell",
    "panel_cells",
    "panels_of",
    "photo_overlay",
    "save_animation",
    "scale",
    "show",
    "side_by_side",
    "signed_cell",
    "soften",
    "strip",
    "sureness_cell",
    "targets_cell",
    "to_pillow",
    "uncertainty_cell",
]
