"""Real DeiT-Tiny on real ImageNet images: accuracy, and the order in which methods localise.

The same measurement as `benchmarks/estimators.py`, on fewer images, so that two cores manage it.
"""

from __future__ import annotations

import pytest
import torch

from dave_vit import create_method, load_model
from dave_vit.data import open_dataset
from dave_vit.data.batches import Batch, batches
from dave_vit.data.grids import GridOptions, candidates, choose_grids, compose
from dave_vit.data.placement import Placements
from dave_vit.maps import collapse
from dave_vit.metrics import Perturbation, area, deletion, energypg, gridpg

pytestmark = [pytest.mark.realdata, pytest.mark.slow]

IMAGES, GRIDS = 8, 4
MAPS = {
    "input_x_gradient": ("input_x_gradient", {}),
    "smoothgrad": ("smoothgrad", {"samples": 16}),
    "effective": ("effective", {}),
    "paper": ("dave", {"preset": "paper", "samples": 16}),
}
REFINED = {16: "default, T = 16", 28: "default"}


@pytest.fixture(scope="module")
def model(data_dir):
    return load_model("timm:deit_tiny_patch16_224", data_dir / "weights" / "deit_tiny_patch16_224.safetensors")


@pytest.fixture(scope="module")
def loaded(model, data_dir) -> list[tuple[Batch, torch.Tensor]]:
    data = open_dataset(f"imagenet:{data_dir / 'imagenet-val-300'}")
    with torch.no_grad():
        return [(batch, model(batch.inputs)) for batch in batches(data, Placements(model.preprocess))]


@pytest.fixture(scope="module")
def boxed(loaded):
    """Correct images whose boxes cover less than half of the crop."""
    inputs = torch.cat([batch.inputs for batch, _ in loaded])
    labels = torch.tensor([label for batch, _ in loaded for label in batch.labels])
    regions = torch.cat([batch.regions for batch, _ in loaded])
    right = torch.cat([logits for _, logits in loaded]).argmax(1) == labels
    share = regions.float().mean((1, 2))
    chosen = (right & (share > 0) & (share < 0.5)).nonzero()[:IMAGES, 0]
    return inputs[chosen], labels[chosen], regions[chosen]


@pytest.fixture(scope="module")
def grids(loaded):
    pool = [one for batch, logits in loaded for one in candidates(logits, batch.labels, batch.indices[0], 0.8)]
    inputs = torch.cat([batch.inputs for batch, _ in loaded])
    chosen = choose_grids(pool, GridOptions(grids=GRIDS, confidence=0.8))
    return compose(torch.stack([inputs[list(grid.images)] for grid in chosen])), torch.tensor(
        [grid.labels for grid in chosen]
    )


def attributions(model, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of each map by its name; fewer samples of the default are met on the way to more."""
    found = {
        name: create_method(way, model, **options).attribute(inputs, labels) for name, (way, options) in MAPS.items()
    }
    for explanation in create_method("dave", model, samples=28, chunk=len(inputs)).refine(inputs, labels):
        if explanation.samples in REFINED:
            found[REFINED[explanation.samples]] = explanation.attribution
    return found


@pytest.fixture(scope="module")
def scores(model, boxed, grids) -> dict[str, tuple[float, float, float]]:
    """GridPG, EnergyPG and deletion of each map."""
    inputs, labels, regions = boxed
    how = Perturbation(fractions=tuple(step / 10 for step in range(10)))
    of_grids, found = attributions(model, *grids), {}
    for name, attribution in attributions(model, inputs, labels).items():
        own = collapse(of_grids[name].flatten(0, 1)).unflatten(0, grids[1].shape)
        maps = collapse(attribution)
        curve = deletion(model, inputs, maps, labels, how)
        found[name] = (
            float(gridpg(own).nanmean()),
            float(energypg(maps, regions).nanmean()),
            float(area(curve, how.fractions).mean()),
        )
        print(name, [f"{100 * value:.1f}" for value in found[name]])
    return found


def test_top_1(loaded):
    labels = torch.tensor([label for batch, _ in loaded for label in batch.labels])
    correct = int((torch.cat([logits for _, logits in loaded]).argmax(1) == labels).sum())
    assert 202 <= correct <= 208  # of 300: 68.3 % in the published protocol


GRID, ENERGY, DELETION = range(3)


@pytest.mark.parametrize("metric", [GRID, ENERGY], ids=["GridPG", "EnergyPG"])
def test_order_of_the_methods(scores, metric):
    value = {name: row[metric] for name, row in scores.items()}
    assert value["default"] > value["smoothgrad"] > value["input_x_gradient"]
    assert value["paper"] > value["smoothgrad"]
    assert value["effective"] > value["input_x_gradient"]


@pytest.mark.parametrize("metric", [GRID, ENERGY, DELETION], ids=["GridPG", "EnergyPG", "deletion"])
def test_default_is_nowhere_worse_than_paper(scores, metric):
    assert scores["default"][metric] >= scores["paper"][metric]


@pytest.mark.parametrize("metric", [GRID, ENERGY], ids=["GridPG", "EnergyPG"])
def test_a_third_of_the_samples_suffices(scores, metric):
    assert scores["default, T = 16"][metric] >= scores["paper"][metric]
