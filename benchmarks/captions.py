"""Words and their pixels: how much of each word's map lies on the object that the word names.

    python benchmarks/captions.py --named 300 --pictures 40 --samples 16

`builtin-captions` writes what it sees in fresh pictures of two objects. The first line is the share of objects that it
names, the second that of captions in which both are named and nothing else. The table has, for every word of a right
name, the share of the map's positive part on the exact mask of its own object and on that of the other (EnergyPG), in
percent with 95 % intervals over pictures. The last row is the area of the masks: what a map would score that knows
nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dave_vit import create_method, load_model
from dave_vit.data.builtin import Scene, compose_scene
from dave_vit.evaluate.statistics.intervals import estimate_means
from dave_vit.metrics import energypg
from dave_vit.models.text_generation import AnsweredPrompt, TextGenerator
from dave_vit.viz.pages import format_estimate

SEED = 61_000  # neither training nor its settings saw it
METHODS = {"DAVE": "dave", "AttnLRP": "attn_lrp", "effective transformation": "effective"}
METHODS |= {"input x gradient": "input_x_gradient"}


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


def shares(asked: AnsweredPrompt, scene: Scene, samples: int) -> Iterator[list[float]]:
    """For each word of a right name, the shares on its own object and on the other by each method, then the areas."""
    options = {"dave": {"samples": samples}}
    for word, name in named(asked, scene):
        regions = masks(scene, name)
        row = []
        for method in METHODS.values():
            made = create_method(method, asked, **options.get(method, {})).explain(asked.inputs, asked.score(word))
            row += [float(energypg(made.map.cpu(), region)) for region in regions]
        yield row + [float(region.float().mean()) for region in regions]


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
    parser.add_argument("--samples", type=int, default=16, help="of DAVE")
    options = parser.parse_args()
    writer = load_model("builtin-captions")
    assert isinstance(writer, TextGenerator)
    hits, right = captions(writer, options.named)
    print(f"of {2 * options.named} objects {hits:.1%} are named; of {options.named} captions {right:.1%} are right\n")
    rows, units = [], []
    for unit in range(options.pictures):
        scene = compose_scene(unit, "pair", seed=SEED)
        found = list(shares(writer.with_prompt(Image.fromarray(scene.image)), scene, options.samples))
        rows, units = rows + found, units + [unit] * len(found)
    units = np.unique(units, return_inverse=True)[1].tolist()
    means = [format_estimate(e.mean, e.low, e.high, digits=1) for e in estimate_means(100 * np.array(rows).T, units)]
    print(f"{len(rows)} words of {len(set(units))} pictures\n\n| method | own object | the other |\n|---|---|---|")
    for number, name in enumerate([*METHODS, "area"]):
        print(f"| {name} | {means[2 * number]} | {means[2 * number + 1]} |")


if __name__ == "__main__":
    main()
