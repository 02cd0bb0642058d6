"""Maps after a change of a model: those of a new model with the same change, whatever was recorded before."""

from __future__ import annotations

import os
import sys
import threading
from contextvars import ContextVar
from functools import lru_cache, partial
from types import MethodType, ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from dave_vit import DAVE, effective_transformation
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.fast.recording import Recording
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.errors import UnsupportedOperator
from fast_marker import needs_fast

GLOBAL_FACTOR = 1.5
GLOBAL_TENSOR = torch.tensor(1.25, dtype=torch.float64)
GLOBAL_TABLE = {"factor": 1.5, "other": 1.1}
GLOBAL_CONFIG = SimpleNamespace(factor=1.1)
GLOBAL_NORM = nn.LayerNorm(8, elementwise_affine=False, dtype=torch.float64)
OF_CONTEXT, OF_THREAD = ContextVar("factor", default=1.1), threading.local()
OF_THREAD.factor = 1.2
IMPORTED = ModuleType("imported")
exec("factor, table = 1.1, {'factor': 1.2}\ndef scale(x): return x * factor * table['factor']", vars(IMPORTED))
os.environ["DAVE_TEST_FACTOR"] = "1.1"


def scale_in_file(x):
    x = x * GLOBAL_FACTOR * GLOBAL_TENSOR * GLOBAL_TABLE["factor"] * GLOBAL_CONFIG.factor
    x = (x + GLOBAL_NORM(x)) * read_surroundings() * OfMeta.factor
    return IMPORTED.scale(x) * scale_in_file.factor * find_factor()


scale_in_file.factor = 1.1


def read_surroundings():
    return OF_CONTEXT.get() * OF_THREAD.factor * float(os.getenv("DAVE_TEST_FACTOR"))


@lru_cache(maxsize=0)
def find_factor():
    return GLOBAL_TABLE["other"]


class Meta(type):
    factor = 1.1


class OfMeta(metaclass=Meta):
    pass


def make_scaling(factor):
    def scale(x, power=1.0):
        return x * factor * power

    return scale


class Scaler:
    """An object that is no module."""

    factor = 1.2

    def __init__(self):
        self.own = 1.3

    def __call__(self, x):
        return x * self.factor * self.own


class Mixer(nn.Module):
    level = 1.1

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.heads, self.mask = 2, None

    def forward(self, x):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), attn_mask=self.mask)
        return x + self.finish(mixed.transpose(1, 2).flatten(2)) * self.level

    def finish(self, x):
        return self.proj(x)

    @property
    def width(self):
        return 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.ModuleList([Mixer(), Mixer()])
        self.gate, self.drop, self.head = nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 5)
        self.register_buffer("shift", torch.full((8,), 0.1))
        self.scale, self.function, self.closure = 1.1, F.gelu, make_scaling(1.2)
        self.partial, self.method = partial(torch.mul, other=1.3), self.scaled
        self.tensor, self.maybe = torch.full((8,), 1.4, dtype=torch.float64), None
        self.pair, self.numbers, self.table = (1.1, 0.9), [1.2, [0.8]], {"a": {"b": 1.3}}
        self.config, self.scaler, self.order = SimpleNamespace(factor=1.2, inner=SimpleNamespace(f=1.1)), Scaler(), {0}

    def scaled(self, x):
        return x * 1.1

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2) + self.shift
        for block in self.blocks:
            x = block(x)
        x = self.closure(self.function(self.drop(x))) * self.scale * self.tensor
        x = self.method(self.partial(x)) * self.pair[0] * self.numbers[1][0] * self.table["a"]["b"]
        x = x if self.maybe is None else x * self.maybe
        x = x * self.config.factor * self.config.inner.f
        x = x.roll(len(self.order), 1) * (1.1 if self.blocks[0].norm.weight.requires_grad else 0.7)
        return self.head(self.gate(self.scaler(scale_in_file(x)))[:, 0])


def build():
    generator = torch.Generator().manual_seed(0)
    model = Net().double().eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    model.head.weight.data /= 20  # where one view has all of the probability, a map is made of rounding errors
    return model


def doubled(self, x):
    return F.linear(x, 2 * self.weight, self.bias)


class Doubled(nn.Linear):
    forward = doubled


class OtherMixer(Mixer):
    def finish(self, x):
        return super().finish(x).flip(1)


def set_parameter(model, patch):
    model.head.weight = nn.Parameter(2 * model.head.weight.detach())


def prune_weights(model, patch):
    prune.l1_unstructured(model.blocks[0].proj, "weight", amount=0.5)


def hook_globally(model, patch):
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, made: 1.5 * made if isinstance(module, Mixer) else None
    )
    patch.callback(handle.remove)


def hook_globally_before(model, patch):
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, given: (1.5 * given[0],) if isinstance(module, Mixer) else None
    )
    patch.callback(handle.remove)


def load_others(model, patch):
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})


