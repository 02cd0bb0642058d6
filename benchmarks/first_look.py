"""What the look into a model costs, which its first map waits for: seconds of one processor, and the share of the map.

python benchmarks/first_look.py --model timm:deit_tiny_patch16_224 --weights FILE
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from dave_vit import create_method, load_model
from dave_vit.engine import soundness as sound


def main() -> None:
    """Prints one line for each repeat, and the median share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--weights")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(given.model, given.weights, "cpu")
    method = create_method("dave", model, preset=given.preset)
    images = _image(model)
    method.attribute(images, 0)  # whatever is imported and kept for every map
    shares = [_share(model, method, images) for _ in range(given.repeats)]
    sys.stdout.write(f"median {100 * statistics.median(shares):.1f} %\n")


def _image(model: Any) -> torch.Tensor:
    from PIL import Image

    return torch.randn_like(model.preprocess(Image.new("RGB", (256, 256))))


def _share(model: Any, method: Any, images: torch.Tensor) -> float:
    spent, check = [], sound._SoundnessCheck.check

    def timed(*args: Any) -> None:
        start = time.thread_time()
        check(*args)
        spent.append(time.thread_time() - start)

    sound._CHECKED.pop(model, None)
    sound._SoundnessCheck.check = timed  # type: ignore[method-assign]
    try:
        start = time.thread_time()
        method.attribute(images, 0)
        whole = time.thread_time() - start
    finally:
        sound._SoundnessCheck.check = check  # type: ignore[method-assign]
    sys.stdout.write(f"{len(spent)} looks, {sum(spent):.3f} of {whole:.3f} s\n")
    return sum(spent) / whole


if __name__ == "__main__":
    main()
