"""Images, data sets and class names."""

from dave_vit.data.base import Dataset, Item
from dave_vit.data.opening import open_dataset

__all__ = ["Dataset", "Item", "open_dataset"]
