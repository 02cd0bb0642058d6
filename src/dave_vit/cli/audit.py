"""`dave audit`: what a model relies on over a whole data set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from dave_vit.cli.common import Output, command, command_line, rich_table, show_bars
from dave_vit.cli.diff import show_audit_changes
from dave_vit.cli.evaluate import EngineFlags
from dave_vit.cli.options import Data, ModelOptions, OptionGroup, Out, Plugins, Seed, option

if TYPE_CHECKING:
    from dave_vit.audit import Finding


class ClusterOptions(OptionGroup):
    """How evidence is computed and clustered."""

    method: str = option("--method NAME", "Method of the maps: {methods}.", default="dave")
    samples: int | None = option("--samples -n N", "Samples of each map.", min=1)
    limit: int | None = option("--limit N", "Use the first N images.", min=1)
    smallest: int = option("--smallest N", "Images of a cluster at least.", min=6, default=6)
    cluster_by: Literal["features", "maps"] = option(
        "--cluster-by", "Cluster the model's features at the evidence, or the maps themselves.", default="features"
    )
    batch: int = option("--batch N", "Images per forward pass.", min=1, default=16)


class AgainstOptions(OptionGroup):
    """A model to compare with."""

    against: str | None = option("--against SPEC", "Audit this model too, and print what changed from it.")
    against_weights: str | None = option("--against-weights FILE", "Local weights of --against.")


@command(
    "dave audit --model timm:deit_tiny_patch16_224 --data imagenet:ILSVRC --out audit",
    "dave audit --model timm:test_vit --weights mine.safetensors --data folder:photos --limit 1000 --out audit",
    "dave audit --model timm:deit_tiny_patch16_224 --against timm:deit_small_patch16_224 --data photos --out audit",
)
def audit(
    *,
    context: typer.Context,
    model: ModelOptions,
    data: Data = "builtin",
    clusters: ClusterOptions,
    execution: EngineFlags,
    seed: Seed = 0,
    against: AgainstOptions,
    out: Out = Path("dave-audit"),
    plugins: Plugins = None,
    output: Output,
) -> None:
    """Find what a model relies on over a whole data set, and test it on the model.

    Maps of all images are computed, and the model's features at the evidence are clustered in each class. The evidence
    outside of the objects (all evidence where no boxes or masks are known) is then moved to images of other classes and
    removed from its own; a finding is confirmed only if the model follows it. The folder gets index.html, audit.md and
    audit.json. The same command on the same folder resumes where it was stopped.
    With --against, the other model's report is in the folder "against".
    """
    from dave_vit.audit import AuditOptions, run_audit
    from dave_vit.evaluate import MethodEntry, ModelEntry

    chosen = dict(vars(clusters))
    samples = chosen.pop("samples")
    method = MethodEntry(chosen.pop("method"), {} if samples is None else {"samples": samples})
    options = AuditOptions(model.entry, data, method, seed=seed, plugins=tuple(plugins or ()), **chosen)
    audits = {out: options}
    if against.against is not None:
        other = ModelEntry(against.against, against.against_weights, model.classes)
        audits = {out / "against": replace(options, model=other), **audits}
    how: dict[str, Any] = {"threads": execution.threads, "command": command_line(context)}
    for folder, one in audits.items():
        with show_bars(Output(quiet=output.quiet or output.as_json)) as progress:
            result = run_audit(one, folder, engine=execution.create(model.device), progress=progress, **how)
    rows = [_row(one) for one in result.findings if one.confirmed]
    caption = f"{len(rows)} of {len(result.findings)} clusters confirmed"
    output.print(rich_table(("class", "images", "where", "share", "effect"), rows, caption) if rows else caption)
    output.print(*(f"  {out / name}" for name in ("index.html", "audit.md", "audit.json")))
    record = {"findings": [one.record() for one in result.findings], "report": str(out / "index.html")}
    output.json(record | (show_audit_changes(out / "against", out, output) if against.against is not None else {}))


def _row(finding: Finding) -> tuple[str, ...]:
    effect, low, high = finding.effect
    size, share = str(len(finding.members)), f"{finding.share:.0%}"
    return finding.class_name, size, finding.region, share, f"{effect:.2f} [{low:.2f}, {high:.2f}]"
