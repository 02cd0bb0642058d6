"""What a run is to compute: models x methods x metrics x data x seeds, from a file or from flags."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from dave_vit._internal.registry import import_plugins, suggest_names
from dave_vit._internal.schema import check_fields, check_seed, check_values
from dave_vit.errors import OptionError, missing_extra
from dave_vit.maps import Smoothing as SmoothingKind
from dave_vit.methods import METHODS
from dave_vit.methods.options import checked, options_of
from dave_vit.metrics import GridMetric, Metric, create_metric
from dave_vit.models import ModelSpec, Prepare

Target = Literal["label", "predicted"]
E = TypeVar("E", "ModelEntry", "MethodEntry", "MetricEntry")


@dataclass(frozen=True)
class ModelEntry(ModelSpec):
    """A model as ``load_model`` takes it, and how results call it."""

    label: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "a model of the plan")
        if self.prepare is not None and self.prepare.fit == "tiles":
            raise OptionError(
                "fit 'tiles' makes several inputs of an image, which no metric scores; take pad or squash"
            )

    @property
    def identity(self) -> dict[str, Any]:
        """What decides its results, wherever its files lie."""
        files = {"weights": self.weights, "classes": self.classes}
        said = {} if self.prepare is None else {"prepare": asdict(self.prepare)}
        digests = {name: _file_digest(path) if path else None for name, path in files.items()}
        return {"spec": self.spec, **digests, **said}


@dataclass(frozen=True)
class MethodEntry:
    """A method with its options, what classes are set against in it, and how results call it.

    Attributes:
        method: its name.
        options: of the method.
        label: its name by default.
        against: "rivals", a class by index or name, or "none"; as the method has it by default.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    against: str | int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "a method of the plan")

    def seeds(self, common: tuple[int, ...]) -> tuple[int, ...]:
        """The seeds that it runs with: its own, or the plan's; what draws nothing runs once."""
        if "seed" in self.options:
            return (int(self.options["seed"]),)
        return common if "seed" in options_of(self.method) else common[:1]

    def within(self, budget: int) -> MethodEntry:
        """With the options that keep to a budget of forward passes."""
        spent = METHODS[self.method].within(budget, **self.options)
        for name in [name for name in spent if self.options.get(name, spent[name]) != spent[name]]:
            said = f"{self.label} has {name} = {self.options[name]} and the plan a budget of {budget} passes"
            raise OptionError(f"{said}; leave one of the two out")
        return replace(self, options={**self.options, **spent})


@dataclass(frozen=True)
class MetricEntry:
    """A metric with its options, how results call it, and its own smoothing of maps in place of the plan's."""

    metric: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    smoothing: Smoothing | None = None

    def __post_init__(self) -> None:
        if self.smoothing is not None:
            object.__setattr__(self, "smoothing", _smoothing(self.smoothing))
        check_fields(self, "a metric of the plan")

    def matched(self) -> MetricEntry:
        """Of maps as coarse as those of tokens."""
        return replace(self, label=f"{self.label}/patch", smoothing=Smoothing("patch"))

    def create(self) -> Metric:
        """The metric itself."""
        return create_metric(self.metric, **self.options)


@dataclass(frozen=True)
class Smoothing:
    """What is done to every map before it is scored.

    Attributes:
        kind: "none", "mean", "gaussian", "patch" (as coarse as maps of tokens are), or the authors' "official" way.
        size: side of the window of "mean" and "gaussian" in pixels; odd.
        sigma: of the Gaussian.
    """

    kind: SmoothingKind | Literal["patch", "official"] = "none"
    size: int = 15
    sigma: float | None = None

    def __post_init__(self) -> None:
        known = (*get_args(SmoothingKind), "patch", "official")
        if self.kind not in known:
            raise OptionError(f"smoothing {self.kind!r}; expected one of {', '.join(known)}")
        check_fields(self, "smoothing")
        if self.sigma is not None and self.sigma <= 0:
            raise OptionError(f"smoothing sigma {self.sigma}; expected a number above 0")
        if self.size < 1 or self.size % 2 == 0:
            raise OptionError(f"smoothing window of {self.size} pixels; expected an odd number, 1 or above")


