"""`dave evaluate`: score methods on a data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dave_vit.cli.common import Output, command, command_line, rich_table, show_bars
from dave_vit.cli.options import Data, MethodsOptions, ModelOptions, OptionGroup, Out, Plugins, Preset, option
from dave_vit.errors import DataError

if TYPE_CHECKING:
    from dave_vit.evaluate import Plan
    from dave_vit.evaluate.engines import Engine


class PlanSources(OptionGroup):
    """Where settings come from besides flags."""

    file: Path | None = option("--plan FILE", "Settings from a .yaml or .toml file; flags replace them.")
    overrides: list[str] | None = option(
        "--set WHO.NAME=VALUE",
        "An option of one method or metric, such as dave.rotation=0 or deletion.protocol=official; repeatable.",
    )


class ScoredMethods(MethodsOptions):
    """Methods to score, and options that go to every method that takes them."""

    preset: Preset = None


class PlanOptions(OptionGroup):
    """Settings of a plan that are one flag each, under the plan's names; the plan has their defaults."""

    metrics: str | None = option(
        "--metric --metrics A,B,...", "Metrics separated by commas, or all: {metrics}.", "plan.metrics"
    )
    data: Data = "builtin"
    limit: int | None = option("--limit N", "Use the first N images.", min=1)
    budget: int | None = option(
        "--budget PASSES",
        "Forward passes per map, the same for all methods that draw samples or take steps.",
        "as each method has it",
        min=1,
    )
    target: str | None = option(
        "--target label|predicted", "Explain the image's label or the predicted class.", "plan.target"
    )
    min_confidence: float | None = option(
        "--min-confidence P", "Score only images that are classified correctly with more than this probability."
    )
    batch: int | None = option("--batch", "Images per forward pass.", "plan.batch", min=1)
    shard: int | None = option("--shard", "Images per file of results.", "plan.shard", min=1)
    matched: bool = option("--matched", "Also score all maps smoothed to the resolution of patches.", default=False)
    save_maps: bool = option("--save-maps", "Keep the maps as well, in half precision.", default=False)


class SmoothingOptions(OptionGroup):
    """Smoothing of every map before it is scored."""

    kind: str | None = option(
        "--smoothing KIND",
        "Smooth every map before it is scored: none, mean, gaussian, patch or official.",
        "plan.smoothing.kind",
    )
    smoothing_size: int | None = option(
        "--smoothing-size N", "Side of the window in pixels; odd.", "plan.smoothing.size"
    )
    smoothing_sigma: float | None = option(
        "--smoothing-sigma S", "Standard deviation of the Gaussian.", "a sixth of the window"
    )


class EngineFlags(OptionGroup):
    """Where tasks are computed, which is not part of a plan."""

    engine: str = option("--engine NAME", "Where tasks are computed: {engines}.", default="local")
    address: str | None = option("--address ADDRESS", "Ray cluster.", "a cluster on this machine")
    workers: int | None = option("--workers", "Number of processes.", "one per GPU, or one on the CPU", min=1, max=1024)
    threads: int | None = option(
        "--threads", "Threads of each worker on the CPU.", "all cores, shared by workers", min=1, max=1024
    )

    def create(self, device: str) -> Engine:
        """Create the engine."""
        from dave_vit.evaluate import create_engine

        return create_engine(self.engine, device=device, workers=self.workers, address=self.address)


class Execution(EngineFlags):
    """How a run is executed."""

    allow_mixed: bool = option(
        "--allow-mixed", "Continue with other code, libraries or weights than the run was started with.", default=False
    )


@command(
    "dave evaluate --metric all --methods dave,attn_lrp,legrad --limit 100 --out run",
    "dave evaluate --model timm:deit_tiny_patch16_224 --data imagenet:ILSVRC --methods all --out run",
    "dave evaluate --methods dave --set dave.rotation=0 --set deletion.protocol=official --smoothing mean",
    "dave evaluate --plan plan.yaml --engine ray --address auto --out run",
)
def evaluate(
    *,
    context: typer.Context,
    settings: PlanOptions,
    methods: ScoredMethods,
    sources: PlanSources,
    model: ModelOptions,
    smoothing: SmoothingOptions,
    execution: Execution,
    out: Out = Path("dave-run"),
    plugins: Plugins = None,
    output: Output,
) -> None:
    """Score methods on a data set: localisation, faithfulness, robustness.

    The folder gets rows/*.parquet (one row per method, metric and image), summary.json, report.md and report.html. The
    same command on the same folder resumes where it was stopped; several at once share the work. Images that cannot be
    read are left out and listed.
    """
    import torch

    from dave_vit.evaluate import Plan

    flags = _flags(context, model, smoothing, (settings, methods)) | ({"plugins": plugins} if plugins else {})
    plan = Plan.load(sources.file, flags, sources.overrides or ())
    how = {
        "engine": execution.create(model.device),
        "threads": execution.threads or max(1, torch.get_num_threads() // (execution.workers or 1)),
        "allow_mixed": execution.allow_mixed,
        "command": command_line(context),
    }
    _run(plan, out, how, output=output)


def _flags(
    context: typer.Context, model: ModelOptions, smoothing: SmoothingOptions, groups: Iterable[OptionGroup]
) -> dict[str, Any]:
    """Return what the command line says, by the names of the plan's settings."""
    names = {"names": "methods", "seed": "seeds"}
    flags = {names.get(name, name): value for one in groups for name, value in one.explicit(context).items()}
    if model.explicit(context).keys() - {"device", "memory"}:
        flags["models"] = model.entry
    if smoothed := smoothing.explicit(context):
        flags["smoothing"] = {name.removeprefix("smoothing_"): value for name, value in smoothed.items()}
    return flags


def _run(plan: Plan, out: Path, how: dict[str, Any], *, output: Output) -> None:
    from dave_vit.evaluate import evaluate as run_plan

    with show_bars(Output(quiet=output.quiet or output.as_json)) as progress:
        summary = run_plan(plan, out, progress=progress, **how)
    unscored = [one for one in summary["results"] if not one["n"] and one["reasons"]]
    reasons = {(one["method"], one["model"]): next(iter(one["reasons"])) for one in unscored}
    failures = [f"{method} on {model}: {reason}" for (method, model), reason in reasons.items()]
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


def _tables(plan: Plan, results: Sequence[Any], *, brief: bool = False) -> list[Any]:
    """Return a table of the results of each model; without intervals if brief."""
    from dave_vit.evaluate.statistics.summary import build_results_table

    models = dict.fromkeys(one["model"] for one in results)
    tables = [build_results_table(plan, results, model).format(brief=brief) for model in models]
    return [rich_table(table.head, table.rows, table.caption) for table in tables]
