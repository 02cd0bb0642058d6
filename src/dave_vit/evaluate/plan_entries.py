"""The entries of a plan: models, methods and metrics with their options, and the smoothing of maps."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from dave_vit._internal.content_hash import hash_code, hash_file, hash_files, hash_own_code
from dave_vit._internal.schema import Bounds, check_fields, check_values
from dave_vit.errors import OptionError
from dave_vit.maps import Smoothing as SmoothingKind
from dave_vit.methods import METHODS
from dave_vit.methods.options import declared_options
from dave_vit.metrics import METRICS, Metric, create_metric
from dave_vit.models import ModelSpec, Prepare

E = TypeVar("E")


@dataclass(frozen=True)
class Smoothing:
    """Smoothing of every map before it is scored.

    Attributes:
        kind: "none", "mean", "gaussian", "patch" (as coarse as token maps), or the authors' "official" way.
        size: side of the window of "mean" and "gaussian" in pixels; odd.
        sigma: standard deviation of the Gaussian in pixels.
    """

    kind: SmoothingKind | Literal["patch", "official"] = "none"
    size: int = 15
    sigma: Annotated[float, Bounds(above=0)] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "smoothing")
        if self.size < 1 or self.size % 2 == 0:
            raise OptionError(f"smoothing window of {self.size} pixels; expected an odd number, 1 or above")


NO_SMOOTHING = Smoothing()


@dataclass(frozen=True)
class ModelEntry(ModelSpec):
    """Model of a plan: arguments of ``load_model``, and its label in results (the spec by default)."""

    label: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "a model of the plan")
        if self.prepare is not None and self.prepare.fit == "tiles":
            how = "use pad or squash"
            raise OptionError(f"fit 'tiles' turns an image into several inputs, which no metric scores; {how}")

    @property
    def identity(self) -> dict[str, Any]:
        """Content that decides its results, independent of where its files are."""
        file, _, function = self.spec.rpartition(":")
        is_code, folder = file.endswith(".py") and Path(file).is_file(), Path(function)  # of hf:FOLDER
        files = sorted(filter(Path.is_file, folder.iterdir())) if file and folder.is_dir() else []
        return {
            "spec": self.spec,
            "weights": self.weights and (hash_file(self.weights) or self.weights),  # which may be "random"
            "classes": self.classes and (hash_file(self.classes) or self.classes),
            "prepare": self.prepare and asdict(self.prepare),
            "code": hash_code(file) if function and is_code else hash_files(files) or None,
        }


@dataclass(frozen=True)
class MethodEntry:
    """Method of a plan.

    Attributes:
        method: its name in ``METHODS``.
        options: arguments of ``create_method``.
        label: its name in results, the method's by default.
        against: "rivals", a class by index or name, or "none"; the method's own default if None.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    against: str | int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "a method of the plan")

    @property
    def identity(self) -> dict[str, Any]:
        """Content that decides its results: preset files by what they say, a user's method by its code."""
        options, preset = dict(self.options), str(self.options.get("preset"))
        if preset.endswith(".toml") and Path(preset).is_file():
            options["preset"] = _read_toml(Path(preset))
        return {**asdict(self), "options": options, "code": hash_own_code(METHODS[self.method])}

    def select_seeds(self, seeds: tuple[int, ...]) -> tuple[int, ...]:
        """Return the seeds to run with: its own, else the plan's; the first one only if it draws no samples."""
        if "seed" in self.options:
            return (int(self.options["seed"]),)
        return seeds if "seed" in declared_options(self.method) else seeds[:1]

    def fit_budget(self, budget: int) -> "MethodEntry":
        """Return a copy with the options that keep to a budget of forward passes."""
        options = METHODS[self.method].options_for_budget(budget, **self.options)
        for name, value in options.items():
            if self.options.get(name, value) != value:
                both = f"{self.label} has {name} = {self.options[name]} and the plan a budget of {budget} passes"
                raise OptionError(f"{both}; leave one of the two out")
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class MetricEntry:
    """Metric of a plan: its name in ``METRICS``, options, label in results, and its own smoothing of maps if any."""

    metric: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    smoothing: Smoothing | None = None

    def __post_init__(self) -> None:
        check_fields(self, "a metric of the plan")

    @property
    def identity(self) -> dict[str, Any]:
        """Content that decides its results: a user's metric by its code."""
        return {**asdict(self), "code": hash_own_code(METRICS[self.metric])}

    def create(self) -> Metric:
        """Create the metric."""
        return create_metric(self.metric, **self.options)


_NOUNS = {ModelEntry: "a model of the plan", MethodEntry: "a method of the plan", MetricEntry: "a metric of the plan"}
_NOUNS |= {Prepare: "the preprocessing", Smoothing: "smoothing"}
_NESTED: dict[str, type[Any]] = {"prepare": Prepare, "smoothing": Smoothing}


def read_entry(kind: type[E], value: Any) -> E:
    """Return an entry from a table of its fields, or from the value of its first field alone."""
    if isinstance(value, kind):
        return value
    first, hints = fields(kind)[0], get_type_hints(kind)  # type: ignore[arg-type]
    table = dict(value) if isinstance(value, dict) else {first.name: value}
    check_values({name: one for name, one in table.items() if name not in hints}, hints, _NOUNS[kind])
    if first.default is MISSING and first.name not in table:
        raise OptionError(f"plan entry {table}: expected a {first.name!r}")
    nested = {name: read_entry(inner, table[name]) for name, inner in _NESTED.items() if table.get(name) is not None}
    return kind(**{**table, **nested})


def _read_toml(path: Path) -> Any:
    """Return the content of a preset file, or a hash of it if it is damaged, which the method reports."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return hash_file(path)
