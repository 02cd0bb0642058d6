"""`dave doctor`: check whether a model is explained exactly."""

from typing import Annotated, Any

from dave_vit.cli.common import Output, command
from dave_vit.cli.options import Json, ModelOptions, Plugins, Seed, flag
from dave_vit.errors import UnsupportedOperator

_ON_CPU = ModelOptions(device="cpu")


@command(
    "dave doctor",
    "dave doctor --model timm:vit_base_patch16_224",
    "dave doctor --model timm:swin_tiny_patch4_window7_224 --weights random",
    "dave doctor --model deit_tiny_patch16_224 --weights mine.safetensors --json",
)
def doctor(
    *,
    model: ModelOptions = _ON_CPU,
    image: Annotated[str | None, flag("--image FILE", "Check with this image.", "noise")] = None,
    seed: Seed = 0,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Check whether a model is explained exactly.

    Three things must hold. The logit equals what the image contributes plus what biases, positions and tokens
    contribute. What is taken for a constant is the same for other images. With all operators held fixed, the logit of
    another image differs by what the map says. Exits with 2 and the reason where the model holds a function that has
    no exact rule. `--weights random` needs no download.
    """
    from dave_vit.checks.doctor import diagnose, example_inputs
    from dave_vit.data.images import read_image

    output = Output(as_json=as_json)
    loaded, inputs = example_inputs(model.load(), None if image is None else read_image(image).image, seed=seed)
    facts: dict[str, Any] = {"model": loaded.spec, "input": list(inputs.shape), "classes": len(loaded.class_names)}
    try:
        diagnosis = diagnose(loaded, inputs)
    except UnsupportedOperator as error:
        output.json({**facts, "supported": False, "verdict": str(error)})
        raise
    facts |= _facts(diagnosis)
    output.print(*(f"{name:14s}{value}" for name, value in _lines(facts)))
    output.json({**facts, "supported": diagnosis.exact, "verdict": diagnosis.verdict})
    output.print("", diagnosis.verdict)
    if not diagnosis.exact:
        raise UnsupportedOperator(f"{loaded.spec}: {diagnosis.verdict}")


def _facts(diagnosis: Any) -> dict[str, Any]:
    from dave_vit.engine.observation import TokenLayout

    grid = diagnosis.layout if isinstance(diagnosis.layout, TokenLayout) else None
    return {
        "dtype": str(diagnosis.dtype).removeprefix("torch."),
        "gap": diagnosis.gap,
        "forward_difference": diagnosis.forward,
        "changing_constant": diagnosis.changing_constant or None,
        **{name: getattr(diagnosis, name) for name in ("replay_gap", "logit", "image_part", "constants", "functions")},
        "token_grid": list(grid.grid) if grid else None,
        "prefix_tokens": grid.prefix if grid else None,
        "token_note": None if grid else diagnosis.layout,
    }


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    counts = sorted(facts["functions"].items(), key=lambda item: -item[1])
    grid, prefix, changing = facts["token_grid"], facts["prefix_tokens"], facts["changing_constant"]
    constants = f"but one of {changing} changes with the image" if changing else "the same for every image tried"
    return [
        ("model", f"{facts['model']}, {facts['classes']} classes, input {'x'.join(map(str, facts['input']))}"),
        ("gap", f"{facts['gap']:.1e} ({facts['dtype']})"),
        ("forward", f"differs by {facts['forward_difference']:.1e} from the plain forward pass"),
        ("constants", f"{facts['constants']}, {constants}"),
        ("replay", _describe_replay(facts["replay_gap"])),
        ("tokens", f"{grid[0]} x {grid[1]} patches, {prefix} before them" if grid else facts["token_note"]),
        ("functions", ", ".join(f"{name} {count}" for name, count in counts)),
    ]


def _describe_replay(difference: float | None) -> str:
    if difference is None:
        return "not replayed: the model writes in place in a way that cannot be traced"
    return f"differs by {difference:.1e} from the map, for another image with all operators held fixed"
