"""What a run computes (models x methods x metrics x data x seeds), read from a file, flags and options."""

import json
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from dave_vit._internal.content_hash import hash_code
from dave_vit._internal.registry import import_plugins, split_names, suggest_names
from dave_vit._internal.schema import Bounds, Count, check_fields, check_seed
from dave_vit.errors import OptionError, import_optional
from dave_vit.evaluate.plan_entries import NO_SMOOTHING, MethodEntry, MetricEntry, ModelEntry, Smoothing, read_entry
from dave_vit.methods import METHODS
from dave_vit.methods.options import check_options, filter_options, parse_options, parse_value
from dave_vit.metrics import METRICS, GridMetric

E = TypeVar("E", ModelEntry, MethodEntry, MetricEntry)
Settings = Mapping[str, Any]


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
    budget: Count | None = None
    smoothing: Smoothing = NO_SMOOTHING
    matched: bool = False
    target: Literal["label", "predicted"] = "label"
    min_confidence: Annotated[float, Bounds(at_least=0, below=1)] | None = None
    batch: Count = 32
    shard: Count = 32
    save_maps: bool = False
    plugins: tuple[str, ...] = ()

    @classmethod
    def load(
        cls, source: str | Path | Settings | None = None, flags: Settings | None = None, overrides: Iterable[str] = ()
    ) -> "Plan":
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
        for name, kind in (("models", "spec"), ("methods", "method"), ("metrics", "metric")):
            object.__setattr__(self, name, _add_labels(getattr(self, name), kind))
        for entry in self.methods:
            check_options(entry.method, entry.options)  # unknown options are an error now, not after hours
        if self.budget is not None:
            object.__setattr__(self, "methods", tuple(entry.fit_budget(self.budget) for entry in self.methods))
        if self.matched:
            object.__setattr__(self, "metrics", _add_patch_metrics(self.metrics))
        grids = [metric for entry in self.metrics if isinstance(metric := entry.create(), GridMetric)]
        if len({(metric.options, metric.fixed) for metric in grids}) > 1:
            raise OptionError("the plan has metrics of different grids; give each a run of its own")

    def document(self, data_digest: str) -> dict[str, Any]:
        """Return everything that decides the numbers, with files by content, so that they may move."""
        content = asdict(self)
        content["models"] = [{**entry.identity, "label": entry.label} for entry in self.models]
        content["methods"] = [entry.identity for entry in self.methods]
        content["metrics"] = [entry.identity for entry in self.metrics]
        content["data"] = data_digest
        content["plugins"] = [hash_code(path) for path in self.plugins]
        return json.loads(json.dumps(content, default=str))  # type: ignore[no-any-return]


def _add_labels(entries: Sequence[E], name: str) -> tuple[E, ...]:
    """Return entries with labels, by default the value of the field ``name``; no two alike."""
    labelled = tuple(replace(entry, label=entry.label or getattr(entry, name)) for entry in entries)
    label, count = Counter(entry.label for entry in labelled).most_common(1)[0]
    if count > 1:
        raise OptionError(f"{label!r} is in the plan twice; give each a label of its own, or leave one out")
    return labelled


def _add_patch_metrics(entries: Sequence[MetricEntry]) -> tuple[MetricEntry, ...]:
    """Return each metric followed by itself at patch resolution, unless the plan already has that one."""
    by_label = {entry.label: entry for entry in entries}
    every = []
    for entry in entries:
        patched = replace(entry, label=f"{entry.label}/patch", smoothing=Smoothing("patch"))
        every += [entry] if entry.smoothing else [entry, patched]
    return tuple({entry.label: by_label.get(entry.label, entry) for entry in every}.values())


METHOD_FLAGS = ("samples", "preset", "against")  # go to every method that takes them
Overrides = dict[str, dict[str, str]]
"""Texts of ``--set WHO.NAME=VALUE`` by who and name."""


def read_settings(source: str | Path | Settings, known: Collection[str]) -> dict[str, Any]:
    """Return the settings of a .yaml or .toml file, or of a mapping, after checking their names."""
    content, where = (source, "") if isinstance(source, Mapping) else (_read_file(Path(source)), f"{source}: ")
    if not isinstance(content, Mapping):
        raise OptionError(f"{where}expected settings such as 'methods: [dave]' at the top of the plan")
    for name in content:
        if name not in known:
            hint = suggest_names(str(name), list(known))
            raise OptionError(f"{where}unknown setting {name!r}{hint}; known: {', '.join(known)}")
    return dict(content)


def merge_settings(settings: dict[str, Any], flags: Settings, overrides: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a plan from plain settings; flags replace them, overrides replace single options."""
    merged = {**settings, **{name: value for name, value in flags.items() if name not in METHOD_FLAGS}}
    merged["plugins"] = import_plugins(_as_list(merged["plugins"]))  # before names are looked up
    texts = _parse_overrides(overrides)
    methods = [read_entry(MethodEntry, one) for one in _expand_names(merged["methods"], METHODS)]
    metrics = [read_entry(MetricEntry, one) for one in _expand_names(merged["metrics"], METRICS)]
    merged["models"] = tuple(read_entry(ModelEntry, one) for one in _as_list(merged["models"]))
    merged["methods"] = tuple(_override_method(entry, flags, texts) for entry in methods)
    merged["metrics"] = tuple(_override_metric(entry, texts) for entry in metrics)
    merged["seeds"] = tuple(_as_list(merged["seeds"]))
    merged["smoothing"] = replace(read_entry(Smoothing, settings["smoothing"]), **flags.get("smoothing", {}))
    for who, options in texts.items():
        raise OptionError(f"--set {who}.{next(iter(options))}: {who!r} is neither a method nor a metric of this run")
    return merged


def _override_method(entry: MethodEntry, flags: Settings, texts: Overrides) -> MethodEntry:
    """Return a method with what flags say of all methods and overrides of this one."""
    replaced = {"seed"} if "seeds" in flags else set()
    if "budget" in flags:
        replaced |= METHODS[entry.method].options_for_budget(flags["budget"], **entry.options).keys()
    kept = {name: value for name, value in entry.options.items() if name not in replaced}
    shared = filter_options(entry.method, samples=flags.get("samples"), preset=flags.get("preset"))
    own = parse_options(entry.method, texts.pop(entry.label or entry.method, {}))
    return replace(entry, options={**kept, **shared, **own}, against=flags.get("against", entry.against))


def _override_metric(entry: MetricEntry, texts: Overrides) -> MetricEntry:
    own = {name: parse_value(text) for name, text in texts.pop(entry.label or entry.metric, {}).items()}
    return replace(entry, options={**entry.options, **own})


def _parse_overrides(texts: Iterable[str]) -> Overrides:
    overrides: Overrides = {}
    for text in texts:
        where, equals, value = text.partition("=")
        who, dot, name = where.partition(".")
        if not (equals and dot):
            raise OptionError(f"--set {text}; expected WHO.NAME=VALUE, such as dave.rotation=0")
        overrides.setdefault(who.strip(), {})[name.strip()] = value
    return overrides


def _expand_names(value: Any, every: Iterable[str]) -> Sequence[Any]:
    """Return a list of names or tables; a text has names with commas between, "all" stands for every name."""
    return split_names(value, every) if isinstance(value, str) else _as_list(value)


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _read_file(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if path.suffix == ".toml" else _parse_yaml(text)
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{path}: cannot be read as a plan ({' '.join(str(error).split())[:120]})") from error


def _parse_yaml(text: str) -> Any:
    yaml = import_optional("yaml", "pyyaml", extra="eval")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
