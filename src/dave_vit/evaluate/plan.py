"""What a run computes: models x methods x metrics x data x seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from dave_vit._internal.content_hash import hash_code
from dave_vit._internal.schema import check_fields, check_seed
from dave_vit.errors import OptionError
from dave_vit.evaluate.plan_entries import NO_SMOOTHING, MethodEntry, MetricEntry, ModelEntry, Smoothing
from dave_vit.evaluate.plan_loading import merge_settings, read_settings
from dave_vit.methods.options import check_options
from dave_vit.metrics import GridMetric

E = TypeVar("E", ModelEntry, MethodEntry, MetricEntry)


@dataclass(frozen=True)
class Plan:
    """Everything that decides the numbers of a run; where it runs (engine, devices, workers) is not part of it.

    Attributes:
        models: what is explained.
        methods: how it is explained.
        metrics: how maps are scored.
        data: spec of a data set.
        limit: number of images to use, the first ones.
        seeds: seeds of the methods that draw samples.
        budget: forward passes per map, for all methods that can take more or fewer.
        smoothing: smoothing of every map before it is scored.
        matched: score all maps once more, smoothed to the resolution of patches.
        target: explain the image's "label" (the predicted class if it has none) or the "predicted" class.
        min_confidence: score only images that the model classifies correctly with more than this probability.
        batch: images per forward pass.
        shard: images per file of results.
        save_maps: keep the maps as well.
        plugins: Python files that register methods or metrics of the plan.
    """

    models: tuple[ModelEntry, ...] = (ModelEntry("builtin"),)
    methods: tuple[MethodEntry, ...] = (MethodEntry("dave"),)
    metrics: tuple[MetricEntry, ...] = (MetricEntry("gridpg"), MetricEntry("energypg"), MetricEntry("deletion"))
    data: str = "builtin"
    limit: int | None = None
    seeds: tuple[int, ...] = (0,)
    budget: int | None = None
    smoothing: Smoothing = NO_SMOOTHING
    matched: bool = False
    target: Literal["label", "predicted"] = "label"
    min_confidence: float | None = None
    batch: int = 32
    shard: int = 32
    save_maps: bool = False
    plugins: tuple[str, ...] = ()

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any] | None = None,
        flags: Mapping[str, Any] | None = None,
        overrides: Iterable[str] = (),
    ) -> Plan:
        """Build a plan from a file or a mapping, changed by flags and by options of single methods and metrics.

        Args:
            source: a .yaml or .toml file, or the same settings as a mapping. Methods and metrics are names or tables
                of options; a text has names with commas between, or is "all".
            flags: settings that replace those of the source; ``samples``, ``preset`` and ``against`` go to every
                method that takes them.
            overrides: options of single methods and metrics, "WHO.NAME=VALUE".

        Example:
            >>> plan = Plan.load({"methods": "dave,attn_lrp", "metrics": "energypg", "limit": 100})
        """
        defaults = {one.name: one.default for one in fields(cls)}
        settings = read_settings({} if source is None else source, defaults)
        return cls(**merge_settings({**defaults, **settings}, flags or {}, overrides))

    def __post_init__(self) -> None:
        check_fields(self, "the plan")
        for seed in self.seeds:
            check_seed(seed)
        for name in ("models", "methods", "metrics", "seeds"):
            if not getattr(self, name):
                raise OptionError(f"the plan has no {name}; give at least one")
        models = _add_labels(self.models, [entry.spec for entry in self.models])
        methods = _add_labels(self.methods, [entry.method for entry in self.methods])
        metrics = _add_labels(self.metrics, [entry.metric for entry in self.metrics])
        for entry in methods:
            check_options(entry.method, entry.options)  # unknown options are an error now, not after hours
        if self.budget is not None:
            if self.budget < 1:
                raise OptionError(f"a budget of {self.budget} passes; expected 1 or more")
            methods = tuple(entry.fit_budget(self.budget) for entry in methods)
        metrics = _add_patch_metrics(metrics) if self.matched else metrics
        for name, entries in (("models", models), ("methods", methods), ("metrics", metrics)):
            object.__setattr__(self, name, entries)
        grids = [metric for entry in metrics if isinstance(metric := entry.create(), GridMetric)]
        if len({(metric.options, metric.fixed) for metric in grids}) > 1:
            raise OptionError("the plan has metrics of different grids; give each a run of its own")
        if self.batch < 1 or self.shard < 1:
            raise OptionError(f"batch {self.batch} and shard {self.shard}; expected 1 or more images each")
        if self.min_confidence is not None and not 0 <= self.min_confidence < 1:
            raise OptionError(f"min_confidence {self.min_confidence}; expected 0 or above and below 1")

    def document(self, data_digest: str) -> dict[str, Any]:
        """Return everything that decides the numbers, with files by content, so that they may move."""
        content = asdict(self)
        content["models"] = [{**entry.identity, "label": entry.label} for entry in self.models]
        content["methods"] = [entry.identity for entry in self.methods]
        content["metrics"] = [entry.identity for entry in self.metrics]
        content["data"] = data_digest
        content["plugins"] = [hash_code(path) for path in self.plugins]
        normal: dict[str, Any] = json.loads(json.dumps(content, default=str))
        return normal


def _add_labels(entries: Sequence[E], names: Sequence[str]) -> tuple[E, ...]:
    """Return entries with labels, which are their names by default; no two alike."""
    labelled = tuple(replace(entry, label=entry.label or name) for entry, name in zip(entries, names, strict=True))
    labels = [entry.label for entry in labelled]
    for label in labels:
        if labels.count(label) > 1:
            raise OptionError(f"{label!r} is in the plan twice; give each a label of its own, or leave one out")
    return labelled


def _add_patch_metrics(entries: Sequence[MetricEntry]) -> tuple[MetricEntry, ...]:
    """Return each metric followed by itself at patch resolution, unless the plan already has that one."""
    by_label = {entry.label: entry for entry in entries}
    pairs = (pair for one in entries for pair in ((one,) if one.smoothing else (one, one.at_patch_resolution())))
    return tuple({entry.label: by_label.get(entry.label, entry) for entry in pairs}.values())
