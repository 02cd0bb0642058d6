"""`dave reproduce`: the paper's tables and figures by one command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dave_vit.cli.common import Output, command
from dave_vit.cli.options import ModelsOptions, OptionGroup, Out, Seed, flag, option, pick_device

if TYPE_CHECKING:
    from dave_vit.analysis.paper.suites import ReproduceOptions, Suite


Name = Annotated[
    Literal["builtin", "paper"],
    typer.Argument(help="builtin: embedded models and pictures, offline; paper: the published checkpoints."),
]
Show = Annotated[bool, flag("--pictures/--no-pictures", "Show the data's pictures beside their maps in figures.")]


class SuiteModels(ModelsOptions):
    """Models instead of the suite's own."""

    specs: list[str] | None = option("--model -m SPEC", "Instead of the suite's models; repeatable.")
    probe: str | None = option("--probe FILE", "Of the suite paper: DINO with the head that `dave probe` trained.")


class Amount(OptionGroup):
    """How much is computed, instead of what the suite says."""

    quick: bool = option("--quick", "A short version with few pictures and samples.", default=False)
    samples: int | None = option("--samples -n N", "Samples of each map, instead of the suite's.", min=1)
    grids: int | None = option("--grids N", "Grids, instead of the suite's.", min=1)
    images: int | None = option("--images N", "Pictures that are scored, instead of the suite's.", min=1)


@command(
    "dave reproduce builtin --quick --out reproduction",
    "dave reproduce paper --data imagenet:ILSVRC --probe dino.safetensors --out reproduction",
    "dave reproduce paper --quick --model timm:deit_tiny_patch16_224 --weights FILE --data imagenet:DIR",
)
def reproduce(
    *,
    name: Name,
    amount: Amount,
    data: Annotated[str | None, flag("--data SPEC", "{data}; the suite paper needs one.")] = None,
    models: SuiteModels,
    seed: Seed = 0,
    show: Show = True,
    out: Out = Path("dave-reproduction"),
    output: Output,
) -> None:
    """Make every table and figure of the paper, or the same from the embedded models.

    The folder gets report.html (one file, needs no other), report.md, figures/ (PNG and SVG), tables/ (CSV) and runs/
    (what is needed to resume). The same command on the same folder resumes where it was stopped.
    """
    from dave_vit.analysis.paper.suites import ReproduceOptions

    suite = _build_suite(name, amount, data, models)
    for note in suite.notes:
        output.note(note)
    flags: dict[str, Any] = {"--data": data, "--weights": models.weights, "--probe": models.probe}
    flags |= {"--samples": amount.samples, "--grids": amount.grids, "--images": amount.images}
    flags |= {"--seed": seed or None, "--out": out}
    text = _format_command(name, models.specs or [], flags, quick=amount.quick, show=show)
    records = _run(suite, ReproduceOptions(out, text, pick_device(models.device), show, seed), output)
    output.print(*(f"  {record['seconds']:7.1f} s  {record['title']}" for record in records))
    output.print(f"  {out / 'report.html'}", f"  {out / 'report.md'}")
    output.json({"suite": name, "command": text, "sections": records})


def _run(suite: Suite, options: ReproduceOptions, output: Output) -> list[dict[str, Any]]:
    """Run the suite under a progress bar."""
    from dave_vit.analysis.paper.reproduce import reproduce as run_suite

    with output.progress(1, "loading the models") as update:

        def on_section(number: int, count: int, section: str) -> None:
            update(completed=number / count, description=section)

        def progress(what: str, done: int, total: int, before: int) -> None:
            update(description=f"{what}: {done} of {total}")

        return run_suite(suite, replace(options, on_section=on_section, progress=progress))


def _build_suite(name: str, amount: Amount, data: str | None, models: SuiteModels) -> Suite:
    """Return the suite that the flags describe."""
    from dave_vit.analysis.paper.suites import read_suite, with_counts, with_models, with_probe

    entries = models.entries()
    suite = read_suite(name, quick=amount.quick)
    suite = with_probe(with_models(suite, entries) if entries else suite, models.probe)
    suite = with_counts(suite, {"samples": amount.samples, "grids": amount.grids, "pictures": amount.images})
    return replace(suite, data=data) if data else suite


def _format_command(name: str, specs: list[str], flags: dict[str, Any], *, quick: bool, show: bool) -> str:
    """Return the command for captions, without folders, which mean nothing to a reader."""
    words = ["dave", "reproduce", name, *(["--quick"] if quick else []), *([] if show else ["--no-pictures"])]
    for spec in specs:
        words += ["--model", spec]
    for name, value in flags.items():
        if value is not None:
            kind, colon, rest = str(value).partition(":")
            words += [name, f"{kind}{colon}{Path(rest).name}" if colon else Path(kind).name]
    return " ".join(words)
