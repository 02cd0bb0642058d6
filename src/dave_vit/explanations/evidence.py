"""Where the score of a word comes from: the image, the prompt, the words before it, or the model's constants."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.gradient import gradient
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.engine.targets import Score, ScoreSet, Target
from dave_vit.errors import OutputError, UnsupportedOperator
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.presets import scale_noise
from dave_vit.models.text_generation import AnsweredPrompt
from dave_vit.neighborhood import Neighborhood, Spatial

VIEWS = 8
"""Views of the image, from which the standard errors are estimated."""
SOURCES = ("image", "prompt", "answer", "constants")
_SHIFT, _NOISE = 0.03, 0.05  # of the views: these change no word; a mirror image would change "left" and writing
_SIGNIFICANT = 2.0  # standard errors, as in figures
_ROUNDING = 1e-2  # of the largest score: what half precision may lose


@dataclass(frozen=True)
class Part:
    """One part of a score: its average over views, and the standard error of that."""

    value: float
    standard_error: float

    @classmethod
    def of(cls, samples: Tensor) -> "Part":
        """Average samples ``[T]``."""
        return cls(float(samples.mean()), float(samples.std() / len(samples) ** 0.5))


@dataclass(frozen=True)
class WordEvidence:
    """Where the score of a word comes from; the parts add up to the score, all averaged over views of the image.

    Attributes:
        score: of the word, against its rivals or by itself.
        parts: of the image, of the prompt's words, of the words of the answer before, and of the model's constants.
        images: the part of each image, where a prompt has several.
    """

    score: float
    parts: dict[str, Part]
    images: Sequence[Part] = ()

    @property
    def image_share(self) -> float:
        """Share of the image in the sizes of all parts, from -1 to 1."""
        return self.parts["image"].value / (sum(abs(part.value) for part in self.parts.values()) or 1.0)

    @property
    def is_grounded(self) -> bool:
        """Whether the part of the image exceeds zero by more than two standard errors."""
        image = self.parts["image"]
        return image.value > _SIGNIFICANT * image.standard_error

    def describe(self) -> str:
        """Return the parts on one line, for the terminal."""
        image = self.parts["image"]
        others = ", ".join(f"{name} {self.parts[name].value:+.2f}" for name in SOURCES[1:])
        mark = "" if self.is_grounded else "  not grounded in the image"
        each = f" ({', '.join(f'{part.value:+.2f}' for part in self.images)})" if self.images else ""
        return f"{self.score:+.2f} = image {image.value:+.2f} ± {image.standard_error:.2f}{each}, {others}{mark}"

    def record(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        parts: dict[str, Any] = {name: asdict(part) for name, part in self.parts.items()}
        parts |= {"images": [asdict(part) for part in self.images]} if self.images else {}
        return {"score": self.score, **parts, "image_share": self.image_share, "grounded": self.is_grounded}


def compute_evidence(
    answered: AnsweredPrompt, words: Sequence[Score], *, views: int = VIEWS, seed: int = 0
) -> list[WordEvidence]:
    """Compute where the scores of words come from: one forward pass of each view, and a backward pass for each word.

    Args:
        answered: the model with its prompt and its answer.
        words: their scores.
        views: of the image, at least 2.
        seed: of the views.
    """
    model, image = answered.with_text_embeddings(), answered.inputs
    count = math.prod(image.shape[1:-3])  # of images
    spatial = Spatial(flip=0.0, rotation=0.0, translation=_SHIFT)
    neighborhood = Neighborhood(spatial, scale_noise(answered, _NOISE), fill=answered.traits.fill)
    drawn = neighborhood.views(tuple(image.shape[1:]), samples=views, seed=seed, device=image.device, dtype=image.dtype)
    rows, target = model.join(drawn.apply(image)[:, 0]), Target.of(ScoreSet(tuple(words)), 1)
    _check_joint(model, answered, target)

    wide = precise_dtype(rows.device)

    def decompose(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        result = gradient(model, rows[start:stop], target, rules=EFFECTIVE)
        pixels, text = model.split(result.weight.to(wide) * rows[start:stop, None].to(wide))
        return result.score.to(wide), pixels.reshape(*pixels.shape[:2], count, -1).sum(-1), text.sum(-1)

    chunks = PassSize(views).run_chunks(decompose, views)
    # [T, K], [T, K, N] of N images, [T, K, L]
    score, pixels, text = (torch.cat(parts).cpu() for parts in zip(*chunks, strict=True))
    prompt = text.shape[-1] - len(answered.tokens)
    parts = [pixels.sum(-1), text[..., :prompt].sum(-1), text[..., prompt:].sum(-1)]
    parts.append(score - torch.stack(parts).sum(0))
    named = dict(zip(SOURCES, parts, strict=True))
    values = [float(column.mean()) for column in score.T]
    sources = [{name: Part.of(part[:, at]) for name, part in named.items()} for at in range(len(words))]
    images = [[Part.of(one) for one in pixels[:, at].T] if count > 1 else () for at in range(len(words))]
    return [WordEvidence(*each) for each in zip(values, sources, images, strict=True)]


def find_evidence(answered: AnsweredPrompt, words: Sequence[Score], *, seed: int = 0) -> list[WordEvidence] | None:
    """Return where the scores of words come from; None where the model cannot be decomposed exactly."""
    try:
        return compute_evidence(answered, words, seed=seed)
    except (UnsupportedOperator, OutputError):
        return None


@torch.no_grad()
def _check_joint(model: Any, answered: AnsweredPrompt, target: Target) -> None:
    """Raise OutputError where the embeddings that are put in are not those that the model would compute."""
    own, joint = (target.read(output, 1) for output in (answered(answered.inputs), model(model.join(answered.inputs))))
    if not torch.allclose(own, joint, rtol=_ROUNDING, atol=_ROUNDING * float(own.abs().max())):
        raise OutputError(f"{answered.spec} embeds its text in a way of its own; its words have maps, but no shares")