def assign_others(model, patch):
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()}, assign=True)


def exchange_memory(model, patch):
    weight = model.blocks[0].proj.weight
    weight.data = weight.data.t()  # the same memory, read otherwise


def swap_blocks(model, patch):
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def set_code(model, patch):
    patch.setattr(scale_in_file, "__code__", (lambda x: x * 3.0).__code__)


def set_in_context(model, patch):
    OF_CONTEXT.set(2.5)
    patch.callback(lambda: OF_CONTEXT.set(1.1))


HERE = sys.modules[__name__]
CHANGES = {
    "forward of a module": lambda m, p: setattr(m.gate, "forward", torch.relu),
    "bound forward of a module": lambda m, p: setattr(m.head, "forward", MethodType(doubled, m.head)),
    "forward of a class": lambda m, p: p.setattr(Mixer, "forward", lambda self, x: x + self.proj(x)),
    "forward of a class of torch": lambda m, p: p.setattr(nn.GELU, "forward", lambda self, x: torch.relu(x)),
    "another method of a class": lambda m, p: p.setattr(Mixer, "finish", lambda self, x: self.proj(x).flip(1)),
    "attribute of a class": lambda m, p: p.setattr(Mixer, "level", 2.0),
    "class of a module": lambda m, p: setattr(m.head, "__class__", Doubled),
    "class of a block": lambda m, p: setattr(m.blocks[1], "__class__", OtherMixer),
    "a number": lambda m, p: setattr(m, "scale", 2.0),
    "a whole number": lambda m, p: setattr(m.blocks[0], "heads", 4),
    "eps": lambda m, p: setattr(m.blocks[0].norm, "eps", 0.5),
    "a function": lambda m, p: setattr(m, "function", torch.relu),
    "a closure": lambda m, p: setattr(m, "closure", make_scaling(2.0)),
    "what a closure holds": lambda m, p: setattr(m.closure.__closure__[0], "cell_contents", 2.0),
    "default of a function": lambda m, p: setattr(m.closure, "__defaults__", (2.0,)),
    "a partial": lambda m, p: setattr(m, "partial", partial(torch.mul, other=2.0)),
    "a method": lambda m, p: setattr(m, "method", lambda x: x * 2.0),
    "a plain tensor": lambda m, p: setattr(m, "tensor", 2 * m.tensor),
    "numbers of a plain tensor": lambda m, p: m.tensor[:4].mul_(2),
    "a tuple": lambda m, p: setattr(m, "pair", (2.0, 0.9)),
    "an item of a list": lambda m, p: m.numbers[1].__setitem__(0, 2.0),
    "an item of a dict": lambda m, p: m.table["a"].__setitem__("b", 2.0),
    "an item of a set": lambda m, p: m.order.add(1),
    "a config object": lambda m, p: setattr(m, "config", SimpleNamespace(factor=2.0, inner=SimpleNamespace(f=1.1))),
    "a value in a config object": lambda m, p: setattr(m.config.inner, "f", 2.0),
    "an object's own value": lambda m, p: setattr(m.scaler, "own", 2.0),
    "an object's class": lambda m, p: p.setattr(Scaler, "factor", 2.0),
    "a call of an object": lambda m, p: p.setattr(Scaler, "__call__", lambda self, x: x * 3.0),
    "None to a tensor": lambda m, p: setattr(m, "maybe", torch.full((8,), 2.0, dtype=torch.float64)),
    "None to a mask": lambda m, p: setattr(m.blocks[0], "mask", torch.ones(16, 16).tril().bool()),
    "a hook": lambda m, p: m.blocks[0].register_forward_hook(lambda module, given, made: 1.5 * made),
    "a hook before": lambda m, p: m.blocks[0].register_forward_pre_hook(lambda module, given: (1.5 * given[0],)),
    "a hook on all modules": hook_globally,
    "a hook before all modules": hook_globally_before,
    "numbers of a parameter": lambda m, p: m.head.weight.data.mul_(2),
    "numbers of a parameter inside": lambda m, p: m.blocks[0].qkv.weight.data.mul_(2),
    "a parameter": set_parameter,
    "memory of a parameter": lambda m, p: setattr(m.head.weight, "data", 2 * m.head.weight.data),
    "layout of a parameter": exchange_memory,
    "numbers of a buffer": lambda m, p: m.shift.add_(1),
    "a buffer": lambda m, p: setattr(m, "shift", m.shift + 1),
    "a state dict": load_others,
    "an assigned state dict": assign_others,
    "a module": lambda m, p: setattr(m, "gate", nn.ReLU()),
    "order of modules": swap_blocks,
    "fewer modules": lambda m, p: m.blocks.pop(0),
    "one module twice": lambda m, p: m.blocks.__setitem__(1, m.blocks[0]),
    "a parametrization": lambda m, p: parametrizations.weight_norm(m.head),
    "pruning": prune_weights,
    "a number in a file": lambda m, p: p.setattr(HERE, "GLOBAL_FACTOR", 2.5),
    "a tensor in a file": lambda m, p: p.setattr(HERE, "GLOBAL_TENSOR", 2 * GLOBAL_TENSOR),
    "a table in a file": lambda m, p: p.setitem(GLOBAL_TABLE, "factor", 2.5),
    "a config in a file": lambda m, p: p.setattr(GLOBAL_CONFIG, "factor", 2.5),
    "a function in a file": lambda m, p: p.setattr(HERE, "scale_in_file", lambda x: x * 3.0),
    "code of a function": set_code,
    "a module in a file": lambda m, p: p.setattr(GLOBAL_NORM, "eps", 2.0),
    "a table that a cached function reads": lambda m, p: p.setitem(GLOBAL_TABLE, "other", 2.5),
    "attribute of a function": lambda m, p: p.setattr(scale_in_file, "factor", 2.5),
    "class of a class": lambda m, p: p.setattr(Meta, "factor", 2.5),
    "a number in an imported file": lambda m, p: p.setattr(IMPORTED, "factor", 2.5),
    "a table in an imported file": lambda m, p: p.setitem(IMPORTED.table, "factor", 2.5),
    "a function in an imported file": lambda m, p: p.setattr(IMPORTED, "scale", lambda x: x * 3.0),
    "a function of torch": lambda m, p: p.setattr(F, "scaled_dot_product_attention", lambda q, k, v, attn_mask: v),
    "the environment": lambda m, p: p.setenv("DAVE_TEST_FACTOR", "2.5"),
    "a context variable": set_in_context,
    "a value of a thread": lambda m, p: p.setattr(OF_THREAD, "factor", 2.5),
    "whether a parameter is trained": lambda m, p: m.blocks[0].norm.weight.requires_grad_(False),
}
SAME_MAP = {"a parametrization"}  # the same numbers, computed in another way


