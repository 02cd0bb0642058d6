"""Figure 4 of the paper: what each step from the gradient to DAVE does to a map."""

from __future__ import annotations

from torch import Tensor, nn

from dave_vit.analysis.section import Picture, Section
from dave_vit.analysis.subjects import Pictures, Setting, load, pictures
from dave_vit.maps import collapse
from dave_vit.methods import create_method
from dave_vit.viz import Drawing, draw, image_cell, map_cell

STEPS = {
    "input x gradient": ("input_x_gradient", {}),
    "effective transformation": ("effective", {}),
    "equivariant": ("equivariant", {"preset": "paper"}),
    "DAVE, as in the paper": ("dave", {"preset": "paper"}),
    "DAVE, default": ("dave", {}),
}
_SAMPLED = ("equivariant", "dave")


def construction(model: nn.Module, inputs: Tensor, target: Tensor, *, samples: int, seed: int) -> dict[str, Tensor]:
    """Maps [B,H,W] of each step."""
    maps = {}
    for title, (name, options) in STEPS.items():
        draws = {"samples": samples, "seed": seed} if name in _SAMPLED else {}
        maps[title] = collapse(create_method(name, model, **options, **draws).attribute(inputs, target))
    return maps


def section(setting: Setting) -> Section:
    """One figure for each model of a setting."""
    made = []
    for number, entry in enumerate(setting.models):
        model = load(entry, setting.device)
        shown = pictures(model, setting)
        maps = construction(model, shown.inputs, shown.target, samples=setting.samples, seed=setting.seed)
        name = "construction" if number == 0 else f"construction-{number + 1}"
        caption = f"{entry.label}: positive part of the map, each over its own 99 % quantile."
        made.append(Picture(name, figure(shown, maps, show=setting.show), caption, is_plot=False))
    facts = setting.facts(images=len(setting.images) or setting.n, samples=setting.samples)
    text = (
        "From the gradient to DAVE. Freezing the operators removes their variation (effective transformation), the "
        "average over flips, turns and shifts removes what belongs to the patch grid (equivariant), and noise removes "
        "what does not survive it. The last column is this package's default, which also cuts what is within two "
        "standard errors of zero."
    )
    return Section("construction", "Progressive construction (figure 4)", text, facts, pictures=made)


def figure(shown: Pictures, maps: dict[str, Tensor], *, show: bool = True) -> Drawing:
    """A row for each picture, a column for each step."""
    rows = []
    for number, colours in enumerate(shown.colours):
        seen = [image_cell(colours, "picture")] if show else []
        rows.append(seen + [map_cell(column[number], title) for title, column in maps.items()])
    return draw(rows, labels=shown.titles, width=1.7)
