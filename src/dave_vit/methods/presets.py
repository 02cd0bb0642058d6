"""DAVE's presets: the paper's text, the authors' public code, and what measured best here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from dave_vit.errors import OptionError
from dave_vit.intercept import RuleSet
from dave_vit.maps import official_postprocess
from dave_vit.models.traits import traits_of
from dave_vit.neighborhood import Neighborhood, Noise, Spatial
from dave_vit.reduce import Mean, Reducer, SoftThreshold, TrimmedMean
from dave_vit.registry import Registry
from dave_vit.rules import EFFECTIVE, OFFICIAL_GATE


@dataclass(frozen=True)
class Preset:
    """All choices that the method leaves open, taken together."""

    neighborhood: Neighborhood
    reducer: Reducer
    rules: RuleSet = EFFECTIVE
    postprocess: Callable[[Tensor], Tensor] | None = None

    def switched(self, switches: dict[str, Any]) -> Preset:
        """This preset with single switches of its neighbourhood set otherwise."""
        spatial, noise, around = self.neighborhood.spatial, self.neighborhood.noise, self.neighborhood
        for name, value in switches.items():
            if name in SPATIAL_SWITCHES:
                spatial = replace(spatial, **{name: value})
            elif name in NOISE_SWITCHES:
                noise = replace(noise, **{NOISE_SWITCHES[name]: value})
            elif name in AROUND_SWITCHES:
                around = replace(around, **{name: value})
            else:
                known = ", ".join((*SPATIAL_SWITCHES, *NOISE_SWITCHES, *AROUND_SWITCHES))
                raise OptionError(f"DAVE has no option {name!r}; its neighbourhood has: {known}")
        return replace(self, neighborhood=replace(around, spatial=spatial, noise=noise))


SPATIAL_SWITCHES = ("flip", "rotation", "scale", "translation", "wrap")
NOISE_SWITCHES = {"noise": "kind", "noise_level": "level", "schedule": "schedule"}
AROUND_SWITCHES = ("noise_first", "pull_back", "antithetic", "fill")

PRESETS: Registry[Callable[[nn.Module], Preset]] = Registry("preset")

# Noise levels of the authors' configuration files; other models get the middle one.
OFFICIAL_LEVELS = {
    "deit3_base": 0.9,
    "deit3_small": 0.5,
    "deit_base": 0.7,
    "deit_small": 0.5,
    "vit_base": 0.3,
    "vit_small": 0.1,
}


def _noise(model: nn.Module, level: float, schedule: Literal["uniform", "linspace"] = "uniform") -> Noise:
    # A model may know better: B-cos networks take additive noise (appendix D.2).
    return traits_of(model).noise or Noise("variance_preserving", level, schedule)


@PRESETS.register("default")
def default(model: nn.Module) -> Preset:
    """What measured best on GridPG and EnergyPG without losing to the paper's setting on deletion."""
    return Preset(Neighborhood(Spatial(), _noise(model, 0.3), fill=traits_of(model).fill), SoftThreshold(2.0))


@PRESETS.register("paper")
def paper(model: nn.Module) -> Preset:
    """The paper's text (section 3, appendix D.2)."""
    return Preset(Neighborhood(Spatial(), _noise(model, 0.5), fill=traits_of(model).fill), Mean())


@PRESETS.register("official")
def official(model: nn.Module) -> Preset:
    """The authors' public code, where it differs from the text."""
    name = str((getattr(model, "default_cfg", None) or {}).get("architecture", ""))
    level = next((value for prefix, value in OFFICIAL_LEVELS.items() if name.startswith(prefix)), 0.5)
    neighborhood = Neighborhood(
        Spatial(scale=(0.9, 1.1), wrap=False),
        _noise(model, level, "linspace"),
        noise_first=False,
        pull_back="adjoint",
        fill=traits_of(model).fill,
    )
    return Preset(neighborhood, TrimmedMean(), OFFICIAL_GATE, official_postprocess)
