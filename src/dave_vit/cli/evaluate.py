"""`dave evaluate`: how good maps are, in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dave_vit.cli.common import Output, command, command_line, examples
from dave_vit.cli.live_view import bars, numbers
from dave_vit.cli.options import (
    Data,
    MethodsOptions,
    Out,
    Plugins,
    Preset,
    expand_groups,
    explicit_options,
)
from dave_vit.cli.preparation import PreparedModel
from dave_vit.errors import DataError

if TYPE_CHECKING:
    from rich.table import Table

    from dave_vit.evaluate import Plan
    from dave_vit.evaluate.engines import Engine

app = command()


@dataclass(frozen=True)
class ScoredMethods(MethodsOptions):
    """Methods to score, and options that go to every method that takes them."""

    preset: Preset = None


@dataclass(frozen=True)
class PlanOptions:
    """The settings of a plan that are one flag each, under the plan's names, and a file with all of them."""

    metrics: Annotated[
        str,
        typer.Option(
            "--metric",
            "--metrics",
            metavar="A,B,...",
            help="Metrics with commas between, or all: {metrics}.",
        ),
    ] = "gridpg,energypg,deletion"
    data: Data = "builtin"
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Use the first N images.")] = None
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget",
            min=1,
            metavar="PASSES",
            help="Forward passes of a map, alike for all methods that draw samples or take steps.",
            show_default="as each method has it",
        ),
    ] = None
    target: Annotated[
        Literal["label", "predicted"],
        typer.Option("--target", help="Explain the image's label or the predicted class."),
    ] = "label"
    min_confidence: Annotated[
        float | None,
        typer.Option(
            "--min-confidence", metavar="P", help="Only images classified correctly with more than this probability."
        ),
    ] = None
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images in one pass.")] = 32
    shard: Annotated[int, typer.Option("--shard", min=1, help="Images per file of results.")] = 32
    matched: Annotated[
        bool, typer.Option("--matched", help="Score all maps once more, smoothed to the resolution of patches.")
    ] = False
    save_maps: Annotated[bool, typer.Option("--save-maps", help="Keep the maps as well, in half precision.")] = False


@dataclass(frozen=True)
class PlanSources:
    """Where settings come from besides flags."""

    file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Settings from a .yaml or .toml file; flags replace them."),
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="WHO.NAME=VALUE",
            help="An option of one method or metric, such as dave.rotation=0 or deletion.protocol=official; "
            "repeatable.",
        ),
    ] = None


@dataclass(frozen=True)
class SmoothingOptions:
    """What is done to every map before it is scored."""

    kind: Annotated[
        Literal["none", "mean", "gaussian", "patch", "official"],
        typer.Option("--smoothing", help="Of every map before it is scored."),
    ] = "none"
    smoothing_size: Annotated[
        int, typer.Option("--smoothing-size", metavar="N", help="Side of the window in pixels; odd.")
    ] = 15
    smoothing_sigma: Annotated[
        float | None,
        typer.Option("--smoothing-sigma", metavar="S", help="Of the Gaussian.", show_default="a sixth of the window"),
    ] = None


@dataclass(frozen=True)
class Execution:
    """Where a run is executed, which is no part of its plan."""

    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="Engine that computes the tasks: {engines}.")
    ] = "local"
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="ADDRESS", help="Of a Ray cluster; one of this machine where it is left out."
        ),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, max=1024, help="Processes.", show_default="one per GPU, or one on the CPU"),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, max=1024, help="Of each worker on the CPU.", show_default="all cores, shared by workers"
        ),
    ] = None
    watch: Annotated[
        bool, typer.Option("--watch", help="Show first numbers with their intervals while the run goes on.")
    ] = False
    allow_mixed: Annotated[
        bool,
        typer.Option(
            "--allow-mixed", help="Go on with other code, libraries or weights than the folder was begun with."
        ),
    ] = False


