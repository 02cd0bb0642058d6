"""What is done to photographs before a model sees them, as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dave_vit.cli.options import ModelOptions
from dave_vit.errors import OptionError

if TYPE_CHECKING:
    from dave_vit.models import Prepare


@dataclass(frozen=True)
class PrepareOptions:
    """What is done to photographs before a model sees them."""

    fit: Annotated[
        Literal["crop", "pad", "squash", "tiles"] | None,
        typer.Option(
            "--fit",
            help="How photographs become the model's input: their middle, all of them with margins, all of them "
            "squashed, or tiles one by one.",
            show_default="the model's own",
        ),
    ] = None
    size: Annotated[
        int | None, typer.Option("--size", metavar="PIXELS", help="Side of the model's input.", show_default="its own")
    ] = None
    mean: Annotated[
        str | None,
        typer.Option("--mean", metavar="R,G,B", help="Subtracted from colours in 0 to 1.", show_default="its own"),
    ] = None
    std: Annotated[
        str | None, typer.Option("--std", metavar="R,G,B", help="Colours are divided by it.", show_default="its own")
    ] = None
    crop: Annotated[
        float | None,
        typer.Option(
            "--crop", metavar="SHARE", help="Of the photograph's shorter side that is seen.", show_default="its own"
        ),
    ] = None

    @property
    def prepare(self) -> Prepare | None:
        """What is said of the preprocessing, if anything."""
        from dave_vit.models import Prepare

        said = Prepare(self.size, _colours("mean", self.mean), _colours("std", self.std), self.crop, self.fit)
        return None if said == Prepare() else said


@dataclass(frozen=True)
class PreparedModel(PrepareOptions, ModelOptions):
    """One model, where it runs, and what is done to photographs before it sees them."""


def _colours(name: str, text: str | None) -> tuple[float, float, float] | None:
    """Three numbers, or one for all three colours."""
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
        red, green, blue = numbers * 3 if len(numbers) == 1 else numbers
    except ValueError as error:
        raise OptionError(f"--{name} {text}; expected three numbers such as 0.5,0.5,0.5, or one") from error
    return red, green, blue
