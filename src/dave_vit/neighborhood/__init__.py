"""The neighborhood of an image: seeded views by warps and noise, and the pull-back from them."""

from dave_vit.neighborhood.views import Neighborhood, Noise, Spatial, Views
from dave_vit.neighborhood.warp import Warp, affine_matrix

__all__ = ["Neighborhood", "Noise", "Spatial", "Views", "Warp", "affine_matrix"]
