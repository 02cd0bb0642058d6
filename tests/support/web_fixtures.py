"""What the tests of the web page share: a tiny model to serve, and images to send."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

import tiny_adapters
from dave_vit.models import Adapter

NAMES = ["cat", "tiger cat", "dog", "hen", "cock", "owl", "fox"]


def adapter(spec: str = "tiny", **shape: int) -> Adapter:
    return tiny_adapters.adapter(spec, NAMES, **shape)


def make_picture(size: tuple[int, int] = (40, 24)) -> Image.Image:
    colours = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(colours)


def encode_image(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


class SlowModel:
    """A model that waits before each pass, and counts them."""

    def __init__(self, pause: float = 0):
        self.model, self.passes, self.pause = adapter(), 0, pause
        self.free = threading.Event()
        self.model.register_forward_pre_hook(self._wait)

    def _wait(self, module, inputs) -> None:
        self.passes += 1
        time.sleep(self.pause)
        assert self.free.wait(20)


def wait_until(fact: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not fact() and time.monotonic() < end:
        time.sleep(0.02)
    return fact()
