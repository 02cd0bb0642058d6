"""Suites: what is reproduced, as data. The same code runs all of them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from dave_vit.errors import OptionError, UnknownName
from dave_vit.evaluate import ModelEntry

SUITES = ("builtin", "paper")
_PROBE = "probe"  # stands for weights that the user trains


@dataclass(frozen=True)
class SuiteCounts:
    """How much is computed.

    Attributes:
        grids: of GridPG.
        pool: pictures that grids are made of.
        pictures: of EnergyPG and deletion.
        samples: T of all methods that draw any, and steps of integrated gradients.
        deletion_steps: of deletion curves.
    """

    grids: int
    pool: int
    pictures: int
    samples: int
    deletion_steps: int


@dataclass(frozen=True)
class ModelGroup:
    """Models that are scored with the same methods: one table.

    Attributes:
        name: of its files.
        title: of its section.
        models: what is explained.
        methods: labels of `dave_vit.analysis.catalog`.
        baseline: what a removed pixel becomes in deletion, see `dave_vit.metrics.Perturbation`.
    """

    name: str
    title: str
    models: tuple[ModelEntry, ...]
    methods: tuple[str, ...]
    baseline: str = "zero"


@dataclass(frozen=True)
class Suite:
    """What is reproduced.

    Attributes:
        name: of the suite.
        data: spec of a data set; empty where the user has to give it.
        groups: tables.
        counts: how much of the tables.
        analyses: options of analyses, by name, in the order of the report; those that are not named follow, with their
            own defaults.
        quick: whether these are the counts of the short version.
        notes: what was left out.
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
        """Of all groups."""
        return tuple(entry for group in self.groups for entry in group.models)


def read_suite(name: str, *, quick: bool = False) -> Suite:
    """A suite by its name."""
    if name not in SUITES:
        raise UnknownName(f"unknown suite {name!r}; expected one of {', '.join(SUITES)}")
    content = _data("suites.toml")[name]
    groups = tuple(_group(table) for table in content["groups"])
    amounts = dict(content["quick" if quick else "full"])
    analyses = {name: _frozen(options) for name, options in amounts.pop("analyses").items()}
    return Suite(name, content["data"], groups, SuiteCounts(**amounts), analyses, quick)


def with_models(suite: Suite, models: Sequence[ModelEntry]) -> Suite:
    """A suite of other models, scored with the methods of the first table."""
    first = suite.groups[0]
    return replace(suite, groups=(replace(first, title="Localisation (table 1)", models=tuple(models)),))


def with_probe(suite: Suite, weights: str | None) -> Suite:
    """A suite whose probed models have their weights, or are left out with a note."""
    groups, notes = [], list(suite.notes)
    for group in suite.groups:
        kept = []
        for entry in group.models:
            if entry.weights != _PROBE:
                kept.append(entry)
            elif weights is not None:
                kept.append(replace(entry, weights=weights))
            else:
                notes.append(f"{entry.label} is left out: train its head with `dave probe` and give it as --probe FILE")
        groups.append(replace(group, models=tuple(kept)))
    return replace(suite, groups=tuple(group for group in groups if group.models), notes=tuple(notes))


def with_counts(suite: Suite, changes: Mapping[str, Any]) -> Suite:
    """A suite with some counts changed; those that are None stay."""
    given = {name: value for name, value in changes.items() if value is not None}
    for name, value in given.items():
        if value < 1:
            raise OptionError(f"{name} {value}; expected 1 or more")
    return replace(suite, counts=replace(suite.counts, **given))


def published(metric: str, model: str, method: str) -> float | None:
    """The paper's number in per cent, where it has one."""
    number = _data("published.toml").get(metric, {}).get(model, {}).get(method)
    return None if number is None else float(number)


def _group(table: Mapping[str, Any]) -> ModelGroup:
    models = tuple(ModelEntry(**entry) for entry in table["models"])
    return ModelGroup(**{**table, "models": models, "methods": tuple(table["methods"])})


def _frozen(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


@cache
def _data(name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files("dave_vit.analysis.paper") / name).read_text(encoding="utf-8"))