@app.command(
    epilog=examples(
        "dave evaluate --metric all --methods dave,attn_lrp,legrad --limit 100 --out run",
        "dave evaluate --model timm:deit_tiny_patch16_224 --data imagenet:ILSVRC --methods all --out run",
        "dave evaluate --methods dave --set dave.rotation=0 --set deletion.protocol=official --smoothing mean",
        "dave evaluate --plan plan.yaml --engine ray --address auto --out run",
    )
)
@expand_groups
def evaluate(
    *,
    context: typer.Context,
    sources: PlanSources,
    settings: PlanOptions,
    methods: ScoredMethods,
    model: PreparedModel,
    smoothing: SmoothingOptions,
    execution: Execution,
    out: Out = Path("dave-run"),
    plugins: Plugins,
    output: Output,
) -> None:
    """Score methods on a data set: localisation, faithfulness, robustness.

    The folder gets rows/*.parquet (one row per method, metric and image), summary.json, report.md and report.html. The
    same command on the same folder goes on where it was stopped; several at once share the work. Images that cannot
    be read are left out and listed.
    """
    from dave_vit.evaluate import Plan

    flags = _flags(context, model, smoothing, (settings, methods, plugins))
    plan = Plan.load(sources.file, flags, sources.overrides or ())
    how = {"engine": _engine(execution, model.device), "threads": _threads(execution)}
    _run(
        plan,
        out,
        {**how, "allow_mixed": execution.allow_mixed, "command": command_line(context)},
        watched=execution.watch,
        output=output,
    )


def _flags(
    context: typer.Context, model: PreparedModel, smoothing: SmoothingOptions, groups: Iterable[Any]
) -> dict[str, Any]:
    """Return what the command line says, by the names of the plan's settings."""
    from dave_vit.evaluate import ModelEntry

    names = {"names": "methods", "seed": "seeds"}
    flags = {names.get(name, name): value for one in groups for name, value in explicit_options(context, one).items()}
    if explicit_options(context, model).keys() - {"device"}:
        classes = None if model.classes is None else str(model.classes)
        flags["models"] = ModelEntry(model.spec, model.weights, classes, model.prepare)
    if smoothed := explicit_options(context, smoothing):
        flags["smoothing"] = {name.removeprefix("smoothing_"): value for name, value in smoothed.items()}
    return flags


def _engine(execution: Execution, device: str) -> Engine:
    from dave_vit.evaluate import create_engine

    return create_engine(execution.engine, device=device, workers=execution.workers, address=execution.address)


def _threads(execution: Execution) -> int:
    import torch

    return execution.threads or max(1, torch.get_num_threads() // (execution.workers or 1))


def _run(plan: Plan, out: Path, how: dict[str, Any], *, watched: bool, output: Output) -> None:
    from dave_vit.evaluate import evaluate as run_plan
    from dave_vit.evaluate.progress import PartialResults

    show = Output(quiet=output.quiet or output.as_json)
    with numbers(show, PartialResults(plan, out).results) if watched else bars(show) as watch:
        summary = run_plan(plan, out, progress=watch, **how)
    failures = list(_failures(summary))
    for text in (*summary["notes"], *failures):
        output.note(text)
    if summary["skipped"]:
        output.note(f"{len(summary['skipped'])} images could not be read; {out / 'summary.json'} lists them")
    output.print(*(_table(plan, summary, model.label) for model in plan.models))
    output.print(*(f"  {out / name}" for name in ("summary.json", "report.md", "report.html")))
    output.json(summary)
    if not any(one["n"] for one in summary["results"]):
        why = (*failures, *summary["notes"], "no image has what the metrics need")[0]
        raise DataError(f"nothing could be scored; {why}")


def _failures(summary: dict[str, Any]) -> Iterator[str]:
    """Methods that gave nothing on a model, each once."""
    told = set()
    for one in summary["results"]:
        who = (one["model"], one["method"])
        if not one["n"] and one["reasons"] and who not in told:
            told.add(who)
            yield f"{one['method']} on {one['model']}: {next(iter(one['reasons']))}"


def _table(plan: Plan, summary: dict[str, Any], model: str) -> Table:
    """Means, and their intervals where there is room."""
    from rich.table import Table

    labels = [metric.label for metric in plan.metrics]
    found = {(one["method"], one["metric"]): one for one in summary["results"] if one["model"] == model}
    table = Table("method", *labels, "n", "passes", "s per map", box=None, title=model, title_justify="left")
    for method in plan.methods:
        own = [found[method.label, label] for label in labels]
        counts = dict.fromkeys(str(one["n"]) for one in own)
        cost = own[-1]  # grids, whose cells share their passes, come first in tables
        spent = ("-", "-") if cost["passes"] is None else (f"{cost['passes']:.3g}", f"{cost['map_seconds']:.3g}")
        table.add_row(method.label, *(_cell(one, brief=len(labels) > 2) for one in own), " / ".join(counts), *spent)
    return table


def _cell(one: dict[str, Any], *, brief: bool) -> str:
    from dave_vit.viz.pages import format_estimate

    words = format_estimate(one["mean"], one["low"], one["high"])
    return words.partition(" ")[0] if brief else words
