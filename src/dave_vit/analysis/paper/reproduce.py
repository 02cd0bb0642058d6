"""All tables and figures of a suite, one after the other; what an earlier command finished is not computed again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dave_vit._internal.atomic_files import json_bytes, write_files
from dave_vit._internal.environment import device_name, versions
from dave_vit._version import __version__
from dave_vit.analysis import ANALYSES, Analysis, MapAnalysisOptions
from dave_vit.analysis.paper import localization
from dave_vit.analysis.paper.page import Record, SuitePage, html, markdown
from dave_vit.analysis.paper.suites import Suite
from dave_vit.data import open_dataset
from dave_vit.errors import OptionError
from dave_vit.evaluate.plan_entries import hash_content
from dave_vit.evaluate.run import ProgressCallback
from dave_vit.viz.report_section import Section, csv_bytes

Make = Callable[[], Section]


@dataclass(frozen=True)
class ReproduceOptions:
    """How a suite is run.

    Attributes:
        out: folder; the same one resumes.
        command: as captions tell it.
        device: of the models.
        show: whether figures show the pictures themselves beside their maps.
        seed: of everything that is drawn.
        tell: is told of each section: its number, how many there are, and its name.
        watch: is told of the progress of runs.
    """

    out: Path
    command: str
    device: str = "cpu"
    show: bool = True
    seed: int = 0
    tell: Callable[[int, int, str], None] = lambda number, count, name: None
    watch: ProgressCallback | None = None


def reproduce(suite: Suite, options: ReproduceOptions) -> list[Record]:
    """Computes what is missing, writes tables, figures and the report, and returns the record of each section."""
    if not suite.data:
        raise OptionError(f"suite {suite.name!r} needs pictures; give them as --data imagenet:DIR")
    data = open_dataset(suite.data)
    for entry in suite.models:  # a model that cannot be loaded is said now, not after hours
        entry.load("cpu")
    tables = [(group.name, group.methods, group.baseline) for group in suite.groups]
    models_used = [entry.identity for entry in suite.models]
    counts = [asdict(suite.counts), suite.analyses]
    facts = [data.digest(), models_used, tables, counts, options.show, options.seed, __version__]
    makers = dict(_makers(suite, options, len(data)))
    records = []
    for number, (name, make) in enumerate(makers.items()):
        options.tell(number, len(makers), name)
        records.append(_finished(options, name, hash_content(facts), make))
    page = SuitePage(suite, records, options.command, options.out / "figures")
    write_files(
        {
            options.out / "report.md": markdown(page).encode(),
            options.out / "report.html": html(page).encode(),
        }
    )
    return records


def _finished(options: ReproduceOptions, name: str, key: str, make: Make) -> Record:
    """The record of a section: the kept one if it has the same key, else a new one."""
    out = options.out
    path = out / "runs" / "sections" / f"{name}.json"
    if path.exists():
        kept: Record = json.loads(path.read_bytes())
        if kept["key"] == key:
            return kept
    started = time.perf_counter()
    made = make()
    seconds = round(time.perf_counter() - started, 1)
    where = {"device": device_name(torch.device(options.device)), "versions": dict(versions()), "seconds": seconds}
    record: Record = {**made.record(), "command": options.command, **where, "key": key}
    files = {out / "figures" / file: data for picture in made.pictures for file, data in picture.files().items()}
    if made.rows:
        files[out / "tables" / f"{name}.csv"] = csv_bytes(made.rows)
    write_files({path: json_bytes(record), **files}, durable=True)  # the record, named first, appears last
    return record


def _makers(suite: Suite, options: ReproduceOptions, images: int) -> Iterator[tuple[str, Make]]:
    """Sections in the order of the report."""
    counts = replace(suite.counts, pool=min(suite.counts.pool, images), pictures=min(suite.counts.pictures, images))
    settings = localization.RunSettings(suite.data, options.out / "runs", options.device, options.seed)
    for group in suite.groups:
        yield group.name, partial(localization.score_group, group, counts, settings, options.watch)
    for name in dict.fromkeys([*suite.analyses, *ANALYSES]):
        analysis = ANALYSES[name]
        yield name, partial(analysis.run, _analysis_options(analysis, suite, options))


def _analysis_options(analysis: Analysis, suite: Suite, options: ReproduceOptions) -> Any:
    """The options of an analysis: what all share, and what the suite says of it."""
    shared: dict[str, Any] = {
        "models": suite.models[:1] if analysis.first_model else suite.models,
        "data": suite.data,
        "seed": options.seed,
        "device": options.device,
        "show": options.show,
    }
    if issubclass(analysis.options, MapAnalysisOptions):
        shared["samples"] = suite.counts.samples
    known = {one.name for one in fields(analysis.options)}
    own = {name: value for name, value in shared.items() if name in known}
    return analysis.options(**{**own, **suite.analyses.get(analysis.name, {})})
