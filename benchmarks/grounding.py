"""Whether the sources of a word tell that its object is not in the picture, beside its probability and attention.

`dave analyze --plugin benchmarks/grounding.py grounding` computes the table of docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.analysis.inputs import analysis, flag
from dave_vit.data.builtin import CLASS_NAMES, compose_edited_scene, compose_scene
from dave_vit.data.builtin.draws import Draws
from dave_vit.errors import OptionError
from dave_vit.explanations.evidence import VIEWS, WordEvidence, compute_evidence
from dave_vit.models import load_model
from dave_vit.models.architectures.captioner import AND
from dave_vit.models.text_generation import AnsweredPrompt, TextGenerator
from dave_vit.viz.report_section import ReportTable, Section, estimate_cell

_SPEC = "builtin-captions"
_PICTURES = 63_000  # seed of the pictures: neither training nor its settings saw them
_RESAMPLES = 2000


@dataclass(frozen=True)
class GroundingOptions:
    """Options of the analysis."""

    n: int = flag(60, "Pictures that are captioned, each then edited twice.", least=2, metavar="N")
    views: int = flag(VIEWS, "Views of each picture.", least=2, metavar="N")
    device: str = flag("cpu", "Device of the model.")
    seed: int = 0


@dataclass(frozen=True)
class NamedWord:
    """A word of the name of an object, in a picture that shows the object or not any more.

    Attributes:
        picture: number of the picture.
        edit: "none", "removed" or "swapped", what was done to one of its objects.
        word: its text.
        is_shown: whether the picture shows the object.
        image: part of the image in the word's score against its rivals.
        certainty: that part in standard errors, on which the mark "not grounded in the image" rests.
        share: share of the image in the sizes of all parts.
        probability: of the word after those before it.
        attention: share of the attention to the image in what both kinds of attention add, by norm.
    """

    picture: int
    edit: str
    word: str
    is_shown: bool
    image: float
    certainty: float
    share: float
    probability: float
    attention: float

    @property
    def is_marked(self) -> bool:
        """Whether the word is marked as not grounded in the image."""
        return self.certainty <= 2


SIGNALS = {
    "image part, in standard errors": "certainty",
    "image part, in logits": "image",
    "share of the image": "share",
    "probability": "probability",
    "attention's share": "attention",
}


@analysis("grounding")
def analyze_grounding(options: GroundingOptions) -> Section:
    """Measure how well the sources of a word tell that its object was removed from the picture or swapped."""
    model = load_model(_SPEC, device=options.device)
    assert isinstance(model, TextGenerator)
    words = [word for index in range(options.n) for word in score_picture(model, index, options)]
    if len({word.is_shown for word in words}) < 2:
        raise OptionError(f"none of {options.n} captions names both objects; take more pictures")
    rows = [_compare_signals(words, edit, options.seed) for edit in ("removed", "swapped")]
    head = ("object was", "words", *SIGNALS, "marked, shown", "marked, not shown")
    table = ReportTable(head, tuple(_format_row(row) for row in rows))
    text = (
        "A captioner names both objects of a picture. Then one object is removed, or another class drawn at its place, "
        "and the old caption is given to the model again, word by word. Area under the ROC curve with which each "
        "number tells words whose object is still there from words whose object is not, with 95 % intervals from a "
        "bootstrap over pictures; and the share of words that are marked as not grounded in the image."
    )
    facts = {"model": _SPEC, "pictures": len({word.picture for word in words}), "words": len(words)}
    facts |= {"views": options.views, "seed": options.seed}
    return Section("grounding", "Words without an object", text, facts, [table], [asdict(word) for word in words])


def score_picture(model: TextGenerator, index: int, options: GroundingOptions) -> Iterator[NamedWord]:
    """Yield the words of a picture as it is, with one object removed, and with one swapped.

    Yields nothing where the caption does not name both objects and nothing else.
    """
    scene = compose_scene(index, "pair", seed=_PICTURES)
    names = [thing.name for thing in scene.targets]
    caption = model.with_prompt(Image.fromarray(scene.image)).answer
    if sorted(caption.split(f" {AND} ")) != sorted(names):
        return
    target = index % 2
    other = _choose_replacement(names, index)
    pictures = {
        "none": scene.image,
        "removed": compose_edited_scene(index, target, seed=_PICTURES),
        "swapped": compose_edited_scene(index, target, other, seed=_PICTURES),
    }
    for edit, pixels in pictures.items():
        answered = model.with_prompt(Image.fromarray(pixels), answer=caption)
        owners = dict(_words_of_names(caption))
        scores = answered.scores(list(owners))
        evidence = compute_evidence(answered, scores, views=options.views, seed=options.seed)
        chances, attention = answered.probabilities(), attention_shares(answered)
        for (word, name), found in zip(owners.items(), evidence, strict=True):
            is_shown = edit == "none" or name != names[target]
            yield _describe(index, edit, answered, word, is_shown, found, chances[word], attention[word])


def _describe(
    index: int, edit: str, answered: AnsweredPrompt, word: int, is_shown: Any, found: WordEvidence, *numbers: float
) -> NamedWord:
    image = found.parts["image"]
    certainty = image.value / max(image.standard_error, 1e-12)
    text = answered.words[word].text
    return NamedWord(index, edit, text, is_shown, image.value, certainty, found.image_share, *numbers)


def _words_of_names(caption: str) -> Iterator[tuple[int, str]]:
    """Yield the index of each word that belongs to a name, with that name."""
    word = 0
    for name in caption.split(f" {AND} "):
        for _ in name.split():
            yield word, name
            word += 1
        word += 1  # "and"


def _choose_replacement(names: Sequence[str], index: int) -> str:
    """Return a class that shares no word with the names of a picture."""
    used = {word for name in names for word in name.split()}
    return Draws(_PICTURES, index).choice([name for name in CLASS_NAMES if not used & set(name.split())])


@torch.no_grad()
def attention_shares(answered: AnsweredPrompt) -> list[float]:
    """Return, for each word, how much attention to the image adds in comparison with attention to the words before.

    Attention of the decoder to the image always sums to one, so its weights cannot tell; the norms of what each kind of
    attention adds at the word's position can. Shares are averaged over the layers.
    """
    added: dict[str, list[Tensor]] = {"attn": [], "crossattention": []}
    blocks = answered.model.model.decoder.transformer.h  # type: ignore[union-attr]
    handles = [
        getattr(block, name).register_forward_hook(_keep_norms(outputs))
        for block in blocks  # type: ignore[union-attr]
        for name, outputs in added.items()
    ]
    try:
        answered(answered.inputs)
    finally:
        for handle in handles:
            handle.remove()
    text, image = (torch.stack(norms) for norms in added.values())  # [layers, positions]
    share = (image / (image + text)).mean(0)
    return [float(share[list(answered.score(word).positions)].mean()) for word in range(len(answered.words))]


def _keep_norms(outputs: list[Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0][0].norm(dim=-1))

    return keep


def _compare_signals(words: Sequence[NamedWord], edit: str, seed: int) -> dict[str, Any]:
    """Return the area under the ROC curve of each signal for one edit, with intervals over pictures."""
    own = [word for word in words if word.edit in ("none", edit)]
    shown = np.array([word.is_shown for word in own])
    values = np.array([[getattr(word, field) for word in own] for field in SIGNALS.values()])
    marked = np.array([word.is_marked for word in own])
    pictures = np.array([word.picture for word in own])
    estimates = {"edit": edit, "words": len(own), "marked": [float(marked[part].mean()) for part in (shown, ~shown)]}
    areas = [roc_area(row, shown) for row in values]
    drawn = np.array([[roc_area(row[at], shown[at]) for row in values] for at in _resample(pictures, seed)])
    low, high = np.nanquantile(drawn, (0.025, 0.975), axis=0)
    return {**estimates, "areas": list(zip(areas, low.tolist(), high.tolist(), strict=True))}


def _resample(pictures: Any, seed: int) -> Iterator[Any]:
    """Yield the words of pictures that are drawn with replacement."""
    draws, names = np.random.default_rng(seed), np.unique(pictures)
    members = [np.flatnonzero(pictures == name) for name in names]
    for _ in range(_RESAMPLES):
        yield np.concatenate([members[index] for index in draws.integers(0, len(names), len(names))])


def roc_area(values: Any, is_positive: Any) -> float:
    """Return the probability that a positive has a larger value than a negative; ties count half. NaN without both."""
    positive, negative = values[is_positive], np.sort(values[~is_positive])
    if not len(positive) or not len(negative):
        return float("nan")
    below, equal = (np.searchsorted(negative, positive, side=side) for side in ("left", "right"))
    return float((below + equal).mean() / (2 * len(negative)))


def _format_row(row: dict[str, Any]) -> tuple[str, ...]:
    areas = (estimate_cell(*area).format() for area in row["areas"])
    return (row["edit"], str(row["words"]), *areas, *(f"{share:.0%}" for share in row["marked"]))
