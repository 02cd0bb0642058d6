"""A model ready to be evaluated, and the maps that a method makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dave_vit.bench.classes import class_map
from dave_vit.bench.plan import MethodEntry, Smoothing
from dave_vit.data import Dataset
from dave_vit.data.placement import Placements
from dave_vit.maps import collapse, official_postprocess, smooth
from dave_vit.methods import create_method


class Subject:
    """A model, and what its preprocessing does to classes, places and colours.

    Args:
        model: has ``preprocess`` and ``class_names``, as ``load_model`` gives it.
        data: what it is evaluated on.
    """

    def __init__(self, model: Any, data: Dataset) -> None:
        self.model: nn.Module = model
        self.placements = Placements(model.preprocess)
        self.classes = class_map(data.class_names, model.class_names)
        self.black, self.white = (self._colour(grey) for grey in (0, 255))

    def label(self, label: int | None) -> int | None:
        """A label of the data set as a class of the model."""
        return None if label is None else self.classes.get(label)

    def picture(self, inputs: Tensor) -> npt.NDArray[np.uint8]:
        """Preprocessed images as the model sees them, [B,H,W,3]."""
        black, white = (torch.tensor(colour[:3]).view(1, 3, 1, 1) for colour in (self.black, self.white))
        shown = (inputs[:, :3].detach().float().cpu() - black) / (white - black)
        return np.asarray((shown.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy())

    def _colour(self, grey: int) -> list[float]:
        """A black or white pixel after preprocessing, one number per channel."""
        from PIL import Image

        shown = self.placements.preprocess(Image.new("RGB", (64, 64), (grey, grey, grey)))
        shown = shown.reshape(shown.shape[-3:]).float()  # [C,H,W]
        centre: list[float] = shown[:, shown.shape[1] // 2, shown.shape[2] // 2].tolist()
        return centre


class MapMaker:
    """A method of the plan with its options and seed, and the smoothing of the run.

    Args:
        entry: of the plan.
        smoothing: of the plan.
        seed: for methods that draw samples.
    """

    def __init__(self, entry: MethodEntry, smoothing: Smoothing, seed: int) -> None:
        self.entry, self.smoothing = entry, smoothing
        self.options = {**({"seed": seed} if entry.seeded else {}), **entry.options}

    def maps(self, model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        """Maps [B,H,W] of targets [B], or [B,K,H,W] of targets [B,K]."""
        method = create_method(self.entry.method, model, **self.options)
        attribution = method.attribute(inputs, target).detach()
        maps = self._smooth(collapse(attribution.flatten(0, -4)))  # [B * K,H,W]
        return maps.view(*target.shape, *maps.shape[1:])

    def _smooth(self, maps: Tensor) -> Tensor:
        if self.smoothing.kind == "official":
            return official_postprocess(maps)
        return smooth(maps, self.smoothing.kind, self.smoothing.size, self.smoothing.sigma)
