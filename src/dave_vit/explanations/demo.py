"""What `dave demo` computes: maps of the embedded model for embedded pictures, and scores of a few methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dave_vit.data.base import Dataset
from dave_vit.data.batches import load_batch
from dave_vit.data.geometry import GeometryCache
from dave_vit.data.grids import GridOptions, choose_grids, compose_grids, select_candidates
from dave_vit.data.images import LoadedImage
from dave_vit.explanations.classes import ClassExplanation, classify, explain_classes
from dave_vit.explanations.explainer import Explainer
from dave_vit.maps import collapse
from dave_vit.methods import Method, create_method
from dave_vit.methods.options import filter_options
from dave_vit.metrics import energypg, gridpg
from dave_vit.models import Adapter
from dave_vit.viz import Drawing, certainty_cell, draw_comparison, map_cell

METHODS = ("dave", "effective", "input_x_gradient")
PICTURES = (1, 2, 3)  # in number 0 the target hides behind another animal
SCORED = 4  # pictures with exact masks
GRIDS = 2
POOL = 60  # pictures that grids consist of
SAMPLES = {"drawn": 28, "scored": 4}  # of DAVE: what its default draws; more move scores by a few points


def explain_picture(model: Adapter, data: Dataset, index: int, seed: int) -> ClassExplanation:
    """Return DAVE's explanation of the likeliest class of a picture."""
    classified = classify(model, LoadedImage(f"picture-{index}", data.image(index)))
    explainer = Explainer(model, "dave", samples=SAMPLES["drawn"], seed=seed)
    return explain_classes(explainer, classified, classified.pick("top1"))


def draw_demo(results: Sequence[ClassExplanation], seed: int) -> Drawing:
    """Draw a row for each picture: image, DAVE, its certainty, and the other methods."""
    panels = [result.panels[0] for result in results]
    columns = {
        "DAVE": [map_cell(panel.map) for panel in panels],
        "certainty of DAVE": [certainty_cell(panel.certainty) for panel in panels if panel.certainty is not None],
    }
    for name in METHODS[1:]:
        explainer = Explainer(results[0].explainer.model, name, **filter_options(name, seed=seed))
        others = [explain_classes(explainer, result.classified, result.targets) for result in results]
        columns[name.replace("_x_", " x ")] = [map_cell(other.panels[0].map) for other in others]
    labels = [f"{result.targets[0].name} ({result.targets[0].probability:.0%})" for result in results]
    return draw_comparison([result.image for result in results], columns, labels=labels)


def score_methods(model: Adapter, data: Dataset, seed: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Return GridPG and EnergyPG of each method on a few pictures, in percent; `report` gets the current one."""
    batch = load_batch(data, range(POOL), GeometryCache(model.preprocess))
    inputs, regions = batch.inputs[:SCORED], batch.regions[:SCORED]
    labels = [label or 0 for label in batch.labels[:SCORED]]
    with torch.inference_mode():
        logits = model(batch.inputs)
    grids = choose_grids(select_candidates(logits, batch.labels), GridOptions(grids=GRIDS))
    cells = [batch.inputs[list(grid.images)] for grid in grids]  # [4, C, H, W] each
    scores: dict[str, dict[str, float | None]] = {}
    for name in METHODS:
        method = create_method(name, model, **filter_options(name, samples=SAMPLES["scored"], seed=seed))
        report(f"GridPG of {name}")
        on_grids = _gridpg(method, torch.stack(cells), [grid.labels for grid in grids]) if grids else None
        report(f"EnergyPG of {name}")
        maps = collapse(method.attribute(inputs, labels))
        scores[name] = {"gridpg": on_grids, "energypg": 100 * float(energypg(maps, regions.to(maps.device)).nanmean())}
    chance = {"gridpg": 25.0, "energypg": 100 * float(regions.float().mean())}
    return {"scores": scores, "chance": chance, "grids": len(grids), "pictures": len(labels)}


def _gridpg(method: Method, cells: Tensor, labels: list[tuple[int, ...]]) -> float:
    """Return the mean GridPG, in percent, of grids with these cells [B, 4, C, H, W] and classes."""
    maps = method.attribute(compose_grids(cells), labels).sum(2)  # [B, K, C, H, W] -> [B, K, H, W]
    return 100 * float(gridpg(maps).nanmean())
