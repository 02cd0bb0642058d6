"""Compare methods: on one class of one photograph (`dave compare`), and on the embedded pictures (`dave demo`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dave_vit.data.base import Dataset
from dave_vit.data.batches import load_batch
from dave_vit.data.geometry import Geometry, GeometryCache
from dave_vit.data.grids import GridOptions, choose_grids, compose_grids, select_candidates
from dave_vit.data.images import LoadedImage, read_image
from dave_vit.engine.score_registry import Box, parse_box
from dave_vit.errors import DaveError, ImageError, OptionError
from dave_vit.explanations.classes import ClassExplanation, classify, explain_classes
from dave_vit.explanations.explainer import Explainer
from dave_vit.maps import collapse
from dave_vit.methods import Method, create_method
from dave_vit.methods.options import filter_options
from dave_vit.metrics import energypg, gridpg, pointing
from dave_vit.models import Adapter
from dave_vit.viz.colors import HUES
from dave_vit.viz.figures import Cell, Drawing, certainty_cell, draw_grid, image_cell, map_cell
from dave_vit.viz.panels import draw_comparison, panel_cells
from dave_vit.viz.rendering import Scales, View

_COLUMNS = 4

# Of `dave demo`:
METHODS = ("dave", "effective", "input_x_gradient")
PICTURES = (1, 2, 3)  # in number 0 the target hides behind another animal
SCORED = 4  # pictures with exact masks
GRIDS = 2
POOL = 60  # pictures that grids consist of
SAMPLES = {"drawn": 20, "scored": 4}  # of DAVE: what its default draws; more move scores by a few points


def object_region(model: Adapter, picture: LoadedImage, boxes: Sequence[str], mask: str | None) -> Tensor | None:
    """Return the area of the object in the model's input, [H, W]; None where neither boxes nor a mask are given."""
    if not boxes and mask is None:
        return None
    if boxes and mask is not None:
        raise OptionError("--box and --mask are both given; give one of them")
    geometry = Geometry.measure(model.preprocess, picture.image.size)
    if mask is None:
        region = geometry.boxes_to_mask([_parse_box(text) for text in boxes])
    else:
        drawn = read_image(mask).image
        if drawn.size != picture.image.size:
            how = "give one mask of the image's size"
            raise ImageError(f"--mask {mask} has {drawn.size} pixels and the image {picture.image.size}; {how}")
        region = geometry.mask_to_input(np.asarray(drawn.convert("L")) > 0)
    if not region.any():
        raise OptionError("the box or mask lies outside of what the model sees, the centre of the image; give another")
    return torch.from_numpy(region)


def _parse_box(text: str) -> Box:
    try:
        left, top, right, bottom = parse_box(text)
    except ValueError as error:
        raise OptionError(
            f"--box {text}; expected four numbers left,top,right,bottom, such as 40,30,300,280"
        ) from error
    if right <= left or bottom <= top:
        raise OptionError(f"--box {text} is empty; expected left < right and top < bottom")
    return left, top, right, bottom


@dataclass(frozen=True)
class Comparison:
    """Maps of several methods for one class of a photograph.

    Attributes:
        results: the explanation of each method, by its name.
        region: the area of the object in the model's input, [H, W]; None where it is not known.
    """

    results: Mapping[str, ClassExplanation]
    region: Tensor | None = None

    @property
    def first(self) -> ClassExplanation:
        """The explanation of the first method."""
        return next(iter(self.results.values()))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The record of each map; scores are None where a map has no positive part."""
        rows: list[dict[str, Any]] = []
        for name, result in self.results.items():
            row = {"method": name, "seconds": round(result.seconds, 3), **result.counts}
            if self.region is not None:
                values, region = torch.as_tensor(result.panels[0].map).cpu()[None], self.region[None]
                scores = {"energy": energypg(values, region), "pointing": pointing(values, region)}
                row |= {key: round(float(score), 4) if score.isfinite() else None for key, score in scores.items()}
            rows.append(row)
        return rows

    def figure(self, view: View, scales: Scales) -> Drawing:
        """Draw the photograph and all maps."""
        photo = self.first.photo.resize(2)
        cells = [image_cell(photo.frame_seen_area(photo.image))]
        if self.region is not None:
            outline = photo.place([self.region.double()]).numpy(), HUES[1]
            cells = [replace(cells[0], outline=outline)]
        for row, cell in zip(self.rows, self._cells(view, scales), strict=True):
            score = f", energy {row['energy']:.1%}" if row.get("energy") is not None else ""
            cells.append(replace(cell, title=f"{row['method']}{score}", colours=photo.align(cell.colours)))
        scaled = "one scale for maps of logits" if scales == "shared" else "each map on its own scale"
        title = f"{self.first.picture.name}: {self.first.panels[0].target}, {self.first.explainer.model.spec}; {scaled}"
        return draw_grid([cells[start : start + _COLUMNS] for start in range(0, len(cells), _COLUMNS)], title=title)

    def _cells(self, view: View, scales: Scales) -> list[Cell]:
        """Return the maps; with shared scales, those that are parts of a logit have one scale."""
        panels = [result.photo_panels[0] for result in self.results.values()]
        together = panel_cells([panel for panel in panels if panel.unit], view=view) if scales == "shared" else []
        shared = iter(together)
        return [next(shared) if panel.unit and together else panel_cells([panel], view=view)[0] for panel in panels]


def compare_methods(
    model: Adapter,
    picture: LoadedImage,
    methods: Sequence[str],
    target: str = "top1",
    *,
    against: str | None = None,
    report: Callable[[int, str], None],
    note: Callable[[str], None],
    **options: Any,
) -> dict[str, ClassExplanation]:
    """Return the explanation of each method by its name; methods that cannot explain the model are left out.

    Args:
        model: a classifier.
        picture: the photograph.
        methods: names of the methods.
        target: the class.
        against: contrast; see `Explainer`.
        report: called with the number of methods that are done, and the name of the current one.
        note: called with the reason why a method is left out, and with the time that a slow one takes.
        options: options, for the methods that take them.
    """
    classified = classify(model, picture)
    targets = classified.pick(target)
    if len(targets) > 1:
        raise OptionError(f"--target {target} means {len(targets)} classes; compare draws the maps of one")
    results: dict[str, ClassExplanation] = {}
    reason = ""
    for number, name in enumerate(methods):
        report(number, name)
        try:
            explainer = Explainer(model, name, against=against, **filter_options(name, **options))
            explainer.on_slow = note
            results[name] = explain_classes(explainer, classified, targets)
        except DaveError as error:
            if len(methods) == 1:
                raise
            reason = f"{name}: {error}"
            note(f"{name} is left out: {error}")
    if not results:
        raise OptionError(f"none of the methods can explain this model; {reason}")
    return results


def explain_picture(model: Adapter, data: Dataset, index: int, seed: int) -> ClassExplanation:
    """Return DAVE's explanation of the likeliest class of a picture."""
    classified = classify(model, LoadedImage(f"picture-{index}", data.image(index)))
    explainer = Explainer(model, "dave", samples=SAMPLES["drawn"], seed=seed)
    return explain_classes(explainer, classified, classified.pick("top1"))


def draw_demo(results: Sequence[ClassExplanation], seed: int) -> Drawing:
    """Draw a row for each picture: image, DAVE, its certainty, and the other methods."""
    panels = [result.panels[0] for result in results]
    certainties = [certainty_cell(panel.certainty) for panel in panels if panel.certainty is not None]
    columns = {"DAVE": [map_cell(panel.map) for panel in panels], "certainty of DAVE": certainties}
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
