"""Suites of `dave reproduce`: models, methods, counts and options, read from suites.toml."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from dave_vit._internal.schema import Checked, Count
from dave_vit.errors import UnknownName
from dave_vit.evaluate import ModelEntry
from dave_vit.evaluate.run import ProgressCallback

SUITES = ("builtin", "paper")
_PROBE = "probe"  # placeholder for weights that the user trains


@dataclass(frozen=True)
class SuiteCounts(Checked):
    """How much is computed.

    Attributes:
        grids: grids of GridPG.
        pool: images to compose grids of.
        pictures: images of EnergyPG and deletion.
        samples: T of all methods that draw samples, and steps of integrated gradients.
        deletion_steps: steps of deletion curves.
    """

    grids: Count
    pool: Count
    pictures: Count
    samples: Count
    deletion_steps: Count


@dataclass(frozen=True)
class ModelGroup:
    """Models that are scored with the same methods: one table.

    Attributes:
        name: name of its files.
        title: title of its section.
        models: models to explain.
        methods: labels of `dave_vit.analysis.inputs`.
        baseline: value of a removed pixel in deletion, see `dave_vit.metrics.Perturbation`.
    """

    name: str
    title: str
    models: tuple[ModelEntry, ...]
    methods: tuple[str, ...]
    baseline: str = "zero"


@dataclass(frozen=True)
class Suite:
    """A suite.

    Attributes:
        name: name of the suite.
        data: spec of a data set; empty if the user has to give it.
        groups: groups of models, one table each.
        counts: how much is computed for the tables.
        analyses: options of analyses by name, in the order of the report; other analyses follow with their defaults.
        quick: whether these are the counts of the short version.
        notes: notes on what was left out.
    """

    name: str
    data: str
    groups: tuple[ModelGroup, ...]
    counts: SuiteCounts
    analyses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    quick: bool = False
    notes: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[ModelEntry, ...]:
        """Models of all groups."""
        return tuple(entry for group in self.groups for entry in group.models)


@dataclass(frozen=True)
class ReproduceOptions:
    """How a suite is run.

    Attributes:
        out: folder; the same one resumes.
        command: the command line, for captions.
        device: device of the models.
        show: whether figures show the images beside their maps.
        seed: seed of all random draws.
        on_section: called before each section with its index, the number of sections, and its name.
        progress: called with the progress of runs.
    """

    out: Path
    command: str
    device: str = "cpu"
    show: bool = True
    seed: int = 0
    on_section: Callable[[int, int, str], None] = lambda index, count, name: None
    progress: ProgressCallback | None = None


def read_suite(name: str, *, quick: bool = False) -> Suite:
    """Read a suite by its name."""
    if name not in SUITES:
        raise UnknownName(f"unknown suite {name!r}; expected one of {', '.join(SUITES)}")
    content = _read_toml("suites.toml")[name]
    groups = tuple(_build_group(table) for table in content["groups"])
    amounts = dict(content["quick" if quick else "full"])
    analyses = amounts.pop("analyses")
    return Suite(name, content["data"], groups, SuiteCounts(**amounts), analyses, quick)


def with_models(suite: Suite, models: Sequence[ModelEntry]) -> Suite:
    """Replace the models of a suite; they are scored with the methods of its first table."""
    return replace(suite, groups=(replace(suite.groups[0], title="Localisation (table 1)", models=tuple(models)),))


def with_probe(suite: Suite, weights: str | None) -> Suite:
    """Give the probed models of a suite their weights, or leave them out with a note."""
    left_out = [entry for entry in suite.models if entry.weights == _PROBE and weights is None]
    how = "train its head with `dave probe` and give it as --probe FILE"
    notes = (*suite.notes, *(f"{entry.label} is left out: {how}" for entry in left_out))
    groups = []
    for group in suite.groups:
        kept = [entry for entry in group.models if entry not in left_out]
        models = tuple(replace(entry, weights=weights) if entry.weights == _PROBE else entry for entry in kept)
        groups += [replace(group, models=models)] if models else []
    return replace(suite, groups=tuple(groups), notes=notes)


def with_counts(suite: Suite, changes: Mapping[str, Any]) -> Suite:
    """Change some counts of a suite; None leaves a count as it is."""
    changes = {name: value for name, value in changes.items() if value is not None}
    return replace(suite, counts=replace(suite.counts, **changes))


def find_published_mean(metric: str, model: str, method: str) -> float | None:
    """Return the paper's number in per cent, or None."""
    number = _read_toml("published.toml").get(metric, {}).get(model, {}).get(method)
    return None if number is None else float(number)


def _build_group(table: Mapping[str, Any]) -> ModelGroup:
    models = tuple(ModelEntry(**entry) for entry in table["models"])
    return ModelGroup(**{**table, "models": models, "methods": tuple(table["methods"])})


@cache
def _read_toml(name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files("dave_vit.analysis.paper") / name).read_text(encoding="utf-8"))