@dataclass(frozen=True)
class Plan:
    """All that decides the numbers of a run; how it is executed (engine, devices, workers) is no part of it.

    Attributes:
        models: what is explained.
        methods: how.
        metrics: how maps are scored.
        data: spec of a data set.
        limit: use the first so many images.
        seeds: of the methods that draw samples.
        budget: forward passes of a map, for all methods that can take more or fewer.
        smoothing: of every map before it is scored.
        matched: score all maps once more, smoothed to the resolution of patches.
        target: explain the image's "label" (the predicted class where there is none) or the "predicted" class.
        min_confidence: score only images that the model classifies correctly with more than this probability.
        batch: images in one pass.
        shard: images whose results are one file.
        save_maps: keep the maps as well.
        plugins: Python files that register methods or metrics of the plan.
    """

    models: tuple[ModelEntry, ...]
    methods: tuple[MethodEntry, ...]
    metrics: tuple[MetricEntry, ...]
    data: str = "builtin"
    limit: int | None = None
    seeds: tuple[int, ...] = (0,)
    budget: int | None = None
    smoothing: Smoothing = Smoothing()
    matched: bool = False
    target: Target = "label"
    min_confidence: float | None = None
    batch: int = 32
    shard: int = 32
    save_maps: bool = False
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "the plan")
        object.__setattr__(self, "plugins", import_plugins(self.plugins))
        for seed in self.seeds:
            check_seed(seed)
        for name in ("models", "methods", "metrics", "seeds"):
            if not getattr(self, name):
                raise OptionError(f"the plan has no {name}; give at least one")
        object.__setattr__(self, "models", _labelled(self.models, [entry.spec for entry in self.models]))
        object.__setattr__(self, "methods", _labelled(self.methods, [entry.method for entry in self.methods]))
        object.__setattr__(self, "metrics", _labelled(self.metrics, [entry.metric for entry in self.metrics]))
        if self.matched:
            object.__setattr__(self, "metrics", _with_matched(self.metrics))
        for method in self.methods:
            checked(method.method, method.options)  # what is unknown is said now, not after hours
        if self.budget is not None:
            if self.budget < 1:
                raise OptionError(f"a budget of {self.budget} passes; expected 1 or more")
            object.__setattr__(self, "methods", tuple(entry.within(self.budget) for entry in self.methods))
        made = [entry.create() for entry in self.metrics]  # impossible options are refused here
        if len({(one.options, one.fixed) for one in made if isinstance(one, GridMetric)}) > 1:
            raise OptionError("the plan has metrics of different grids; give each a run of its own")
        if self.batch < 1 or self.shard < 1:
            raise OptionError(f"batch {self.batch} and shard {self.shard}; expected 1 or more images each")
        if self.min_confidence is not None and not 0 <= self.min_confidence < 1:
            raise OptionError(f"min_confidence {self.min_confidence}; expected 0 or above and below 1")

    def document(self, data_digest: str) -> dict[str, Any]:
        """All that decides the numbers, by content: the same for the same files at another place."""
        content = asdict(self)
        content["models"] = [{**entry.identity, "label": entry.label} for entry in self.models]
        content["data"] = data_digest
        plugins = content.pop("plugins")  # runs of plans without any go on
        content |= {"plugins": [_file_digest(path) for path in plugins]} if plugins else {}
        content["methods"] = [
            {name: value for name, value in method.items() if (name, value) != ("against", None)}
            for method in content["methods"]  # runs of plans that say nothing of it go on
        ]
        normal: dict[str, Any] = json.loads(json.dumps(content))
        return normal


