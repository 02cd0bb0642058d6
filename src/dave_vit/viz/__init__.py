"""Pictures: maps over images, grids with scale bars, animations. Importing this loads matplotlib, not pyplot."""

from dave_vit.viz.animation import AnimationStep, animate, encode_animation, save_animation
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
from dave_vit.viz.figures import Cell, Drawing, draw_grid
from dave_vit.viz.montage import draw_strip, load_font
from dave_vit.viz.panels import Panel, Scales, View, build_panels, draw_comparison, draw_side_by_side, panel_cells, show
from dave_vit.viz.photo import Photo, overlay_on_photo
from dave_vit.viz.rendering import (
    ScaledMap,
    blend,
    colorize_map,
    enlarge,
    overlay,
    scale_map,
    smooth_for_overlay,
    to_pillow,
)

__all__ = [
    "COLORMAPS",
    "DAVE",
    "HUES",
    "AnimationStep",
    "Cell",
    "Drawing",
    "Panel",
    "Photo",
    "ScaledMap",
    "Scales",
    "View",
    "animate",
    "blend",
    "build_panels",
    "colorize_map",
    "contour_cell",
    "draw_comparison",
    "draw_grid",
    "draw_side_by_side",
    "draw_strip",
    "encode_animation",
    "enlarge",
    "image_cell",
    "load_font",
    "map_cell",
    "overlay",
    "overlay_cell",
    "overlay_on_photo",
    "panel_cells",
    "save_animation",
    "scale_map",
    "show",
    "signed_cell",
    "smooth_for_overlay",
    "sureness_cell",
    "targets_cell",
    "to_pillow",
    "uncertainty_cell",
]
