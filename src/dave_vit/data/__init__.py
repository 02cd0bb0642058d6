"""Images, data sets and class names."""

from dave_vit.data.base import Dataset, FileDataset, Item
from dave_vit.data.sets import DATASETS, open_dataset

__all__ = ["DATASETS", "Dataset", "FileDataset", "Item", "open_dataset"]
