"""Merges the sources of a plan: a file, flags of the command line, and options of single methods and metrics."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dave_vit._internal.registry import import_plugins, split_names, suggest_names
from dave_vit.errors import OptionError, require_extra
from dave_vit.evaluate.plan_entries import MethodEntry, MetricEntry, ModelEntry, Smoothing, read_entry
from dave_vit.methods import METHODS
from dave_vit.methods.options import filter_options, parse_options, parse_value
from dave_vit.metrics import METRICS

METHOD_FLAGS = ("samples", "preset", "against")  # go to every method that takes them
Overrides = dict[str, dict[str, str]]
"""Texts of ``--set WHO.NAME=VALUE`` by who and name."""


def read_settings(source: str | Path | Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the settings of a .yaml or .toml file, or of a mapping, after checking their names."""
    content = source if isinstance(source, Mapping) else _read_file(Path(source))
    where = "" if isinstance(source, Mapping) else f"{source}: "
    if not isinstance(content, Mapping):
        raise OptionError(f"{where}expected settings such as 'methods: [dave]' at the top of the plan")
    for name in content:
        if name not in known:
            hint = suggest_names(str(name), list(known))
            raise OptionError(f"{where}unknown setting {name!r}{hint}; known: {', '.join(known)}")
    return dict(content)


def merge_settings(settings: dict[str, Any], flags: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
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
        raise OptionError(f"--set {who}.{next(iter(options))}: {who!r} is no method and no metric of this run")
    return merged


def _override_method(entry: MethodEntry, flags: Mapping[str, Any], texts: Overrides) -> MethodEntry:
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
    with require_extra("pyyaml", "eval"):
        import yaml
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
