"""Random models made of pairs, and what becomes of each: exact, refused, wrong or crashed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit import conservation_gap, effective_transformation
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.errors import DaveError
from module_pairs import attention, hidden, layers, norms, sequences, tokens, views, written_attention  # noqa: F401
from module_pairs.base import BLOCKS, GRID, PATCH, SIDE, TOKENS, WIDTH, Forms, Pair, linear

CLASSES = 3
ANY_TYPE = ["norms", "activations", "gated layers"]
TYPES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.03}
"""Precisions, and how far a map may be from its reference, relative to the largest number."""
COMMON = [group for group in BLOCKS if group not in ("randomness", "leaks")]


class Model(Pair):
    """Patches, some blocks, and a linear head; an image model ``[B, 3, 6, 6]`` to logits."""

    def __init__(self, random: Random, blocks: list[Pair]) -> None:
        super().__init__()
        self.embedding = random.choice(["convolution", "unfold", "reshape", "unshuffle"])
        self.pooling = random.choice(["mean", "first", "flat", "class token"])
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.position = nn.Parameter(torch.zeros(1, TOKENS, WIDTH))
        self.blocks = nn.ModuleList(blocks)
        self.head = linear(random, WIDTH * (TOKENS if self.pooling == "flat" else 1), CLASSES)
        self.query = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def embed(self, x: Tensor) -> Tensor:
        weight = self.patches.weight.flatten(1)
        if self.embedding == "convolution":
            return self.patches(x).flatten(2).transpose(1, 2) + self.position
        if self.embedding == "unfold":
            cut = F.unfold(x, PATCH, stride=PATCH).transpose(1, 2)
        elif self.embedding == "reshape":
            cut = x.reshape(len(x), 3, GRID, PATCH, GRID, PATCH).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        else:
            cut = F.pixel_unshuffle(x, PATCH).flatten(2).mT
        return F.linear(cut, weight, self.patches.bias) + self.position

    def pool(self, x: Tensor, *, held: bool) -> Tensor:
        if self.pooling == "mean":
            return x.mean(1)
        if self.pooling == "class token":
            every = torch.cat([self.query.expand(len(x), -1, -1), x], 1)
            if not held:
                return F.scaled_dot_product_attention(every, every, every)[:, 0]
            return (every @ every.mT * WIDTH**-0.5).softmax(-1).detach()[:, 0, None].matmul(every)[:, 0]
        return x[:, 0] if self.pooling == "first" else x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for module in self.blocks:
            x = module(x)
        return self.head(self.pool(x, held=False))

    def reference(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for module in self.blocks:
            x = module.reference(x)
        return self.head(self.pool(x, held=True))


@dataclass(frozen=True)
class Program:
    """A model with an input; everything follows from the seed."""

    seed: int
    model: Model
    images: Tensor

    @classmethod
    def draw(cls, seed: int) -> Program:
        """Return the program of a seed; one in sixteen is of another precision than float64."""
        random, narrow = Random(seed), seed % 16 == 15
        groups = [random.choice(ANY_TYPE if narrow else COMMON) for _ in range(random.randint(1, 3))]
        if not narrow and random.random() < 0.08:
            groups[random.randrange(len(groups))] = random.choice(["randomness", "leaks"])
        model = Model(random, [random.choice(BLOCKS[group])(random) for group in groups])
        return cls.fill(seed, model, random.choice(list(TYPES)[1:]) if narrow else torch.float64)

    @classmethod
    def of_form(cls, kind: type[Forms], name: str) -> Program:
        """Return the model of one block in a given form."""
        block = kind(Random(1))
        block.name = name
        return cls.fill(1, Model(Random(1), [block]))

    @classmethod
    def fill(cls, seed: int, model: Model, dtype: torch.dtype = torch.float64) -> Program:
        """Draw parameters and images."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.double().parameters():
                parameter.normal_(0, 0.4, generator=generator)
        images = torch.randn(2, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
        return cls(seed, model.to(dtype).eval(), images.to(dtype))

    @property
    def name(self) -> str:
        blocks = " | ".join(f"{type(b).__name__}({b.extra_repr()})" for b in self.model.blocks)
        return blocks if self.images.dtype is torch.float64 else f"{self.images.dtype} {blocks}"

    @property
    def has_map(self) -> bool:
        return all(module.has_map for module in self.model.blocks)

    @property
    def decides(self) -> bool:
        return any(module.decides for module in self.model.blocks)


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        kind: "exact", "refused", "wrong" or "crashed"; "unfit" where the pair itself disagrees.
        detail: the refusal, the error or the difference.
        needless: refused although an exact map exists and the image decides nothing.
    """

    kind: str
    detail: str = ""
    needless: bool = False


def judge(program: Program) -> Verdict:
    """Compare the map of a program with the gradient of its reference, and its outputs with those before."""
    before = compute_outputs(copy.deepcopy(program.model), program.images)  # the model itself has made no pass yet
    verdict = judge_map(program)
    after = compute_outputs(program.model, program.images)
    is_same = type(after) is Tensor and torch.allclose(before, after, rtol=1e-9, atol=1e-9, equal_nan=True)
    if program.has_map and not is_same:
        return Verdict("wrong", f"the model's outputs are others after it was {verdict.kind}")
    return verdict


@torch.no_grad()
def compute_outputs(model: Model, images: Tensor) -> Tensor:
    return model(images)


def judge_map(program: Program) -> Verdict:
    model, images, target = program.model, program.images, program.seed % CLASSES
    try:
        weight = effective_transformation(model, images, target)
    except DaveError as error:
        text = str(error)
        if "\n" in text:
            return Verdict("crashed", f"a refusal of several lines: {text!r}")
        return Verdict("refused", text, needless=program.has_map and not program.decides)
    except Exception as error:
        return Verdict("crashed", f"{type(error).__name__}: {error}")
    if not program.has_map:
        return Verdict("wrong", "a map came out where none is exact")
    tolerance = TYPES[images.dtype]
    logits = model.reference(images).detach()
    with torch.no_grad():
        if not torch.allclose(model(images), logits, rtol=tolerance, atol=tolerance * float(logits.abs().max())):
            return Verdict("unfit", f"values differ by {float((model(images) - logits).abs().max()):.1e}")
    difference = measure_difference(weight, model, images, target)
    if not difference < tolerance and images.dtype is not torch.float64:  # a tie that rounding breaks in another way
        difference = min(difference, measure_difference(weight, copy.deepcopy(model).double(), images.double(), target))
    if not difference < tolerance:
        return Verdict("wrong", f"the map differs by {difference:.1e}")
    recorded = RecordedModel(model)
    for _ in range(2):  # recorded, and played again
        again = recorded.gradient(images, target, EFFECTIVE).weight[:, 0]
        difference = float((again - weight).abs().max()) / float(weight.abs().max().clamp(min=1e-9))
        if not difference < tolerance:
            return Verdict("wrong", f"the recorded map differs by {difference:.1e}")
    gap = conservation_gap(model, images[:1], target) if images.dtype is torch.float64 else 0.0
    return Verdict("exact") if gap < 1e-7 else Verdict("wrong", f"{gap:.1e} of the logit is unaccounted for")


def measure_difference(weight: Tensor, model: Model, images: Tensor, target: int) -> float:
    """Return how far a map is from the gradient of the reference, relative to the largest number."""
    leaf = images.clone().requires_grad_()
    expected = torch.autograd.grad(model.reference(leaf)[:, target].sum(), leaf)[0]
    return float((weight - expected).abs().max()) / float(expected.abs().max().clamp(min=1e-9))
