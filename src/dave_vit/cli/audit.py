"""`dave audit`: what a model relies on over a whole data set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dave_vit.cli.common import Output, command, command_line
from dave_vit.cli.diff import show_audit_changes
from dave_vit.cli.evaluate import EngineFlags
from dave_vit.cli.live_view import show_bars
from dave_vit.cli.options import Data, Out, Plugins, Seed, flag
from dave_vit.cli.preparation import PreparedModel
from dave_vit.cli.tables import rich_table

if TYPE_CHECKING:
    from dave_vit.audit import Audit, AuditOptions, Finding

app = command(
    "dave audit --model timm:deit_tiny_patch16_224 --data imagenet:ILSVRC --out audit",
    "dave audit --model timm:test_vit --weights mine.safetensors --data folder:photos --limit 1000 --out audit",
    "dave audit --model timm:deit_tiny_patch16_224 --against timm:deit_small_patch16_224 --data photos --out audit",
)


@dataclass(frozen=True)
class ClusterOptions:
    """How evidence is computed and clustered."""

    method: Annotated[str, flag("Method of the maps: {methods}.", metavar="NAME")] = "dave"
    samples: Annotated[int | None, flag("Samples of each map.", "--samples", "-n", min=1, metavar="N")] = None
    limit: Annotated[int | None, flag("Use the first N images.", min=1, metavar="N")] = None
    smallest: Annotated[int, flag("Images of a cluster at least.", min=6, metavar="N")] = 6
    cluster_by: Annotated[
        Literal["features", "maps"], flag("Cluster the model's features at the evidence, or the maps themselves.")
    ] = "features"
    batch: Annotated[int, flag("Images per forward pass.", min=1, metavar="N")] = 16


@dataclass(frozen=True)
class AgainstOptions:
    """A model to compare with."""

    against: Annotated[str | None, flag("Audit this model too, and print what changed from it.", metavar="SPEC")] = None
    against_weights: Annotated[str | None, flag("Local weights of --against.", metavar="FILE")] = None


@app.command()
def audit(
    *,
    context: typer.Context,
    model: PreparedModel,
    data: Data = "builtin",
    clusters: ClusterOptions,
    execution: EngineFlags,
    seed: Seed = 0,
    against: AgainstOptions,
    out: Out = Path("dave-audit"),
    plugins: Plugins,
    output: Output,
) -> None:
    """Find what a model relies on over a whole data set, and test it on the model.

    Maps of all images are computed, and the model's features at the evidence are clustered in each class. The evidence
    outside of the objects (all evidence where no boxes or masks are known) is then moved to images of other classes and
    removed from its own; a finding is confirmed only if the model follows it. The folder gets index.html, audit.md and
    audit.json. The same command on the same folder resumes where it was stopped.
    With --against, the other model's report is in the folder "against".
    """
    from dave_vit.audit import AuditOptions
    from dave_vit.evaluate import MethodEntry, ModelEntry

    classes = None if model.classes is None else str(model.classes)
    options = AuditOptions(
        ModelEntry(model.spec, model.weights, classes, model.prepare),
        data,
        MethodEntry(clusters.method, {} if clusters.samples is None else {"samples": clusters.samples}),
        clusters.limit,
        clusters.smallest,
        clusters.cluster_by,
        seed,
        clusters.batch,
        tuple(map(str, plugins.plugins or ())),
    )
    run = partial(_run, execution=execution, device=model.device, output=output, command=command_line(context))
    if against.against is not None:
        other = ModelEntry(against.against, against.against_weights, classes)
        run(replace(options, model=other), out / "against")
    result = run(options, out)
    rows = [_row(one) for one in result.findings if one.confirmed]
    caption = f"{len(rows)} of {len(result.findings)} clusters confirmed"
    output.print(rich_table(("class", "images", "where", "share", "effect"), rows, caption) if rows else caption)
    output.print(*(f"  {out / name}" for name in ("index.html", "audit.md", "audit.json")))
    record = {"findings": [one.record() for one in result.findings], "report": str(out / "index.html")}
    output.json(record | (show_audit_changes(out / "against", out, output) if against.against is not None else {}))


def _run(
    options: AuditOptions, out: Path, *, execution: EngineFlags, device: str, output: Output, command: str
) -> Audit:
    """Run an audit with progress bars."""
    from dave_vit.audit import run_audit
    from dave_vit.evaluate import create_engine

    engine = create_engine(execution.engine, device=device, workers=execution.workers, address=execution.address)
    with show_bars(Output(quiet=output.quiet or output.as_json)) as progress:
        return run_audit(options, out, engine=engine, threads=execution.threads, progress=progress, command=command)


def _row(finding: Finding) -> tuple[str, ...]:
    effect, low, high = finding.effect
    size, share = str(len(finding.members)), f"{finding.share:.0%}"
    return finding.class_name, size, finding.region, share, f"{effect:.2f} [{low:.2f}, {high:.2f}]"
