"""`dave demo`: the embedded model explains pictures of the embedded benchmark, without any download."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dave_vit._internal.atomic_files import json_bytes, write_bytes
from dave_vit.cli.common import Output, Progress, command
from dave_vit.cli.options import Device, ModelOptions, Out, Seed

if TYPE_CHECKING:
    from torch import Tensor

    from dave_vit.data.base import Dataset
    from dave_vit.explain.classes import ClassExplanation
    from dave_vit.methods import Method
    from dave_vit.models import Adapter
    from dave_vit.viz import Drawing

METHODS = ("dave", "effective", "input_x_gradient")
PICTURES = (1, 2, 3)  # in number 0 the target hides behind another animal
SCORED = 4  # pictures with exact masks
GRIDS = 2
POOL = 60  # pictures that grids are made of
SAMPLES = {"drawn": 28, "scored": 4}  # of DAVE: what its default draws; more move scores by a few points

app = command("dave demo", "dave demo --out pictures --seed 7")


@app.command()
def demo(*, seed: Seed = 0, device: Device = "auto", out: Out = Path("demo"), output: Output) -> None:
    """Explain three pictures with the embedded model and score three methods on a few more.

    The folder gets demo.png (image, DAVE, its sureness, effective transformation and input x gradient side by side),
    the results of `dave explain` for each picture, and scores.json.
    """
    from dave_vit.data import open_dataset

    start = time.perf_counter()
    data = open_dataset("builtin", limit=POOL)
    with output.progress(len(PICTURES) + 2 * len(METHODS), "loading the model") as progress:
        model = ModelOptions(device=device).load()
        results = [_explain(model, data, index, seed, out, output, progress) for index in PICTURES]
        _figure(results, seed).save(out / "demo.png")
        scores = _scores(model, data, seed, progress)
    write_bytes(out / "scores.json", json_bytes(scores))
    _print_scores(scores, output)
    output.print(f"{out / 'demo.png'} shows the maps; done in {time.perf_counter() - start:.0f} s")
    output.json({"pictures": [result.record() for result in results], "scores": scores})


def _explain(
    model: Adapter, data: Dataset, index: int, seed: int, out: Path, output: Output, progress: Progress
) -> ClassExplanation:
    """Explain one picture with DAVE, write the result and print the top 5."""
    from dave_vit.data.images import LoadedImage
    from dave_vit.explain.classes import classify, explain_classes
    from dave_vit.explain.explainer import Explainer
    from dave_vit.explain.output_files import OutputFolder

    name = f"picture-{index}"
    progress.update(text=f"{name}: {SAMPLES['drawn']} samples")
    explainer = Explainer(model, "dave", samples=SAMPLES["drawn"], seed=seed)
    classified = classify(model, LoadedImage(name, data.image(index)))
    result = explain_classes(explainer, classified, classified.pick("top1"))
    question = {"data": "builtin", "samples": SAMPLES["drawn"], "seed": seed}
    OutputFolder(out, []).write(classified.picture, question, result.files(), result.record())
    label = data[index].label
    output.print(f"{name} shows: {data.class_names[label] if label is not None else 'unknown'}")
    for prediction in classified.top5:
        output.print(f"  {prediction.probability:6.1%}  {prediction.name}")
    progress.update(advance=1)
    return result


def _figure(results: list[ClassExplanation], seed: int) -> Drawing:
    """Draw a row for each picture: image, DAVE, its sureness, and the other methods."""
    from dave_vit.explain.classes import explain_classes
    from dave_vit.explain.explainer import Explainer
    from dave_vit.methods.options import filter_options
    from dave_vit.viz import draw_comparison, map_cell, sureness_cell

    panels = [result.panels[0] for result in results]
    columns = {
        "DAVE": [map_cell(panel.map) for panel in panels],
        "how sure DAVE is": [sureness_cell(panel.sureness) for panel in panels if panel.sureness is not None],
    }
    for name in METHODS[1:]:
        explainer = Explainer(results[0].explainer.model, name, **filter_options(name, seed=seed))
        others = [explain_classes(explainer, result.classified, result.targets) for result in results]
        columns[name.replace("_x_", " x ")] = [map_cell(other.panels[0].map) for other in others]
    labels = [f"{result.targets[0].name} ({result.targets[0].probability:.0%})" for result in results]
    return draw_comparison([result.image for result in results], columns, labels=labels)


def _scores(model: Adapter, data: Dataset, seed: int, progress: Progress) -> dict[str, Any]:
    """Return GridPG and EnergyPG of each method on a few pictures, in percent."""
    from dave_vit.data.batches import load_batch
    from dave_vit.data.geometry import GeometryCache
    from dave_vit.methods import create_method
    from dave_vit.methods.options import filter_options

    batch = load_batch(data, range(SCORED), GeometryCache(model.preprocess))
    grids, labels = _grids(model, data)
    scores: dict[str, dict[str, float | None]] = {}
    for name in METHODS:
        method = create_method(name, model, **filter_options(name, samples=SAMPLES["scored"], seed=seed))
        progress.update(advance=1, text=f"GridPG of {name}")
        cells = _gridpg(method, grids, labels) if labels else None
        progress.update(advance=1, text=f"EnergyPG of {name}")
        scores[name] = {"gridpg": cells, "energypg": _energypg(method, batch.inputs, batch.labels, batch.regions)}
    chance = {"gridpg": 25.0, "energypg": 100 * float(batch.regions.float().mean())}
    return {"scores": scores, "chance": chance, "grids": len(labels), "pictures": len(batch.indices)}


def _grids(model: Adapter, data: Dataset) -> tuple[Tensor, list[tuple[int, ...]]]:
    """Return grids of four pictures that the model is sure of, [B, C, H, W], and the classes of their cells."""
    import torch

    from dave_vit.data.batches import load_batch
    from dave_vit.data.geometry import GeometryCache
    from dave_vit.data.grids import GridOptions, choose_grids, compose_grids, select_candidates

    batch = load_batch(data, range(POOL), GeometryCache(model.preprocess))
    with torch.inference_mode():
        logits = model(batch.inputs)
    chosen = choose_grids(select_candidates(logits, batch.labels), GridOptions(grids=GRIDS))
    cells = [batch.inputs[list(grid.images)] for grid in chosen]  # [4, C, H, W] each
    return compose_grids(torch.stack(cells)) if cells else batch.inputs[:0], [grid.labels for grid in chosen]


def _gridpg(method: Method, grids: Tensor, labels: list[tuple[int, ...]]) -> float:
    from dave_vit.metrics import gridpg

    maps = method.attribute(grids, labels).sum(2)  # [B, K, C, H, W] -> [B, K, H, W]
    return 100 * float(gridpg(maps).nanmean())


def _energypg(method: Method, inputs: Tensor, labels: list[int | None], regions: Tensor) -> float:
    from dave_vit.maps import collapse
    from dave_vit.metrics import energypg

    maps = collapse(method.attribute(inputs, [label or 0 for label in labels]))
    return 100 * float(energypg(maps, regions.to(maps.device)).nanmean())


def _print_scores(scores: Mapping[str, Any], output: Output) -> None:
    from rich.table import Table

    output.print(
        f"share of each map that lies on its object, in %: {scores['grids']} grids, {scores['pictures']} pictures"
    )
    table = Table("method", "GridPG", "EnergyPG")
    for name, row in (*scores["scores"].items(), ("chance", scores["chance"])):
        table.add_row(name, *("-" if row[key] is None else f"{row[key]:.1f}" for key in ("gridpg", "energypg")))
    output.print(table)
