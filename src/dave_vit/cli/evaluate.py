"""`dave evaluate`: score methods on a data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dave_vit.cli.common import Output, command, command_line
from dave_vit.cli.live_view import show_bars, show_results
from dave_vit.cli.options import Data, MethodsOptions, Out, Plugins, Preset, explicit_options, flag
from dave_vit.cli.preparation import PreparedModel
from dave_vit.cli.tables import rich_table
from dave_vit.errors import DataError

if TYPE_CHECKING:
    from dave_vit.evaluate import Plan

app = command(
    "dave evaluate --metric all --methods dave,attn_lrp,legrad --limit 100 --out run",
    "dave evaluate --model timm:deit_tiny_patch16_224 --data imagenet:ILSVRC --methods all --out run",
    "dave evaluate --methods dave --set dave.rotation=0 --set deletion.protocol=official --smoothing mean",
    "dave evaluate --plan plan.yaml --engine ray --address auto --out run",
)


@dataclass(frozen=True)
class PlanSources:
    """Where settings come from besides flags."""

    file: Annotated[
        Path | None, flag("Settings from a .yaml or .toml file; flags replace them.", "--plan", metavar="FILE")
    ] = None
    overrides: Annotated[
        list[str] | None,
        flag(
            "An option of one method or metric, such as dave.rotation=0 or deletion.protocol=official; repeatable.",
            "--set",
            metavar="WHO.NAME=VALUE",
        ),
    ] = None


@dataclass(frozen=True)
class ScoredMethods(MethodsOptions):
    """Methods to score, and options that go to every method that takes them."""

    preset: Preset = None


@dataclass(frozen=True)
class PlanOptions:
    """Settings of a plan that are one flag each, under the plan's names; the plan has their defaults."""

    metrics: Annotated[
        str | None,
        flag(
            "Metrics with commas between, or all: {metrics}.",
            "--metric",
            "--metrics",
            metavar="A,B,...",
            show_default="plan.metrics",
        ),
    ] = None
    data: Data = "builtin"
    limit: Annotated[int | None, flag("Use the first N images.", min=1, metavar="N")] = None
    budget: Annotated[
        int | None,
        flag(
            "Forward passes per map, the same for all methods that draw samples or take steps.",
            min=1,
            metavar="PASSES",
            show_default="as each method has it",
        ),
    ] = None
    target: Annotated[
        str | None,
        flag(
            "Explain the image's label or the predicted class.", metavar="label|predicted", show_default="plan.target"
        ),
    ] = None
    min_confidence: Annotated[
        float | None,
        flag("Score only images that are classified correctly with more than this probability.", metavar="P"),
    ] = None
    batch: Annotated[int | None, flag("Images per forward pass.", min=1, show_default="plan.batch")] = None
    shard: Annotated[int | None, flag("Images per file of results.", min=1, show_default="plan.shard")] = None
    matched: Annotated[bool, flag("Score all maps once more, smoothed to the resolution of patches.", "--matched")] = (
        False
    )
    save_maps: Annotated[bool, flag("Keep the maps as well, in half precision.", "--save-maps")] = False


@dataclass(frozen=True)
class SmoothingOptions:
    """Smoothing of every map before it is scored."""

    kind: Annotated[
        str | None,
        flag(
            "Smooth every map before it is scored: none, mean, gaussian, patch or official.",
            "--smoothing",
            metavar="KIND",
            show_default="plan.smoothing.kind",
        ),
    ] = None
    smoothing_size: Annotated[
        int | None, flag("Side of the window in pixels; odd.", metavar="N", show_default="plan.smoothing.size")
    ] = None
    smoothing_sigma: Annotated[
        float | None, flag("Standard deviation of the Gaussian.", metavar="S", show_default="a sixth of the window")
    ] = None


@dataclass(frozen=True)
class EngineFlags:
    """Where tasks are computed, which is not part of a plan."""

    engine: Annotated[str, flag("Where tasks are computed: {engines}.", metavar="NAME")] = "local"
    address: Annotated[
        str | None, flag("Ray cluster.", metavar="ADDRESS", show_default="a cluster on this machine")
    ] = None
    workers: Annotated[
        int | None, flag("Number of processes.", min=1, max=1024, show_default="one per GPU, or one on the CPU")
    ] = None
    threads: Annotated[
        int | None,
        flag("Threads of each worker on the CPU.", min=1, max=1024, show_default="all cores, shared by workers"),
    ] = None


