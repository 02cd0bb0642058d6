"""What the tests of the web page share: a tiny model to serve, and images to send."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from dave_vit.models import Adapter, Preprocessing
from tiny_models import SIZE, vit

NAMES = ["cat", "tiger cat", "dog", "hen", "cock", "owl", "fox"]


def adapter(spec: str = "tiny", **shape: int) -> Adapter:
    def transform(image: Image.Image) -> torch.Tensor:
        pixels = np.asarray(image.resize((SIZE, SIZE)), dtype=np.float32) / 255
        return torch.from_numpy(pixels).permute(2, 0, 1) * 2 - 1

    half = (0.5, 0.5, 0.5)
    return Adapter(vit(num_classes=len(NAMES), **shape), Preprocessing(transform, half, half), NAMES, spec=spec)


def picture(size: tuple[int, int] = (40, 24)) -> Image.Image:
    colours = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(colours)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


class Slow:
    """A model that waits before each pass, and counts them."""

    def __init__(self, pause: float = 0):
        self.model, self.passes, self.pause = adapter(), 0, pause
        self.free = threading.Event()
        self.model.register_forward_pre_hook(self._wait)

    def _wait(self, module, inputs) -> None:
        self.passes += 1
        time.sleep(self.pause)
        assert self.free.wait(20)


def until(fact: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not fact() and time.monotonic() < end:
        time.sleep(0.02)
    return fact()
