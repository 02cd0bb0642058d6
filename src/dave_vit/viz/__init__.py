"""Figures: maps over images, grids with scale bars, animations. Importing this loads matplotlib, not pyplot."""

from dave_vit.viz.animation import AnimationStep, animate, encode_animation
from dave_vit.viz.cells import certainty_cell, image_cell, map_cell
from dave_vit.viz.colors import DAVE, HUES
from dave_vit.viz.contact_sheet import load_font
from dave_vit.viz.figures import Cell, Drawing, draw_grid
from dave_vit.viz.panels import Panel, Scales, View, build_panels, draw_comparison, draw_side_by_side, panel_cells, show
from dave_vit.viz.photo import Photo, overlay_on_photo
from dave_vit.viz.rendering import blend, colorize_map, overlay, scale_map, smooth_for_overlay, to_pillow
from dave_vit.viz.sentence import ShadedWord, sentence_cell

__all__ = [
    "DAVE",
    "HUES",
    "AnimationStep",
    "Cell",
    "Drawing",
    "Panel",
    "Photo",
    "Scales",
    "ShadedWord",
    "View",
    "animate",
    "blend",
    "build_panels",
    "certainty_cell",
    "colorize_map",
    "draw_comparison",
    "draw_grid",
    "draw_side_by_side",
    "encode_animation",
    "image_cell",
    "load_font",
    "map_cell",
    "overlay",
    "overlay_on_photo",
    "panel_cells",
    "scale_map",
    "sentence_cell",
    "show",
    "smooth_for_overlay",
    "to_pillow",
]
