"""Small outputs of every method and preset, recorded so that a refactoring can be shown to change no map.

Run this file to record them anew after a change that is meant to move numbers, all or some:

    python tests/support/recorded_outputs.py ["method gradcam" ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import tiny_models

FILE = Path(__file__).with_suffix(".npz")
FEW = {  # options that make slow methods quick enough for a test
    "dave": {"samples": 6},
    "equivariant": {"samples": 4},
    "smoothgrad": {"samples": 4},
    "integrated_gradients": {"steps": 4},
    "occlusion": {"window": 56, "stride": 56},
    "rise": {"samples": 4, "cells": 3},
    "lime": {"samples": 8, "patch": 56},
    "kernel_shap": {"samples": 8, "patch": 56},
    "tis": {"samples": 4},
    "vit_cx": {"distance": 0.5},
    "greedy": {"patch": 56, "rounds": 2},
    "mda": {"patch": 56},
    "iia": {"steps": 2},
    "beyond_intuition": {"steps": 2},
    "expected_gradients": {"samples": 4},
}
# A rounding error of float32 decides what these weigh (a fraction near its pole) or group: recorded in float64.
ILL_CONDITIONED = ("gradcam_plus_plus", "vit_cx")
SLOW = ("scorecam", "ablationcam", "mda", "attention_flow", "omenn")  # recorded for one image
PRESETS = ("default", "exact", "threshold", "paper", "official")


@cache
def images() -> list[Image.Image]:
    from dave_vit.data.builtin import compose_scene

    return [Image.fromarray(compose_scene(index, "pair", seed=31_000).image) for index in range(2)]


@cache
def load(spec: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    from dave_vit import load_model

    return load_model(spec).to(dtype)


@cache
def inputs(spec: str) -> Tensor:
    return torch.cat([load(spec).preprocess(image) for image in images()])


def summarize(attribution: Tensor) -> Tensor:
    """Reduce an attribution ``[..., C, H, W]`` to sums over 14 x 14 cells and 32 single pixels of its channel sum."""
    total = attribution.detach().double().sum(-3)
    cells = nn.functional.adaptive_avg_pool2d(total.flatten(0, -3)[:, None], 14).flatten(1)
    pixels = torch.randperm(total.shape[-2] * total.shape[-1], generator=torch.Generator().manual_seed(0))[:32]
    return torch.cat([cells, total.flatten(-2).flatten(0, -2)[:, pixels]], 1).float()


def _options(name: str) -> dict[str, Any]:
    from dave_vit.methods.options import declared_options

    few = {key: value for key, value in FEW.get(name, {}).items() if key in declared_options(name)}
    return {**few, **({"seed": 3} if "seed" in declared_options(name) else {})}


def method_output(name: str, spec: str = "builtin") -> Tensor:
    from dave_vit import create_method

    count = 1 if name in SLOW else 2
    dtype = torch.float64 if name in ILL_CONDITIONED else torch.float32
    method = create_method(name, load(spec, dtype), **_options(name))
    return method.attribute(inputs(spec)[:count].to(dtype), [3, 40][:count])


def preset_output(preset: str, spec: str = "builtin", target: Any = None, count: int = 2) -> Tensor:
    from dave_vit import DAVE

    return DAVE(load(spec), preset=preset, samples=6, seed=1).attribute(inputs(spec)[:count], target)


def _default_details() -> Tensor:
    from dave_vit import DAVE

    found = DAVE(load("builtin"), samples=8, seed=2).explain(inputs("builtin"))
    return torch.stack([found.mean, found.standard_error, found.map], 1)[:, :, None]


def _word() -> Tensor:
    from dave_vit import DAVE

    answer = load("builtin-captions").with_prompt(images()[0])
    return DAVE(answer, samples=4, seed=1).attribute(answer.inputs, answer.score(0))


def _clip() -> Tensor:
    import transformers

    from dave_vit import DAVE

    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    sizes = {"tubelet_size": 2, "image_size": 32, "patch_size": 8, "num_frames": 4, "num_labels": 5}
    model = transformers.VideoMAEForVideoClassification(transformers.VideoMAEConfig(**sizes, **shape)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    clips = torch.randn(2, 4, 3, 32, 32, generator=generator)
    return DAVE(model, preset="paper", samples=4).attribute(clips, [0, 3])


def _several() -> Tensor:
    return preset_output("default", target=torch.tensor([[1, 5], [7, 40]]))


def _against() -> Tensor:
    from dave_vit import Contrast

    return preset_output("exact", target=Contrast([3, 40], 9))


def _score() -> Tensor:
    return preset_output("default", target=lambda logits: logits[:, 4] - logits[:, 8], count=1)


def _torchvision() -> Tensor:
    """Return maps of two presets: torchvision's tokens come sequence first, which may hide the batch of constants."""
    from dave_vit import DAVE

    model, pictures = tiny_models.torchvision_vit(), tiny_models.images(2)
    return torch.stack([DAVE(model, preset=preset, samples=4).attribute(pictures) for preset in ("default", "paper")])


def _effective() -> Tensor:
    from dave_vit import effective_transformation

    return effective_transformation(load("builtin"), inputs("builtin"), [3, 40])


def cases() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the name and the computation of every recorded output."""
    from dave_vit import METHODS

    for name in METHODS:
        if name not in ("bcos", "tam"):  # tam explains words only
            yield f"method {name}", lambda name=name: method_output(name)
    yield "method bcos", lambda: method_output("bcos", "builtin-bcos")
    for preset in PRESETS:
        yield f"preset {preset}", lambda preset=preset: preset_output(preset)
    yield "preset default on builtin-bcos", lambda: preset_output("default", "builtin-bcos", count=1)
    yield "several classes", _several
    yield "against a class", _against
    yield "score function", _score
    yield "mean, standard error, map", _default_details
    yield "word of a caption", _word
    yield "clip", _clip
    yield "torchvision ViT", _torchvision
    yield "effective transformation", _effective


def record(names: Sequence[str]) -> None:
    """Record the named outputs, or all of them where none is named."""
    torch.set_num_threads(1)
    known = dict(np.load(FILE)) if names else {}
    made = {name: summarize(compute()).numpy() for name, compute in cases() if name in names or not names}
    np.savez_compressed(FILE, **known | made)


if __name__ == "__main__":
    record(sys.argv[1:])