@dataclass(frozen=True)
class Execution(EngineFlags):
    """How a run is executed."""

    watch: Annotated[bool, flag("Show first results with their intervals while the run goes on.", "--watch")] = False
    allow_mixed: Annotated[
        bool, flag("Continue with other code, libraries or weights than the run was started with.", "--allow-mixed")
    ] = False


@app.command()
def evaluate(
    *,
    context: typer.Context,
    settings: PlanOptions,
    methods: ScoredMethods,
    sources: PlanSources,
    model: PreparedModel,
    smoothing: SmoothingOptions,
    execution: Execution,
    out: Out = Path("dave-run"),
    plugins: Plugins,
    output: Output,
) -> None:
    """Score methods on a data set: localisation, faithfulness, robustness.

    The folder gets rows/*.parquet (one row per method, metric and image), summary.json, report.md and report.html. The
    same command on the same folder resumes where it was stopped; several at once share the work. Images that cannot be
    read are left out and listed.
    """
    import torch

    from dave_vit.evaluate import Plan, create_engine

    flags = _flags(context, model, smoothing, (settings, methods, plugins))
    plan = Plan.load(sources.file, flags, sources.overrides or ())
    workers = execution.workers
    how = {
        "engine": create_engine(execution.engine, device=model.device, workers=workers, address=execution.address),
        "threads": execution.threads or max(1, torch.get_num_threads() // (workers or 1)),
        "allow_mixed": execution.allow_mixed,
        "command": command_line(context),
    }
    _run(plan, out, how, watch=execution.watch, output=output)


def _flags(
    context: typer.Context, model: PreparedModel, smoothing: SmoothingOptions, groups: Iterable[Any]
) -> dict[str, Any]:
    """Return what the command line says, by the names of the plan's settings."""
    from dave_vit.evaluate import ModelEntry

    names = {"names": "methods", "seed": "seeds"}
    flags = {names.get(name, name): value for one in groups for name, value in explicit_options(context, one).items()}
    if explicit_options(context, model).keys() - {"device", "memory"}:
        classes = None if model.classes is None else str(model.classes)
        flags["models"] = ModelEntry(model.spec, model.weights, classes, model.prepare)
    if smoothed := explicit_options(context, smoothing):
        flags["smoothing"] = {name.removeprefix("smoothing_"): value for name, value in smoothed.items()}
    return flags


def _run(plan: Plan, out: Path, how: dict[str, Any], *, watch: bool, output: Output) -> None:
    from dave_vit.evaluate import evaluate as run_plan
    from dave_vit.evaluate.statistics.summary import PartialResults

    partial = PartialResults(plan, out)
    quiet = Output(quiet=output.quiet or output.as_json)
    live = show_results(quiet, lambda: _tables(plan, partial.results(), sizes_in_cells=True))
    with live if watch else show_bars(quiet) as progress:
        summary = run_plan(plan, out, progress=progress, **how)
    failures = _describe_failures(summary["results"])
    for text in (*summary["notes"], *failures):
        output.note(text)
    if summary["skipped"]:
        output.note(f"{len(summary['skipped'])} images could not be read; {out / 'summary.json'} lists them")
    output.print(*_tables(plan, summary["results"], brief=len(plan.metrics) > 2))
    output.print(*(f"  {out / name}" for name in ("summary.json", "report.md", "report.html")))
    output.json(summary)
    if not any(one["n"] for one in summary["results"]):
        why = (*failures, *summary["notes"], "no image has what the metrics need")[0]
        raise DataError(f"nothing could be scored; {why}")


def _tables(plan: Plan, results: Sequence[Any], *, brief: bool = False, sizes_in_cells: bool = False) -> list[Any]:
    """Return a table of the results of each model; without intervals if brief."""
    from dave_vit.evaluate.statistics.summary import build_results_table

    models = dict.fromkeys(one["model"] for one in results)
    tables = [build_results_table(plan, results, model, sizes_in_cells=sizes_in_cells) for model in models]
    texts = [table.format(brief=brief) for table in tables]
    return [rich_table(text.head, text.rows, text.caption) for text in texts]


def _describe_failures(results: Iterable[dict[str, Any]]) -> list[str]:
    """Return the first reason of each method that has no score on a model."""
    reasons = {(one["method"], one["model"]): one["reasons"] for one in results if not one["n"] and one["reasons"]}
    return [f"{method} on {model}: {next(iter(own))}" for (method, model), own in reasons.items()]
