"""`dave tune`: choose the neighbourhood that fits a model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from dave_vit.cli.common import Output, command, rich_table
from dave_vit.cli.options import ModelOptions, Plugins, Seed, flag
from dave_vit.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

    from dave_vit.analysis.tuning import MeasuredNeighborhood, Tuning


Data = Annotated[
    str, flag("--data SPEC", "A folder of images, or a data set as in `dave evaluate`, such as imagenet:DIR.")
]


@command(
    "dave tune --model timm:vit_base_patch16_224 --data photos/",
    "dave tune --model builtin --data builtin --limit 8 --out mine.toml",
    "dave explain cat.jpg --preset mine.toml",
)
def tune(
    *,
    model: ModelOptions,
    data: Data,
    limit: Annotated[int, flag("--limit N", "Number of images.", min=1)] = 16,
    out: Annotated[Path, flag("--out -o FILE", "The preset file to write.")] = Path("preset.toml"),
    seed: Seed = 0,
    plugins: Plugins = None,
    output: Output,
) -> None:
    """Choose DAVE's neighbourhood for a model, without labels.

    Views are drawn from five neighbourhoods, one of them the default's. Another one is chosen only if the model keeps
    its predictions on its views, and if deletion and insertion of these predictions are measurably better than with
    the default. The result is a preset file for --preset. Measurements are kept in FILE.json, so that the same command
    resumes where it was stopped.
    """
    from dave_vit._internal.atomic_files import json_bytes, write_bytes
    from dave_vit.analysis.tuning import CANDIDATES, DEFAULT
    from dave_vit.analysis.tuning import tune as tune_model

    loaded, pictures = model.load(), _load_images(data, limit)
    key = _hash_inputs(model, pictures, seed)
    notes = Path(f"{out}.json")
    known = _read_measurements(notes, key)
    with output.progress(len(CANDIDATES), "measuring") as update:
        update(completed=len(known))

        def report(number: int, measured: MeasuredNeighborhood) -> None:
            known[number] = measured
            rows = [{"number": index, **asdict(row)} for index, row in known.items()]
            write_bytes(notes, json_bytes({"key": key, "neighborhood_levels": rows}))
            update(completed=len(known))

        tuning = tune_model(loaded, pictures, seed=seed, known=dict(known), report=report)
    tuning.save(out)
    output.print(_table(tuning), f"  {out}")
    if tuning.warning:
        output.note(tuning.warning)
    levels = list(map(asdict, tuning.neighborhoods))
    record = {"model": loaded.spec, "images": len(pictures), "seed": seed, "neighborhood_levels": levels}
    facts = {"criterion": tuning.criterion, "chosen": tuning.chosen, "default": DEFAULT, "warning": tuning.warning}
    output.json({**record, **facts, "preset": str(out)})


def _load_images(data: str, limit: int) -> list[Image]:
    """Return the first images of a folder or of a data set."""
    from dave_vit.data import open_dataset
    from dave_vit.data.images import find_images, read_image
    from dave_vit.data.sets import DATASETS

    if data.partition(":")[0] in DATASETS and not Path(data).is_dir():
        dataset = open_dataset(data, limit)
        return [dataset.image(index) for index in range(min(limit, len(dataset)))]
    paths = find_images([data])[:limit]
    if not paths:
        raise ImageError(f"{data}: no images; give a folder with some, or a data set such as imagenet:DIR")
    return [read_image(path).image for path in paths]


def _hash_inputs(model: ModelOptions, pictures: list[Image], seed: int) -> str:
    """Return a hash of everything that decides the numbers."""
    content = hashlib.sha256(repr((model.spec, model.weights, model.prepare, seed)).encode())
    for picture in pictures:
        content.update(picture.tobytes())
    return content.hexdigest()


def _read_measurements(path: Path, key: str) -> dict[int, MeasuredNeighborhood]:
    """Return what an earlier command with the same inputs measured, by index."""
    from dave_vit.analysis.tuning import MeasuredNeighborhood

    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = stored["neighborhood_levels"] if stored["key"] == key else []
        return {row.pop("number"): MeasuredNeighborhood(**row) for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _table(tuning: Tuning) -> Any:
    from dave_vit.analysis.tuning import DEFAULT

    rows = []
    for index, one in enumerate(tuning.neighborhoods):
        words = ["chosen"] * (index == tuning.chosen) + ["default"] * (index == DEFAULT)
        settings = (f"{one.rotation:g}", f"{one.translation:g}", f"{round(one.noise_level, 3):g}")
        scores = (f"{one.survival:.2f}", f"{100 * one.deletion:.1f}", f"{100 * one.insertion:.1f}")
        mean, error = one.gain(tuning.neighborhoods[DEFAULT])
        gain = "-" if index == DEFAULT else f"{100 * mean:+.1f} ± {100 * error:.1f}"
        grid = f"{100 * fmean(one.localization):.1f}" if one.localization else "-"
        rows.append((", ".join(words), *settings, *scores, gain, grid))
    head = ("", "rotation", "shift", "noise", "survival", "deletion", "insertion", "gain", "GridPG")
    return rich_table(head, rows, f"Criterion: {tuning.criterion}.")
