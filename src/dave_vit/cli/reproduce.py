"""`dave reproduce`: the paper's tables and figures by one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dave_vit.cli.common import Output, command, examples
from dave_vit.cli.options import Device, Json, Out, Quiet, Seed, Weights, pick_device
from dave_vit.errors import OptionError

if TYPE_CHECKING:
    from dave_vit.analysis.paper.reproduce import Options
    from dave_vit.analysis.paper.suites import Suite

app = command()

Name = Annotated[
    Literal["builtin", "paper"],
    typer.Argument(help="builtin: embedded models and pictures, offline; paper: the published checkpoints."),
]
Quick = Annotated[bool, typer.Option("--quick", help="A five-minute version with few pictures and samples.")]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="SPEC", help="imagenet:DIR, folder:DIR, ...; the suite paper needs one."),
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", metavar="SPEC", help="Instead of the suite's models; repeatable."),
]
Probe = Annotated[
    str | None,
    typer.Option("--probe", metavar="FILE", help="Of the suite paper: DINO with the head that `dave probe` trained."),
]
Samples = Annotated[
    int | None, typer.Option("--samples", "-n", min=1, metavar="N", help="Samples of each map, instead of the suite's.")
]
Grids = Annotated[int | None, typer.Option("--grids", min=1, metavar="N", help="Grids, instead of the suite's.")]
Images = Annotated[
    int | None, typer.Option("--images", min=1, metavar="N", help="Pictures that are scored, instead of the suite's.")
]

Show = Annotated[
    bool,
    typer.Option("--pictures/--no-pictures", help="Show the data's pictures beside their maps in figures."),
]


@app.command(
    epilog=examples(
        "dave reproduce builtin --quick --out reproduction",
        "dave reproduce paper --data imagenet:ILSVRC --probe dino.safetensors --out reproduction",
        "dave reproduce paper --quick --model timm:deit_tiny_patch16_224 --weights FILE --data imagenet:DIR",
    )
)
def reproduce(
    name: Name,
    quick: Quick = False,
    data: Data = None,
    model: Models = None,
    weights: Weights = None,
    probe: Probe = None,
    samples: Samples = None,
    grids: Grids = None,
    images: Images = None,
    seed: Seed = 0,
    device: Device = "auto",
    show: Show = True,
    out: Out = Path("dave-reproduction"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make every table and figure of the paper, or the same from the embedded models.

    The folder gets report.html (one file, needs no other), report.md, figures/ (PNG and SVG), tables/ (CSV) and runs/
    (what is needed to resume). The same command on the same folder goes on where it was stopped.
    """
    from dave_vit.analysis.paper.reproduce import Options

    output = Output(as_json=as_json, quiet=quiet)
    suite = _suite(
        name, model or [], weights, probe, data, {"samples": samples, "grids": grids, "pictures": images}, quick=quick
    )
    for note in suite.notes:
        output.note(note)
    given: dict[str, Any] = {
        "--data": data,
        "--weights": weights,
        "--probe": probe,
        "--samples": samples,
        "--grids": grids,
    }
    given |= {"--images": images, "--seed": seed or None, "--out": out}
    text = _command(name, model or [], given, quick=quick, show=show)
    records = _run(suite, Options(out, text, pick_device(device), show, seed), output)
    output.print(*(f"  {record['seconds']:7.1f} s  {record['title']}" for record in records))
    output.print(f"  {out / 'report.html'}", f"  {out / 'report.md'}")
    output.json({"suite": name, "command": text, "sections": records})


def _run(suite: Suite, options: Options, output: Output) -> list[dict[str, Any]]:
    """The suite under a progress bar."""
    from dataclasses import replace

    from dave_vit.analysis.paper.reproduce import reproduce as run_suite

    with output.progress(1, "loading the models") as bar:

        def tell(number: int, count: int, section: str) -> None:
            bar.update(done=number / count, text=section)

        def watch(what: str, done: int, total: int, before: int) -> None:
            bar.update(text=f"{what}: {done} of {total}")

        return run_suite(suite, replace(options, tell=tell, watch=watch))


def _suite(
    name: str,
    specs: list[str],
    weights: str | None,
    probe: str | None,
    data: str | None,
    counts: dict[str, Any],
    *,
    quick: bool,
) -> Suite:
    """The suite of the flags."""
    from dataclasses import replace

    from dave_vit.analysis.paper.suites import read_suite, with_counts, with_models, with_probe
    from dave_vit.bench import ModelEntry

    if weights is not None and len(specs) != 1:
        raise OptionError("--weights belongs to one --model; give exactly one")
    suite = read_suite(name, quick=quick)
    if specs:
        suite = with_models(suite, [ModelEntry(spec, weights, label=spec.rpartition(":")[2]) for spec in specs])
    suite = with_counts(with_probe(suite, probe), counts)
    return replace(suite, data=data) if data else suite


def _command(name: str, specs: list[str], given: dict[str, Any], *, quick: bool, show: bool) -> str:
    """The command as captions tell it: without folders, which say nothing to a reader."""
    words = ["dave", "reproduce", name, *(["--quick"] if quick else []), *([] if show else ["--no-pictures"])]
    for spec in specs:
        words += ["--model", spec]
    for flag, value in given.items():
        if value is not None:
            kind, colon, rest = str(value).partition(":")
            words += [flag, f"{kind}{colon}{Path(rest).name}" if colon else Path(kind).name]
    return " ".join(words)
