"""`dave evaluate`: how good maps are, in numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dave_vit.cli.common import (
    Classes,
    Device,
    Json,
    Out,
    Output,
    Preset,
    Progress,
    Quiet,
    Samples,
    Weights,
    command,
    examples,
)
from dave_vit.errors import DataError, OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from dave_vit.bench import Plan
    from dave_vit.bench.engines import Engine

app = command()

_FLAGS = {"data": "builtin", "metrics": "gridpg,energypg,deletion", "methods": "dave", "models": "builtin"}

Metrics = Annotated[
    str | None,
    typer.Option(
        "--metric",
        "--metrics",
        metavar="A,B,...",
        help="gridpg, energypg, pointing, deletion, insertion, consistency, sanity, or all.",
        show_default=_FLAGS["metrics"],
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        metavar="A,B,...",
        help="Names of `dave methods`, with commas between, or all.",
        show_default=_FLAGS["methods"],
    ),
]
Models = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="SPEC",
        help="builtin, timm:NAME (or just NAME), hf:NAME_OR_FOLDER, torchvision:NAME, openclip:NAME or bcos:NAME.",
        show_default=_FLAGS["models"],
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="SPEC",
        help="builtin, builtin:pair, imagenet:DIR, folder:DIR, coco:DIR or voc:DIR.",
        show_default=_FLAGS["data"],
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Use the first N images.")]
Seeds = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same result.", show_default="0")]
Switches = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="WHO.NAME=VALUE",
        help="An option of one method or metric, such as dave.rotation=0 or deletion.protocol=official; repeatable.",
    ),
]
SmoothingKind = Annotated[
    Literal["none", "mean", "gaussian", "official"] | None,
    typer.Option("--smoothing", help="Of every map before it is scored.", show_default="none"),
]
SmoothingSize = Annotated[
    int | None,
    typer.Option("--smoothing-size", metavar="N", help="Side of the window in pixels; odd.", show_default="15"),
]
SmoothingSigma = Annotated[
    float | None,
    typer.Option("--smoothing-sigma", metavar="S", help="Of the Gaussian.", show_default="a sixth of the window"),
]
Explained = Annotated[
    Literal["label", "predicted"] | None,
    typer.Option("--target", help="Explain the image's label or the predicted class.", show_default="label"),
]
MinConfidence = Annotated[
    float | None,
    typer.Option(
        "--min-confidence", metavar="P", help="Only images classified correctly with more than this probability."
    ),
]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Images in one pass.", show_default="32")]
Shard = Annotated[int | None, typer.Option("--shard", min=1, help="Images per file of results.", show_default="32")]
SaveMaps = Annotated[bool, typer.Option("--save-maps", help="Keep the maps as well, in half precision.")]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="Settings from a .yaml or .toml file; flags change them.")
]
EngineName = Annotated[Literal["local", "ray"], typer.Option("--engine", help="This machine, or a Ray cluster.")]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="ADDRESS", help="Of a Ray cluster; one of this machine where it is left out."),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Processes.", show_default="one per GPU, or one on the CPU")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Of each worker on the CPU.", show_default="all cores, shared by workers"),
]


@app.command(
    epilog=examples(
        "dave evaluate --metric all --methods dave,attn_lrp,legrad --limit 100 --out run",
        "dave evaluate --model timm:deit_tiny_patch16_224 --data imagenet:ILSVRC --methods all --out run",
        "dave evaluate --methods dave --set dave.rotation=0 --set deletion.protocol=official --smoothing mean",
        "dave evaluate --plan plan.yaml --engine ray --address auto --out run",
    )
)
def evaluate(
    metrics: Metrics = None,
    methods: Methods = None,
    model: Models = None,
    weights: Weights = None,
    classes: Classes = None,
    data: Data = None,
    limit: Limit = None,
    samples: Samples = None,
    preset: Preset = None,
    seed: Seeds = None,
    switches: Switches = None,
    smoothing: SmoothingKind = None,
    smoothing_size: SmoothingSize = None,
    smoothing_sigma: SmoothingSigma = None,
    target: Explained = None,
    min_confidence: MinConfidence = None,
    batch: Batch = None,
    shard: Shard = None,
    save_maps: SaveMaps = False,
    plan: PlanFile = None,
    out: Out = Path("dave-run"),
    engine: EngineName = "local",
    address: Address = None,
    device: Device = "auto",
    workers: Workers = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score methods on a data set: localisation, faithfulness, robustness.

    The folder gets rows/*.parquet (one row per method, metric and image), summary.json, report.md and report.html. The
    same command on the same folder goes on where it was stopped; several at once share the work. Images that cannot
    be read are left out and listed.
    """
    given = {
        "data": data,
        "limit": limit,
        "seeds": seed,
        "target": target,
        "min_confidence": min_confidence,
        "batch": batch,
        "shard": shard,
        "save_maps": save_maps or None,
    }
    smooth = {"kind": smoothing, "size": smoothing_size, "sigma": smoothing_sigma}
    entries = {"models": _model(model, weights, classes), "methods": methods, "metrics": metrics}
    made = _plan(plan, {**given, **entries}, _present(smooth), samples, preset, switches or [])
    _run(made, out, _engine(engine, address, device, workers), _threads(threads, workers), as_json=as_json, quiet=quiet)


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _model(spec: str | None, weights: str | None, classes: Path | None) -> dict[str, Any] | None:
    given = _present({"spec": spec, "weights": weights, "classes": str(classes) if classes else None})
    return given or None


