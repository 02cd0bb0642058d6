"""`dave analyze`: the analyses behind the paper's figures, one subcommand each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dave_vit.cli.common import Device, Json, Out, Output, Quiet, Seed, Weights, command, examples

if TYPE_CHECKING:
    from dave_vit.analysis.section import Section
    from dave_vit.analysis.subjects import Setting

app = command(
    help="Analyses behind the paper's figures: each writes a figure, its numbers (CSV) and a record (JSON).",
    epilog=examples(
        "dave analyze convergence --n 8 --samples 64",
        "dave analyze rotation --model timm:deit_tiny_patch16_224 --data imagenet:ILSVRC --n 100",
        "dave analyze construction cat.jpg dog.jpg",
    ),
)

Models = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", metavar="SPEC", help="As of `dave explain`; repeatable.", show_default="builtin"),
]
Data = Annotated[str, typer.Option("--data", metavar="SPEC", help="Pictures: builtin, imagenet:DIR, folder:DIR ...")]
Count = Annotated[int, typer.Option("--n", min=1, metavar="N", help="Pictures.")]
Samples = Annotated[int, typer.Option("--samples", min=1, metavar="N", help="Views of each picture.")]
Images = Annotated[
    list[str] | None, typer.Argument(metavar="IMAGE", help="Files instead of --data.", show_default=False)
]
Method = Annotated[str, typer.Option("--method", metavar="NAME", help="One of `dave methods`, or dave-paper.")]
Tolerance = Annotated[float, typer.Option("--tolerance", help="Change of probability that is still called small.")]
OUT = Path("dave-analysis")


@app.command()
def convergence(
    model: Models = None,
    weights: Weights = None,
    data: Data = "builtin",
    n: Count = 4,
    samples: Annotated[int, typer.Option("--samples", min=2, metavar="T", help="Followed one by one.")] = 128,
    reference: Annotated[int, typer.Option("--reference", min=1, help="Samples of the long run.")] = 256,
    preset: Annotated[str, typer.Option("--preset", help="Neighbourhood: paper, default or official.")] = "paper",
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = OUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How many samples are worth it: steps of the average, and the error of every estimator against a long run."""
    from dave_vit.analysis import convergence as analysis

    setting = _setting(model, weights, data, n, samples, seed, device)
    found = analysis.section(setting, samples=samples, reference=reference, preset=preset)
    _finish(found, out, as_json=as_json, quiet=quiet)


