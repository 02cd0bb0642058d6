"""`dave demo`: the embedded model explains pictures of the embedded benchmark, without any download."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dave_vit._internal.atomic_files import json_bytes, write_bytes
from dave_vit.cli.common import Output, command, rich_table
from dave_vit.cli.options import Device, ModelOptions, Out, Seed


@command("dave demo", "dave demo --out pictures --seed 7")
def demo(*, seed: Seed = 0, device: Device = "auto", out: Out = Path("demo"), output: Output) -> None:
    """Explain three pictures with the embedded model and score three methods on a few more.

    The folder gets demo.png (image, DAVE, its certainty, effective transformation and input x gradient side by side),
    the results of `dave explain` for each picture, and scores.json.
    """
    from dave_vit.data import open_dataset
    from dave_vit.explanations import comparison as steps
    from dave_vit.explanations.output_files import OutputFolder

    start, folder = time.perf_counter(), OutputFolder(out, [])
    data = open_dataset("builtin", limit=steps.POOL)
    results, samples = [], steps.SAMPLES["drawn"]
    with output.progress(len(steps.PICTURES) + 2 * len(steps.METHODS), "loading the model") as update:
        model = ModelOptions(device=device).load()
        for index in steps.PICTURES:
            update(description=f"picture-{index}: {samples} samples")
            result = steps.explain_picture(model, data, index, seed)
            question = {"data": "builtin", "samples": samples, "seed": seed}
            folder.write(result.picture, question, result.files(), result.record())
            label = data[index].label
            output.print(f"{result.picture.name} shows: {data.class_names[label] if label is not None else 'unknown'}")
            output.print(*(f"  {one.probability:6.1%}  {one.name}" for one in result.classified.top5))
            update(advance=1)
            results.append(result)
        steps.draw_demo(results, seed).save(out / "demo.png")
        scores = steps.score_methods(model, data, seed, lambda text: update(advance=1, description=text))
    write_bytes(out / "scores.json", json_bytes(scores))
    _print_scores(scores, output)
    output.print(f"{out / 'demo.png'} shows the maps; done in {time.perf_counter() - start:.0f} s")
    output.json({"pictures": [result.record() for result in results], "scores": scores})


def _print_scores(scores: Mapping[str, Any], output: Output) -> None:
    sizes = f"{scores['grids']} grids, {scores['pictures']} pictures"
    output.print(f"share of each map that lies on its object, in %: {sizes}")
    rows = [
        [name, *("-" if row[key] is None else f"{row[key]:.1f}" for key in ("gridpg", "energypg"))]
        for name, row in (*scores["scores"].items(), ("chance", scores["chance"]))
    ]
    output.print(rich_table(("method", "GridPG", "EnergyPG"), rows))
