"""Models are what they were after a map, a refusal or an error: the same outputs, in ordinary tensors."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy

import pytest
import timm
import torch
from torch import nn

from dave_vit import DAVE
from dave_vit.errors import DaveError
from model_coverage.timm_entries import build, find_options
from tiny_models import SIZE, vit

_STAGES = {"depths": (1, 1, 1, 2), "embed_dims": (16, 24, 32, 48)}
# What makes small those that the table of models has not or has as refused, and the side of their images; whether the
# exact ones of the table are left alone is checked with them.
FAMILIES = {
    "coat_tiny": ({"img_size": 64, "serial_depths": (1, 1, 1, 1), "parallel_depth": 1}, 64),
    "crossvit_9_240": ({"depth": ((1, 1, 0),) * 2, "embed_dim": (32, 64), "num_heads": (2, 2)}, 240),
    "efficientformer_l1": (_STAGES, 224),
    "efficientformerv2_s0": ({**_STAGES, "img_size": 64}, 64),
    "efficientvit_b0": ({"widths": (8, 16, 24, 32, 48), "depths": (1,) * 5, "head_widths": (64, 64)}, 64),
    "efficientvit_m0": ({"depth": (1, 1, 2), "embed_dim": (16, 32, 48), "num_heads": (2, 2, 2)}, 224),
    "gcvit_xxtiny": find_options("gcvit_xxtiny"),
    "levit_conv_128s": ({"depth": (1, 1, 2), "embed_dim": (32, 48, 64), "num_heads": (2, 3, 4)}, 224),
    "nextvit_small": ({"depths": (1, 1, 5, 1), "stem_chs": (16, 16, 16)}, 64),
    "sequencer2d_s": find_options("sequencer2d_s"),
    "vit_tiny_patch16_224": ({"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 2}, 64),
}


def check_left_alone(model, image, presets=("paper", "default")):
    """Explain a model where that is possible; its outputs before and after are the same."""
    model = model.eval()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = deepcopy(model)(image)  # the model itself has made no pass yet, nor filled a cache
    for preset in presets:
        with suppress(DaveError):
            DAVE(model, samples=2, preset=preset).explain(image, 1)
    with torch.no_grad():
        after = model(image)
    before, after = (getattr(output, "logits", output) for output in (before, after))
    assert type(after) is torch.Tensor
    assert torch.equal(before, after)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    for module in model.modules():
        assert not any("_dave" in name for name in vars(module))


def draw_image(size):
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_a_model_that_fills_a_cache_in_its_first_pass():
    check_left_alone(timm.create_model("levit_128s"), draw_image(224), ["paper"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_timm(name):
    options, side = FAMILIES[name]
    check_left_alone(build(name, options, repeats=1), draw_image(side))


def test_caches_of_a_process():
    """DINOv3 keeps the coordinates of patches in a cache that all of its models share."""
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.DINOv3ViTConfig(image_size=SIZE, patch_size=8, **options)

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = transformers.DINOv3ViTModel(config), nn.Linear(24, 5)

        def forward(self, x):
            return self.head(self.trunk(x).pooler_output)

    for _ in range(2):
        check_left_alone(Classifier(), draw_image(SIZE))


class Caching(nn.Module):
    """Keeps what it computed of its size in a list, a dict, an attribute and a closure."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 8, stride=8), nn.Linear(8, 5)
        self.bias, self.table, self.items, self.kept = nn.Parameter(torch.randn(16)), {}, [], None
        memory = {}
        self.remember = lambda key, make: memory.setdefault(key, make())

    def forward(self, x):
        x = self.conv(x).flatten(2)
        if x.shape not in self.table:
            self.table[x.shape] = self.bias[torch.arange(x.shape[-1], device=x.device)]
            self.items.append(self.table[x.shape] * 2)
            self.kept = self.bias.exp()
        scale = self.remember(x.shape, lambda: torch.linspace(0.5, 1.5, x.shape[-1], device=x.device))
        return self.head((x * scale + self.table[x.shape] + self.items[-1] * self.kept).mean(-1))


@pytest.mark.parametrize("size", [32, 48])
def test_every_kind_of_cache(size):
    model = Caching().eval()
    with torch.no_grad():
        model.bias[:] = torch.linspace(-1, 1, 16)
    if size == 48:
        model.bias = nn.Parameter(torch.linspace(-1, 1, 36))
    check_left_alone(model, draw_image(size))


class Failing(nn.Module):
    """Fails in some pass, after it has filled a cache."""

    def __init__(self, error, after):
        super().__init__()
        self.model, self.error, self.passes_left, self.cache = vit(), error, after, None

    def forward(self, x):
        self.cache = torch.ones(1, device=x.device) if self.cache is None else self.cache
        self.passes_left -= 1
        if self.passes_left == 0:
            raise self.error
        return self.model(x) * self.cache


@pytest.mark.parametrize("after", range(2, 8))
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyError("name")], ids=["runtime", "key"])
def test_errors_of_a_model(error, after):
    model, image = Failing(error, after).eval(), draw_image(SIZE)
    with torch.no_grad():
        before = model(image)
    with pytest.raises(type(error)):
        DAVE(model, samples=8, chunk=1).explain(image, 1)
    with torch.no_grad():
        assert torch.equal(before, model(image))
    assert type(model.cache) is torch.Tensor


class Unsupported(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.cache = vit(), {}

    def forward(self, x):
        scale = self.cache.setdefault(x.shape, torch.full((1,), 0.5, device=x.device))
        return torch.special.bessel_j0(self.model(x)) * scale


@pytest.mark.parametrize("compiled", [False, True])
def test_refusals(compiled):
    model, image = Unsupported().eval(), draw_image(SIZE)
    with torch.no_grad():
        before = model(image)
    for _ in range(2):
        with pytest.raises(DaveError, match="bessel"):
            DAVE(model, samples=2, compiled=compiled).explain(image, 1)
    with torch.no_grad():
        assert torch.equal(before, model(image))
    assert all(type(value) is torch.Tensor for value in model.cache.values())