def read_plan(path: str | Path) -> dict[str, Any]:
    """The settings of a plan file, .yaml or .toml; flags may still change them."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{path}: cannot be read as a plan ({' '.join(str(error).split())[:120]})") from error
    if not isinstance(content, dict):
        raise OptionError(f"{path}: expected settings such as 'methods: [dave]' at the top of the plan")
    known = [one.name for one in fields(Plan)]
    for name in content:
        if name not in known:
            raise OptionError(
                f"{path}: unknown setting {name!r}{suggest_names(str(name), known)}; known: {', '.join(known)}"
            )
    return content


def make_plan(settings: Mapping[str, Any]) -> Plan:
    """A plan from plain settings: entries may be names or tables, lists may be single values."""
    given = dict(settings)
    given["plugins"] = import_plugins(listed(given.get("plugins", ())))
    given["models"] = _entries(ModelEntry, "spec", given.get("models", "builtin"))
    given["methods"] = _entries(MethodEntry, "method", given.get("methods", "dave"))
    given["metrics"] = _entries(MetricEntry, "metric", given.get("metrics", ("gridpg", "energypg", "deletion")))
    given["seeds"] = tuple(listed(given.get("seeds", 0)))
    given["smoothing"] = _smoothing(given.get("smoothing", "none"))
    return Plan(**given)


def hash_content(content: Any) -> str:
    """A hash of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _smoothing(value: Any) -> Smoothing:
    """Out of its kind, or of a table."""
    if isinstance(value, Smoothing):
        return value
    if isinstance(value, dict):
        check_values(value, get_type_hints(Smoothing), "smoothing")
    return Smoothing(**value) if isinstance(value, dict) else Smoothing(value)


def _with_matched(entries: tuple[MetricEntry, ...]) -> tuple[MetricEntry, ...]:
    """Each metric followed by itself on maps as coarse as those of tokens, if the plan has that not yet."""
    made = {entry.label: entry for entry in entries}
    pairs = (pair for entry in entries for pair in ((entry,) if entry.smoothing else (entry, entry.matched())))
    return tuple({entry.label: made.get(entry.label, entry) for entry in pairs}.values())


def listed(value: Any) -> Sequence[Any]:
    """A list, or a list of one."""
    return value if isinstance(value, list | tuple) else [value]


def _entries(kind: type[E], main: str, values: Any) -> tuple[E, ...]:
    """Entries from names and tables; ``main`` is the field that a bare name fills."""
    return tuple(value if isinstance(value, kind) else kind(**table_of(kind, main, value)) for value in listed(values))


def table_of(kind: type[ModelEntry | MethodEntry | MetricEntry], main: str, value: Any) -> dict[str, Any]:
    """The table of an entry, which may be a name; ``main`` is the field that a bare name fills."""
    table = value if isinstance(value, dict) else {main: value}
    if kind is ModelEntry and isinstance(table.get("prepare"), dict):
        check_values(table["prepare"], get_type_hints(Prepare), "the preprocessing")
        table = {**table, "prepare": Prepare(**table["prepare"])}
    if kind is MetricEntry and table.get("smoothing") is not None:
        table = {**table, "smoothing": _smoothing(table["smoothing"])}
    check_values(table, get_type_hints(kind), f"a {kind.__name__.removesuffix('Entry').lower()} of the plan")
    if main not in table:
        raise OptionError(f"plan entry {table}: expected a {main!r}")
    return table


def _labelled(entries: Sequence[E], names: Sequence[str]) -> tuple[E, ...]:
    """Entries under their labels, which are the names where nothing is said; no two alike."""
    done = tuple(replace(entry, label=entry.label or name) for entry, name in zip(entries, names, strict=True))
    labels = [entry.label for entry in done]
    for label in labels:
        if labels.count(label) > 1:
            raise OptionError(f"{label!r} is in the plan twice; give each a label of its own, or leave one out")
    return done


@lru_cache(maxsize=64)
def _file_digest(path: str) -> str:
    """A hash of a file; of its name where there is no such file (names such as "random" stand for none)."""
    if not Path(path).is_file():
        return path
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise missing_extra("pyyaml", "eval") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
