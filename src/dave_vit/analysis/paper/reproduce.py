"""Computes all tables and figures of a suite, and its report; sections that an earlier command finished are kept."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from dave_vit._internal.atomic_files import json_bytes, write_files
from dave_vit._internal.content_hash import hash_content
from dave_vit._internal.environment import device_name, format_facts, versions
from dave_vit._version import __version__
from dave_vit.analysis import ANALYSES, Analysis, MapAnalysisOptions
from dave_vit.analysis.paper import localization
from dave_vit.analysis.paper.suites import ReproduceOptions, Suite
from dave_vit.data import open_dataset
from dave_vit.errors import OptionError
from dave_vit.viz.pages import render
from dave_vit.viz.report_section import Section

Compute = Callable[[], Section]
Record = dict[str, Any]
"""A section as JSON, with its key, command, device, versions and seconds."""


def reproduce(suite: Suite, options: ReproduceOptions) -> list[Record]:
    """Compute what is missing, write tables, figures and the report, and return the record of each section."""
    if not suite.data:
        raise OptionError(f"suite {suite.name!r} needs images; give them as --data imagenet:DIR")
    data = open_dataset(suite.data)
    for entry in suite.models:  # refuse a model that cannot be loaded now, not after hours
        entry.load("cpu")
    tables = [(group.name, group.methods, group.baseline) for group in suite.groups]
    models = [entry.identity for entry in suite.models]
    counts = [asdict(suite.counts), suite.analyses]
    key = hash_content([data.digest(), models, tables, counts, options.show, options.seed, __version__])
    sections = dict(_list_sections(suite, options, len(data)))
    records = []
    for index, (name, compute) in enumerate(sections.items()):
        options.on_section(index, len(sections), name)
        records.append(_finish_section(options, name, key, compute))
    content = (suite, records, options.command, options.out / "figures")
    write_files({options.out / f"report.{kind}": render_report(kind, *content).encode() for kind in ("md", "html")})
    return records


def _finish_section(options: ReproduceOptions, name: str, key: str, compute: Compute) -> Record:
    """Return the record of a section: the stored one if it has the same key, else a new one."""
    path = options.out / "runs" / "sections" / f"{name}.json"
    if path.exists():
        stored: Record = json.loads(path.read_bytes())
        if stored["key"] == key:
            return stored
    start = time.perf_counter()
    section = compute()
    seconds = round(time.perf_counter() - start, 1)
    run = {"device": device_name(torch.device(options.device)), "versions": dict(versions()), "seconds": seconds}
    record: Record = {**section.record(), "command": options.command, **run, "key": key}
    files = section.files(options.out / "figures", options.out / "tables" / f"{name}.csv")
    write_files({path: json_bytes(record), **files}, durable=True)  # the record, named first, appears last
    return record


def _list_sections(suite: Suite, options: ReproduceOptions, images: int) -> Iterator[tuple[str, Compute]]:
    """Yield the names of sections in the order of the report, with the functions that compute them."""
    counts = replace(suite.counts, pool=min(suite.counts.pool, images), pictures=min(suite.counts.pictures, images))
    for group in suite.groups:
        yield group.name, partial(localization.score_group, group, counts, suite.data, options)
    for name in dict.fromkeys([*suite.analyses, *ANALYSES]):
        yield name, partial(ANALYSES[name].run, _analysis_options(ANALYSES[name], suite, options))


def _analysis_options(analysis: Analysis, suite: Suite, options: ReproduceOptions) -> Any:
    """Return the options of an analysis: those that all share, and those that the suite sets for it."""
    models = suite.models[:1] if analysis.first_model else suite.models
    shared: dict[str, Any] = {"models": models, "data": suite.data}
    shared |= {name: getattr(options, name) for name in ("seed", "device", "show")}
    if issubclass(analysis.options, MapAnalysisOptions):
        shared["samples"] = suite.counts.samples
    known = {field.name for field in fields(analysis.options)}
    own = {name: value for name, value in shared.items() if name in known}
    return analysis.options(**{**own, **suite.analyses.get(analysis.name, {})})


def render_report(kind: str, suite: Suite, records: Sequence[Record], command: str, figures: Path) -> str:
    """Render the report of a suite.

    Args:
        kind: "md", with links to figures, or "html", with figures inside.
        suite: the suite that was run.
        records: its sections, in their order.
        command: the command that ran it.
        figures: folder of the figures' files.
    """
    return render(
        f"suite.{kind}",
        title=f"DAVE, reproduced: suite {suite.name}{' (quick)' if suite.quick else ''}",
        facts=_facts(suite, records, command),
        notes=suite.notes,
        records=records,
        figures=figures.name,
        figure=lambda picture: Image.open(figures / f"{picture['name']}.png"),
        ran=_format_run,
    )


def _facts(suite: Suite, records: Sequence[Record], command: str) -> list[tuple[str, str]]:
    total = sum(record["seconds"] for record in records)
    return [
        ("command", command),
        ("models", ", ".join(f"{entry.label} ({entry.spec})" for entry in suite.models)),
        ("time", f"{total / 60:.1f} minutes, reports and loading left out"),
        ("device", "; ".join(dict.fromkeys(record["device"] for record in records))),
        ("versions", "; ".join(dict.fromkeys(format_facts(record["versions"]) for record in records))),
    ]


def _format_run(record: Record) -> str:
    """Describe how a section was computed."""
    return (
        f"Run: {format_facts(record['facts'])}; {record['seconds']:.0f} s on {record['device']}; "
        f"{format_facts(record['versions'])}; {record['command']}"
    )
