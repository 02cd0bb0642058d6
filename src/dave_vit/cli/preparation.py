"""Preprocessing options of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from dave_vit.cli.options import ModelOptions, flag
from dave_vit.errors import OptionError

if TYPE_CHECKING:
    from dave_vit.models import Prepare


@dataclass(frozen=True)
class PrepareOptions:
    """Preprocessing that replaces the model's own."""

    fit: Annotated[
        Literal["crop", "pad", "squash", "tiles"] | None,
        flag(
            "Fit photographs into the model's input: crop the middle, pad to show all, squash all, or explain "
            "tiles one by one.",
            show_default="the model's",
        ),
    ] = None
    size: Annotated[int | None, flag("Side of the model's input.", metavar="PIXELS", show_default="the model's")] = None
    mean: Annotated[
        str | None, flag("Mean that is subtracted from colours in 0 to 1.", metavar="R,G,B", show_default="the model's")
    ] = None
    std: Annotated[
        str | None, flag("Standard deviation that colours are divided by.", metavar="R,G,B", show_default="the model's")
    ] = None
    crop: Annotated[
        float | None,
        flag("Share of the photograph's shorter side that is shown.", metavar="SHARE", show_default="the model's"),
    ] = None

    @property
    def prepare(self) -> Prepare | None:
        """The preprocessing that replaces the model's own, if any."""
        from dave_vit.models import Prepare

        prepare = Prepare(
            self.size, _parse_colour("mean", self.mean), _parse_colour("std", self.std), self.crop, self.fit
        )
        return None if prepare == Prepare() else prepare


@dataclass(frozen=True)
class PreparedModel(PrepareOptions, ModelOptions):
    """One model, its device and its preprocessing."""


def _parse_colour(name: str, text: str | None) -> tuple[float, float, float] | None:
    """Parse three numbers, or one for all three colours."""
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
        red, green, blue = numbers * 3 if len(numbers) == 1 else numbers
    except ValueError as error:
        raise OptionError(f"--{name} {text}; expected three numbers such as 0.5,0.5,0.5, or one") from error
    return red, green, blue