@app.command()
def rotation(
    model: Models = None,
    weights: Weights = None,
    data: Data = "builtin",
    n: Count = 16,
    step: Annotated[float, typer.Option("--step", min=1, max=90, help="Degrees between angles.")] = 10,
    tolerance: Tolerance = 0.1,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = OUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How the probability changes when pictures are turned, and the interval in which it hardly does."""
    import numpy as np

    from dave_vit.analysis.sensitivity import rotation_section

    angles = [*(-np.arange(step, 180 + step / 2, step)[::-1]), *np.arange(0, 180 + step / 2, step)]
    setting = _setting(model, weights, data, n, 1, seed, device)
    found = rotation_section(setting, angles=[float(angle) for angle in angles], tolerance=tolerance)
    _finish(found, out, as_json=as_json, quiet=quiet)


@app.command()
def noise(
    model: Models = None,
    weights: Weights = None,
    data: Data = "builtin",
    n: Count = 16,
    step: Annotated[float, typer.Option("--step", min=0.01, max=2, help="Between levels of noise.")] = 0.1,
    tolerance: Tolerance = 0.1,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = OUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How the probability changes under additive noise, and the level up to which it hardly does."""
    import numpy as np

    from dave_vit.analysis.sensitivity import noise_section

    sigmas = np.arange(0, 2 + step / 2, step).round(4).tolist()
    setting = _setting(model, weights, data, n, 1, seed, device)
    _finish(noise_section(setting, sigmas=sigmas, tolerance=tolerance), out, as_json=as_json, quiet=quiet)


@app.command()
def construction(
    images: Images = None,
    model: Models = None,
    weights: Weights = None,
    data: Data = "builtin",
    n: Count = 3,
    samples: Samples = 50,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = OUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What each step from the gradient to DAVE does to a map (figure 4)."""
    from dave_vit.analysis import construction as analysis

    setting = _setting(model, weights, data, n, samples, seed, device, images)
    _finish(analysis.section(setting), out, as_json=as_json, quiet=quiet)


@app.command()
def toy(
    gain: Annotated[float, typer.Option("--gain", help="Of queries and keys.")] = 2.5,
    size: Annotated[float, typer.Option("--step", help="Length of the step, relative to the input.")] = 0.02,
    seed: Seed = 0,
    out: Out = OUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """A layer whose derivative is mostly the variation of its own operator (figure 3)."""
    from dave_vit.analysis import toy as analysis

    _finish(analysis.section(seed=seed, gain=gain, size=size), out, as_json=as_json, quiet=quiet)


@app.command()
def consistency(
    images: Images = None,
    methods: Annotated[
        str, typer.Option("--methods", metavar="A,B,...", help="Names of `dave methods`, or dave-paper.")
    ] = "dave,dave-paper,attn_lrp,legrad",
    model: Models = None,
    weights: Weights = None,
    data: Data = "builtin",
    n: Count = 6,
    samples: Samples = 50,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = OUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Whether the map of a slightly moved picture is the moved map (figure 2)."""
    from dave_vit.analysis import consistency as analysis

    setting = _setting(model, weights, data, n, samples, seed, device, images)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    _finish(analysis.section(setting, names), out, as_json=as_json, quiet=quiet)


@app.command()
def classes(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="CLASS", help="Names or indices.", show_default=False)
    ] = None,
    method: Method = "dave",
    model: Models = None,
    weights: Weights = None,
    data: Data = "builtin",
    n: Count = 4,
    samples: Samples = 50,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = OUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Several pictures of one class and their maps, to see what recurs."""
    from dave_vit.analysis import classes as analysis

    setting = _setting(model, weights, data, n, samples, seed, device)
    _finish(analysis.section(setting, names or (), method), out, as_json=as_json, quiet=quiet)


@app.command()
def models(
    images: Images = None,
    method: Method = "dave",
    model: Models = None,
    weights: Weights = None,
    data: Data = "builtin",
    n: Count = 3,
    samples: Samples = 50,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = OUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The same pictures through several models; builtin and builtin-bcos where none is named."""
    from dave_vit.analysis import models as analysis

    setting = _setting(model or ["builtin", "builtin-bcos"], weights, data, n, samples, seed, device, images)
    _finish(analysis.section(setting, method), out, as_json=as_json, quiet=quiet)


@app.command()
def cost(
    model: Models = None,
    weights: Weights = None,
    data: Data = "builtin",
    samples: Annotated[str, typer.Option("--samples", metavar="A,B,...", help="At which cost is measured.")] = "4,8,16",
    depths: Annotated[
        str, typer.Option("--depths", metavar="A,B,...", help="Layers of the measured models.")
    ] = "3,6,12",
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = OUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time and memory of each method beside one forward pass, over samples and depth (table 3)."""
    from dave_vit.analysis import cost as analysis

    setting = _setting(model, weights, data, 1, 1, seed, device)
    found = analysis.section(setting, samples=_numbers("--samples", samples), depths=_numbers("--depths", depths))
    _finish(found, out, as_json=as_json, quiet=quiet)


def _numbers(flag: str, text: str) -> list[int]:
    from dave_vit.errors import OptionError

    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise OptionError(f"{flag} {text}; expected whole numbers with commas between, such as 4,8,16") from error
    if len(found) < 2 or found[0] < 1:
        raise OptionError(f"{flag} {text}; expected two or more different numbers, 1 or above")
    return found


def _setting(
    specs: list[str] | None,
    weights: str | None,
    data: str,
    n: int,
    samples: int,
    seed: int,
    device: str,
    images: list[str] | None = None,
) -> Setting:
    """What is analysed."""
    from dave_vit.analysis.subjects import Setting
    from dave_vit.bench import ModelEntry
    from dave_vit.cli.common import pick_device
    from dave_vit.data.images import find_images
    from dave_vit.errors import OptionError

    named = specs or ["builtin"]
    if weights is not None and len(named) > 1:
        raise OptionError("--weights belongs to one --model; give exactly one")
    entries = tuple(ModelEntry(spec, weights, label=spec.rpartition(":")[2]) for spec in named)
    files = tuple(find_images(images or []))
    return Setting(entries, data, files, n, samples, seed, pick_device(device))


def _finish(found: Section, out: Path, **how: Any) -> None:
    """Writes files, and tells what was found."""
    from rich.table import Table

    output = Output(**how)
    files = found.write(out)
    output.print(found.title, found.text)
    for table in found.tables:
        shown = Table(*table.head, box=None, title=table.caption or None, title_justify="left")
        for row in table.rows:
            shown.add_row(*row)
        output.print(shown)
    output.print(*(f"  {path}" for path in files))
    output.json({**found.record(), "files": [str(path) for path in files]})
