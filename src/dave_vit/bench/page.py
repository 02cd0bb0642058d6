"""The report of a run as one HTML file that needs no other."""

from __future__ import annotations

import base64
from html import escape
from typing import Any

from dave_vit.bench.examples import Example, example_metric, picture
from dave_vit.bench.plan import MetricEntry, ModelEntry
from dave_vit.bench.plots import curves_svg
from dave_vit.bench.report import Report, arrow, dropped
from dave_vit.bench.tasks import Task

_FEW = 8  # methods up to which the tables of differences are shown unfolded
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --good: #2a8a4a; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; max-width: 72rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); } h3 { margin-top: 1.8rem; }
table { border-collapse: collapse; margin: 0.8rem 0; display: block; overflow-x: auto; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td.best { background: var(--soft); font-weight: 600; }
.facts td { text-align: left; white-space: normal; } small { opacity: 0.7; display: block; }
.sure { font-weight: 600; } .note { opacity: 0.75; max-width: 60rem; }
figure { display: inline-block; margin: 0.3rem 1rem 0.8rem 0; }
figure img { width: 150px; height: 150px; object-fit: cover; }
figcaption { font-size: 0.85rem; } svg { width: 34rem; max-width: 100%; height: auto; background: #fff; }
"""


def html(report: Report) -> str:
    """The report as one HTML file: tables, differences, curves and pictures."""
    facts = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in report.facts())
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.summary["notes"])
    body = [f"<h1>Evaluation</h1><table class='facts'>{facts}</table>{notes}"]
    for number, model in enumerate(report.plan.models):
        body.append(f"<h2>{escape(model.label)}</h2>{_results_table(report, model)}{_dropped_list(report, model)}")
        body.append(_difference_tables(report, model))
        body.append(_curves(report, number))
        body.append(_pictures(report, number))
    body.append(_skipped(report))
    head = f'<meta charset="utf-8"><title>dave evaluate</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _dropped_list(report: Report, model: ModelEntry) -> str:
    rows = "".join(f"<li>{escape(where)}: {escape(what)}</li>" for where, what in dropped(report, model))
    return f"<details><summary>Left out</summary><ul>{rows}</ul></details>" if rows else ""


def _results_table(report: Report, model: ModelEntry) -> str:
    heads = "".join(_result_head(report, model, metric) for metric in report.plan.metrics)
    rows = []
    for method in report.plan.methods:
        cells = "".join(_result_cell(report, model, method.label, metric) for metric in report.plan.metrics)
        rows.append(f"<tr><td>{escape(method.label)}</td>{cells}</tr>")
    note = "Mean over n images (grids: over cells), and below it the bootstrap 95 % interval."
    return f'<p class="note">{note}</p><table><tr><th>method</th>{heads}</tr>{"".join(rows)}</table>'


def _counts(report: Report, model: ModelEntry, metric: MetricEntry) -> set[int]:
    """How many values the methods that have any have."""
    every = (report.result(model.label, method.label, metric.label)["n"] for method in report.plan.methods)
    return {count for count in every if count}


def _result_head(report: Report, model: ModelEntry, metric: MetricEntry) -> str:
    counts = _counts(report, model, metric)
    shared = f"<small>n = {counts.pop()}</small>" if len(counts) == 1 else ""
    return f'<th title="{escape(metric.create().summary)}">{escape(metric.label)} {arrow(metric)}{shared}</th>'


def _result_cell(report: Report, model: ModelEntry, method: str, metric: MetricEntry) -> str:
    one = report.result(model.label, method, metric.label)
    if one["mean"] is None:
        return "<td>-</td>"
    best = ' class="best"' if one["mean"] == report.best(model.label, metric) else ""
    own = f", n = {one['n']}" if len(_counts(report, model, metric)) > 1 else ""
    return f"<td{best}>{one['mean']:.3f}<small>{one['low']:.3f} to {one['high']:.3f}{own}</small></td>"


def _difference_tables(report: Report, model: ModelEntry) -> str:
    methods = [method.label for method in report.plan.methods]
    tables = []
    for metric in report.plan.metrics:
        found = {
            (one["first"], one["second"]): one
            for one in report.summary["differences"]
            if one["model"] == model.label and one["metric"] == metric.label and one["mean"] is not None
        }
        if found:
            tables.append(f"<h4>{escape(metric.label)} {arrow(metric)}</h4>{_matrix(methods, found)}")
    if not tables:
        return ""
    note = "Row minus column on the same images; bold where the 95 % interval of the difference leaves out zero."
    unfolded = " open" if len(methods) <= _FEW else ""
    shown = f"<details{unfolded}><summary>Tables</summary>{''.join(tables)}</details>"
    return f'<h3>Paired differences</h3><p class="note">{note}</p>{shown}'


def _matrix(methods: list[str], found: dict[tuple[str, str], dict[str, Any]]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in methods)
    rows = []
    for row in methods:
        cells = "".join(_difference_cell(found, row, column) for column in methods)
        rows.append(f"<tr><td>{escape(row)}</td>{cells}</tr>")
    return f"<table><tr><th></th>{heads}</tr>{''.join(rows)}</table>"


def _difference_cell(found: dict[tuple[str, str], dict[str, Any]], row: str, column: str) -> str:
    one, sign = (found.get((row, column)), 1) if (row, column) in found else (found.get((column, row)), -1)
    if one is None:
        return "<td></td>"
    low, high = sorted((sign * one["low"], sign * one["high"]))
    sure = ' class="sure"' if low > 0 or high < 0 else ""
    return f"<td{sure}>{sign * one['mean']:+.3f}<small>{low:+.3f} to {high:+.3f}</small></td>"


def _curves(report: Report, number: int) -> str:
    plots = []
    for entry in report.plan.metrics:
        table = report.collected[number].tables.get(entry.label)
        if table is not None and table.curves:
            ordered = {name: table.curves[name] for name in table.methods if name in table.curves}
            plots.append(curves_svg(ordered, axis=entry.create().axis, title=entry.label))
    return f"<h3>Curves</h3>{''.join(plots)}" if plots else ""


def _pictures(report: Report, number: int) -> str:
    rows = []
    for task, examples in report.examples[number]:
        figures = "".join(_figure(report, task, example) for example in examples)
        rows.append(f"<h4>{escape(report.plan.methods[task.method].label)}</h4>{figures}")
    if not rows:
        return ""
    metric = escape(example_metric(report.plan) or "")
    note = f"For each method, the images on which it scores best, in the middle and worst in {metric}."
    return f'<h3>Examples</h3><p class="note">{note} The object\'s region is outlined.</p>{"".join(rows)}'


def _figure(report: Report, task: Task, example: Example) -> str:
    sources = (
        f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(data).decode()}">'
        for data in picture(report.folder / task.file, example.image.index)
    )
    caption = f"{example.place}: {example.value:.3f}<br>{escape(example.image.name)}"
    return f"<figure>{''.join(sources)}<figcaption>{caption}</figcaption></figure>"


def _skipped(report: Report) -> str:
    rows = "".join(f"<li>{escape(one['image'])}: {escape(one['reason'])}</li>" for one in report.summary["skipped"])
    return f"<h2>Images that could not be read</h2><ul>{rows}</ul>" if rows else ""