class Patch(pytest.MonkeyPatch):
    def __init__(self):
        super().__init__()
        self.callbacks = []

    def callback(self, function):
        self.callbacks.append(function)

    def undo(self):
        super().undo()
        for function in self.callbacks:
            function()


@pytest.fixture
def patch():
    patch = Patch()
    yield patch
    patch.undo()


@pytest.fixture
def image():
    return torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


COMPILED = ("forward of a module", "a hook", "numbers of a parameter inside", "a plain tensor", "a number in a file")
CASES = [
    *(pytest.param(name, False, id=f"{name}, recorded") for name in CHANGES),
    *(
        pytest.param(name, True, id=f"{name}, compiled", marks=[] if name in COMPILED else pytest.mark.slow)
        for name in CHANGES
    ),
]


@pytest.mark.parametrize(("name", "compiled"), CASES)
def test_a_change_is_seen(name, compiled, patch, image, monkeypatch):
    monkeypatch.setattr("dave_vit.engine.fast.compiled.compile_graph", lambda graph, given: graph)
    # graphs of all changes by the preset with the least to trace; which changes are seen does not depend on its rules
    preset = "default" if name in COMPILED or not compiled else "paper"
    options = {"samples": 4, "compiled": compiled, "preset": preset}
    model = build()
    dave = DAVE(model, **options)
    before = dave.attribute(image, 1)
    CHANGES[name](model, patch)
    after, by_another = dave.attribute(image, 1), DAVE(model, **options).attribute(image, 1)
    patch.undo()
    fresh = build()
    CHANGES[name](fresh, patch)
    monkeypatch.setenv("DAVE_FAST", "0")
    expected = DAVE(fresh, samples=4, preset=preset).attribute(image, 1)
    for actual in (after, by_another):
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)
    assert torch.allclose(before, expected, rtol=1e-3) == (name in SAME_MAP)


def test_rules_that_are_edited_under_their_old_name_are_checked(image):
    model = build()
    effective_transformation(model, image, 1)
    edited = EFFECTIVE.extend(EFFECTIVE.name, {"gelu": lambda call, x, *args, **kwargs: 2 * x})
    with pytest.raises(UnsupportedOperator, match="the logits change"):
        effective_transformation(model, image, 1, rules=edited)


@needs_fast
def test_the_unchanged_model_is_recorded(image):
    model = build()
    assert isinstance(RecordedModel(model).find_run(image), Recording)


def test_a_file_that_a_model_reads_is_read_again(image, tmp_path):
    path = str(tmp_path / "factor.txt")

    class Reading(nn.Sequential):
        def forward(self, x):
            with open(path) as file:
                return super().forward(x) * float(file.read())

    model, maps = Reading(nn.Flatten(), nn.Linear(768, 5)).double().eval(), []
    for factor in (1.0, 2.0):
        (tmp_path / "factor.txt").write_text(str(factor))
        maps.append(DAVE(model, samples=2, preset="paper").attribute(image, 1))
    torch.testing.assert_close(2 * maps[0], maps[1])
