"""Words and their pixels: whether each word's map lies on the object that the word names, and what the word rests on.

    python benchmarks/captions.py --named 300 --pictures 40

`builtin-captions` writes what it sees in fresh pictures of two objects. The first line is the share of objects that it
names, the second that of captions in which both are named and nothing else. The table has, for every word of a right
name, in percent with 95 % intervals over pictures: the share of the map's positive part on the exact mask of its own
object and on that of the other (energy), whether its largest value lies on its own object (pointing), and the mean
probability of the word while patches are removed or restored, the most important first (deletion, lower is better;
insertion, higher is better). The last row is the area of the masks: what a map would score that knows nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dave_vit import create_method, load_model
from dave_vit.data.builtin import Scene, compose_scene
from dave_vit.engine.scores import Word
from dave_vit.engine.targets import ScoreSet
from dave_vit.errors import UnsupportedOperator
from dave_vit.evaluate.statistics.intervals import estimate_means
from dave_vit.metrics.localization import energypg, pointing
from dave_vit.metrics.perturbation import Perturbation, area, deletion, insertion
from dave_vit.models.text_generation import AnsweredPrompt, TextGenerator
from dave_vit.viz.report_section import estimate_cell

SEED = 61_000  # neither training nor its settings saw it
METHODS = {"DAVE": "dave", "AttnLRP": "attn_lrp", "Grad-CAM": "gradcam", "attention rollout": "rollout", "TAM": "tam"}
METHODS |= {"effective transformation": "effective", "input x gradient": "input_x_gradient"}
COLUMNS = ("own object", "the other", "pointing", "deletion", "insertion")
PATCH = 16
FRACTIONS = tuple(step / 14 for step in range(15))  # whole patches: 14 of 196 at a time


def named(asked: AnsweredPrompt, scene: Scene) -> Iterator[tuple[int, str]]:
    """Numbers of the words that belong to the name of an object of the picture, with that name."""
    number, names = 0, {thing.name for thing in scene.targets}
    for name in asked.answer.split(" and "):
        for word in range(number, number + len(name.split())):
            if name in names:
                yield word, name
        number += len(name.split()) + 1


def masks(scene: Scene, name: str) -> tuple[Tensor, Tensor]:
    """Of the named object and of the other, [1, H, W] each."""
    own, other = sorted(scene.targets, key=lambda thing: thing.name != name)
    return torch.from_numpy(own.mask)[None], torch.from_numpy(other.mask)[None]


def scores(asked: AnsweredPrompt, scene: Scene, samples: int | None) -> Iterator[list[float]]:
    """For each word of a right name, all columns by each method, then the areas; NaN where a method is refused."""
    words = dict(named(asked, scene))
    if not words:
        return
    targets = asked.scores(list(words))
    maps = {name: explain(asked, method, targets, samples) for name, method in METHODS.items()}
    for number, name in enumerate(words.values()):
        own, other = masks(scene, name)
        row = []
        for found in maps.values():
            if found is None:
                row += [np.nan] * len(COLUMNS)
                continue
            one = found[:, number].cpu()
            row += [float(energypg(one, own)), float(energypg(one, other)), float(pointing(one, own))]
            row += perturb(asked, targets[number], one)
        yield [*row, float(own.float().mean()), float(other.float().mean()), float(own.float().mean()), np.nan, np.nan]


def explain(asked: AnsweredPrompt, method: str, words: list[Word], samples: int | None) -> Tensor | None:
    """Return the maps of all words, [1, K, H, W]; None where the method is refused."""
    options = {"samples": samples} if method == "dave" and samples else {}
    try:
        return create_method(method, asked, **options).explain(asked.inputs, ScoreSet(tuple(words))).map
    except UnsupportedOperator:
        return None


def perturb(asked: AnsweredPrompt, word: Word, values: Tensor) -> list[float]:
    """Return the mean probability of a word of one token while patches are removed, and while they are restored."""
    coarse = F.avg_pool2d(values, PATCH).repeat_interleave(PATCH, -1).repeat_interleave(PATCH, -2)
    order = Perturbation(FRACTIONS, order="most", baseline="blur")
    target = torch.tensor([word.tokens[0]])

    def logits(images: Tensor) -> Tensor:
        return asked(images).logits[:, word.positions[0]]

    curves = (measure(logits, asked.inputs, coarse, target, order) for measure in (deletion, insertion))
    return [float(area(curve, FRACTIONS)) for curve in curves]


def captions(writer: TextGenerator, count: int) -> tuple[float, float]:
    """Shares of objects that are named, and of captions that name both and nothing else."""
    hits = right = 0
    for scene in (compose_scene(index, "pair", seed=SEED) for index in range(count)):
        said = set(writer.with_prompt(Image.fromarray(scene.image)).answer.split(" and "))
        meant = {thing.name for thing in scene.targets}
        hits, right = hits + len(said & meant), right + (said == meant)
    return hits / (2 * count), right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--named", type=int, default=300, help="pictures whose captions are read")
    parser.add_argument("--pictures", type=int, default=40, help="pictures whose words are explained")
    parser.add_argument("--samples", type=int, help="of DAVE; its default by default")
    options = parser.parse_args()
    writer = load_model("builtin-captions")
    assert isinstance(writer, TextGenerator)
    if options.named:
        hits, right = captions(writer, options.named)
        print(f"of {2 * options.named} objects {hits:.1%} are named; of {options.named} captions {right:.1%} are right")
    rows, units = [], []
    for unit in range(options.pictures):
        scene = compose_scene(unit, "pair", seed=SEED)
        found = list(scores(writer.with_prompt(Image.fromarray(scene.image)), scene, options.samples))
        rows, units = rows + found, units + [unit] * len(found)
    units = np.unique(units, return_inverse=True)[1].tolist()
    print(f"{len(rows)} words of {len(set(units))} pictures\n\n| method | {' | '.join(COLUMNS)} |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    columns = np.array(rows).T.reshape(-1, len(COLUMNS), len(rows))
    for name, values in zip([*METHODS, "area of the object"], 100 * columns, strict=True):
        print(f"| {name} | {' | '.join(format_cell(value, units) for value in values)} |")


def format_cell(values: np.ndarray, units: list[int]) -> str:
    """Return the mean with its interval over pictures; a dash for what does not apply."""
    if np.isnan(values).any():
        return "-"
    (estimate,) = estimate_means(values[None], units)
    return estimate_cell(estimate.mean, max(0.0, estimate.low), min(100.0, estimate.high), digits=1).format()


if __name__ == "__main__":
    main()