def _plan(
    file: Path | None,
    given: dict[str, Any],
    smoothing: dict[str, Any],
    samples: int | None,
    preset: str | None,
    switches: list[str],
) -> Plan:
    """The plan of the flags, over that of the file, over the defaults."""
    from dave_vit.bench import make_plan, read_plan
    from dave_vit.methods import METHODS
    from dave_vit.metrics import METRICS

    settings: dict[str, Any] = {**_FLAGS, **(read_plan(file) if file else {}), **_present(given)}
    if isinstance(settings["models"], dict):
        settings["models"] = {"spec": _FLAGS["models"], **settings["models"]}
    if smoothing:
        before = settings.get("smoothing", {})
        settings["smoothing"] = {**(before if isinstance(before, dict) else {"kind": before}), **smoothing}
    options = _switches(switches)
    common = _present({"samples": samples, "preset": preset})
    settings["methods"] = [_method(entry, common, options) for entry in _names(settings["methods"], list(METHODS))]
    settings["metrics"] = [_entry("metric", entry, options) for entry in _names(settings["metrics"], list(METRICS))]
    for who in options:
        raise OptionError(f"--set {who}.{next(iter(options[who]))}: {who!r} is no method and no metric of this run")
    return make_plan(settings)


def _names(value: Any, every: list[str]) -> list[Any]:
    """Entries of a plan, or names with commas between; "all" is every one."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, list | tuple) else [value]
    if value.strip() == "all":
        return every
    return list(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))


def _switches(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Options by who takes them."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        where, equals, value = text.partition("=")
        who, dot, name = where.partition(".")
        if not equals or not dot:
            raise OptionError(f"--set {text}; expected WHO.NAME=VALUE, such as dave.rotation=0")
        try:
            parsed = json.loads(value)
        except ValueError:  # a word
            parsed = value.strip()
        found.setdefault(who.strip(), {})[name.strip()] = parsed
    return found


def _entry(main: str, value: Any, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A table of a plan with the options of the flags taken out of ``options`` and put in."""
    table = dict(value) if isinstance(value, dict) else {main: value}
    own = options.pop(str(table.get("label") or table.get(main)), {})
    return {**table, "options": {**table.get("options", {}), **own}}


def _method(value: Any, common: dict[str, Any], options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A method's table; samples and preset go to the methods that take them."""
    import inspect

    from dave_vit.methods import METHODS

    table = _entry("method", value, options)
    known = inspect.signature(METHODS[str(table.get("method"))]).parameters
    fitting = {name: given for name, given in common.items() if name in known}
    return {**table, "options": {**fitting, **table["options"]}}


def _engine(name: str, address: str | None, device: str, workers: int | None) -> Engine:
    from dave_vit.bench import create_engine

    return create_engine(name, device=device, workers=workers, address=address)


def _threads(threads: int | None, workers: int | None) -> int:
    import torch

    return threads or max(1, torch.get_num_threads() // (workers or 1))


def _run(plan: Plan, out: Path, engine: Engine, threads: int, *, as_json: bool, quiet: bool) -> None:
    from dave_vit.bench import evaluate as run_plan

    output = Output(as_json=as_json, quiet=quiet)
    with _watching(Output(quiet=quiet or as_json)) as watch:
        summary = run_plan(plan, out, engine=engine, threads=threads, watch=watch)
    for text in (*summary["notes"], *_failures(summary)):
        output.note(text)
    if summary["skipped"]:
        output.note(f"{len(summary['skipped'])} images could not be read; {out / 'summary.json'} lists them")
    output.print(*(_table(plan, summary, model.label) for model in plan.models))
    output.print(*(f"  {out / name}" for name in ("summary.json", "report.md", "report.html")))
    output.json(summary)
    if not any(one["n"] for one in summary["results"]):
        raise DataError("nothing could be scored; see the notes above")


def _failures(summary: dict[str, Any]) -> Iterator[str]:
    """Methods that gave nothing on a model, each once."""
    told = set()
    for one in summary["results"]:
        who = (one["model"], one["method"])
        if not one["n"] and one["reasons"] and who not in told:
            told.add(who)
            yield f"{one['method']} on {one['model']}: {next(iter(one['reasons']))}"


@contextmanager
def _watching(output: Output) -> Iterator[Any]:
    """What a run tells of its progress becomes a bar for each of its phases."""
    with ExitStack() as stack:
        phase: list[tuple[str, Progress, float]] = []

        def watch(what: str, done: int, total: int, before: int) -> None:
            if not phase or phase[-1][0] != what:
                stack.close()  # the bar of the phase before
                phase.append((what, stack.enter_context(output.progress(total - before, what)), time.monotonic()))
            _, bar, started = phase[-1]
            now = max(done - before, 0)
            rate = now / max(time.monotonic() - started, 1e-6)
            bar.update(done=now, text=f"{what}: {done} of {total}, {rate:.3g} a second")

        yield watch


def _table(plan: Plan, summary: dict[str, Any], model: str) -> Table:
    """Means, and their intervals where there is room."""
    from rich.table import Table

    labels = [metric.label for metric in plan.metrics]
    found = {(one["method"], one["metric"]): one for one in summary["results"] if one["model"] == model}
    table = Table("method", *labels, box=None, title=model, title_justify="left")
    for method in plan.methods:
        cells = [_cell(found[method.label, label], brief=len(labels) > 2) for label in labels]
        table.add_row(method.label, *cells)
    return table


def _cell(one: dict[str, Any], *, brief: bool) -> str:
    from dave_vit.report import estimate_words

    words = estimate_words(one["mean"], one["low"], one["high"])
    return words.partition(" ")[0] if brief else words
