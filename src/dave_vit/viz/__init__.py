"""Figures: maps over images, grids with scale bars, animations. Importing this loads matplotlib, not pyplot."""

from dave_vit.viz.figures import map_cell
from dave_vit.viz.panels import draw_comparison, show
from dave_vit.viz.rendering import overlay

__all__ = ["draw_comparison", "map_cell", "overlay", "show"]
