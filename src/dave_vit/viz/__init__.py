"""Figures: maps over images, grids with scale bars, animations. Importing this loads matplotlib, not pyplot."""

from dave_vit.viz.colors import DAVE, HUES
from dave_vit.viz.figures import Cell, Drawing, certainty_cell, draw_grid, image_cell, map_cell
from dave_vit.viz.panels import build_panels, draw_comparison, draw_side_by_side, panel_cells, show
from dave_vit.viz.pictures import AnimationStep, ShadedWord, animate, encode_animation, load_font, sentence_cell
from dave_vit.viz.rendering import Panel, Scales, View, blend, colorize_map, overlay, scale_map, to_pillow

__all__ = [
    "DAVE",
    "HUES",
    "AnimationStep",
    "Cell",
    "Drawing",
    "Panel",
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
    "panel_cells",
    "scale_map",
    "sentence_cell",
    "show",
    "to_pillow",
]
