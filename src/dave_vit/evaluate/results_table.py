"""The table of results that the terminal, the live view, Markdown, HTML and the paper's report show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import MetricEntry
from dave_vit.evaluate.statistics.summary import Result, format_sample_size, select_cost_metric
from dave_vit.viz.report_section import Column, DetailedTable, TableCell, estimate_cell


def build_results_table(
    plan: Plan, results: Sequence[Result], model: str, *, sizes_in_cells: bool = False
) -> DetailedTable:
    """Return the results of a model: a row per method; a column more is a line more here.

    Args:
        plan: the plan of the run.
        results: results as in ``summary.json``.
        model: label of the model.
        sizes_in_cells: show the number of scores in each cell, also if it is the same in the whole column.
    """
    by_key = {(one["method"], one["metric"]): one for one in results if one["model"] == model}
    methods = [entry.label for entry in plan.methods]
    cost_metric = select_cost_metric(plan.metrics)
    costs = [by_key[method, cost_metric] for method in methods]
    source = cost_metric if len(plan.metrics) > 1 else ""

    def metric_column(entry: MetricEntry) -> Column:
        own, tooltip = [by_key[method, entry.label] for method in methods], entry.create().summary
        return build_metric_column(format_title(entry), own, tooltip=tooltip, sizes_in_cells=sizes_in_cells)

    columns = [
        Column("method", [TableCell(method) for method in methods]),
        *map(metric_column, plan.metrics),
        Column("passes per map", [_number_cell(one["passes"]) for one in costs], source),
        Column("seconds per map", [_number_cell(one["map_seconds"]) for one in costs], source),
    ]
    return DetailedTable(columns, model)


def build_metric_column(
    title: str,
    results: Sequence[Result],
    *,
    scale: float = 1.0,
    digits: int = 3,
    note: Callable[[Result], str] = lambda result: "",
    tooltip: str = "",
    sizes_in_cells: bool = False,
) -> Column:
    """Return a column of means with their intervals, in which the best mean is marked.

    Args:
        title: head of the column.
        results: one for each row.
        scale: factor of all numbers, such as 100 for per cent.
        digits: digits after the decimal point.
        note: text after the interval of a result.
        tooltip: what the metric measures.
        sizes_in_cells: see `build_results_table`.
    """
    means = [one["mean"] for one in results if one["mean"] is not None]
    best = (max if results[0]["higher_is_better"] else min)(means, default=None)
    sizes = [format_sample_size(one) for one in results]
    shared = sizes[0] if len(set(sizes)) == 1 and not sizes_in_cells else ""
    cells = []
    for result, size in zip(results, sizes, strict=True):
        numbers = [None if result[name] is None else scale * result[name] for name in ("mean", "low", "high")]
        extra = ("" if shared else f" ({size})") + ("" if result["mean"] is None else note(result))
        cells.append(estimate_cell(*numbers, digits=digits, note=extra, is_best=result["mean"] == best is not None))
    return Column(title, cells, shared, tooltip)


def format_title(entry: MetricEntry) -> str:
    """Return the label of a metric with an arrow in the direction of better scores."""
    return f"{entry.label} {'↑' if entry.create().higher_is_better else '↓'}"


def _number_cell(value: float | None) -> TableCell:
    return TableCell("-" if value is None else f"{value:.3g}")
