"""Presets of DAVE: the recommended default, the paper's text, and the authors' public code."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from dave_vit._internal.registry import Registry
from dave_vit.engine import EFFECTIVE, RuleSet
from dave_vit.engine.observation import find_patch_side
from dave_vit.engine.rule_sets import OFFICIAL_GATE, RELEVANCE
from dave_vit.errors import OptionError
from dave_vit.maps import official_postprocess
from dave_vit.models.adapter import traits_of
from dave_vit.neighborhood import Neighborhood, Noise, Spatial
from dave_vit.neighborhood.views import Schedule
from dave_vit.reduce import Mean, Reducer, Sharpened, Significant, SoftThreshold, TrimmedMean

Against = Literal["rivals", "none"]


@dataclass(frozen=True)
class Preset:
    """All choices that the method leaves open, taken together.

    Attributes:
        neighborhood: where views are drawn.
        reducer: how samples become one map.
        rules: the derivatives that are averaged.
        postprocess: of the map, where the method prescribes one.
        samples: views of each image, or the largest number of them with samples="auto".
        narrower: neighbourhoods to draw from where views leave what the model knows, the widest first.
        weighted: whether a view counts by the probability of the class on it.
        against: "rivals" sets classes against their rivals where the model's classes compete.
    """

    neighborhood: Neighborhood
    reducer: Reducer
    rules: RuleSet = EFFECTIVE
    postprocess: Callable[[Tensor], Tensor] | None = None
    samples: int = 50
    narrower: tuple[Neighborhood, ...] = ()
    weighted: bool = False
    against: Against = "none"

    def with_switches(self, switches: Mapping[str, Any]) -> Preset:
        """Change single switches of the neighbourhood; there are no narrower ones then."""
        if not switches:
            return self
        fields: dict[type, dict[str, Any]] = {Spatial: {}, Noise: {}, Neighborhood: {}}
        for name, value in switches.items():
            if name not in SWITCHES:
                raise OptionError(f"DAVE has no option {name!r}; its neighbourhood has: {', '.join(SWITCHES)}")
            holder, field = SWITCHES[name]
            fields[holder][field] = value
        old = self.neighborhood
        spatial, noise = replace(old.spatial, **fields[Spatial]), replace(old.noise, **fields[Noise])
        changed = replace(old, spatial=spatial, noise=noise, **fields[Neighborhood])
        return replace(self, neighborhood=changed, narrower=())


NOISE_SWITCHES = {"noise": "kind", "noise_level": "level", "schedule": "schedule"}
SWITCHES: dict[str, tuple[type, str]] = {
    **{name: (Spatial, name) for name in ("flip", "rotation", "scale", "translation", "wrap")},
    **{name: (Noise, field) for name, field in NOISE_SWITCHES.items()},
    **{name: (Neighborhood, name) for name in ("noise_first", "pull_back", "antithetic", "fill")},
}
"""Switches of the neighbourhood by name: the class and the field that each one sets."""

PRESETS: Registry[Callable[[nn.Module], Preset]] = Registry("preset")

# Noise levels of the authors' configuration files; other models get the middle one, as deit_small and deit3_small.
OFFICIAL_LEVELS = {"deit3_base": 0.9, "deit_base": 0.7, "vit_base": 0.3, "vit_small": 0.1}
_RECOMMENDED = 0.3  # the level of variance-preserving noise that a model's own noise stands for


def load_preset(name: str, model: nn.Module) -> Preset:
    """Return a preset by its name, or from a TOML file.

    A file has ``base``, a preset's name; ``samples``; and under ``[neighborhood]`` any switches of it.
    """
    if not name.endswith(".toml"):
        return PRESETS[name](model)
    path = Path(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise OptionError(f"preset {path}: {why}; give a preset's name, or a file that dave tune wrote") from error
    unknown = table.keys() - {"base", "samples", "neighborhood"}
    if unknown or not isinstance(table.get("neighborhood", {}), dict):
        raise OptionError(f"preset {path}: expected base, samples and [neighborhood], not {', '.join(sorted(unknown))}")
    around = table.get("neighborhood", {}).items()
    switches = {name: tuple(value) if isinstance(value, list) else value for name, value in around}
    base = PRESETS[str(table.get("base", "default"))](model).with_switches(switches)
    samples = table.get("samples", base.samples)
    if not isinstance(samples, int) or samples < 1:
        raise OptionError(f"preset {path}: samples is {samples!r}; it must be at least 1")
    return replace(base, samples=samples)


def neighborhood_levels(model: nn.Module, *levels: tuple[float, float, float]) -> tuple[Neighborhood, ...]:
    """Return neighbourhoods of a model from rotation in degrees, shift in sides and t of variance-preserving noise."""
    return tuple(
        Neighborhood(Spatial(rotation=rotation, translation=shift), scale_noise(model, t), fill=traits_of(model).fill)
        for rotation, shift, t in levels
    )


def scale_noise(model: nn.Module, t: float) -> Noise:
    """Return noise up to t, or as much of a model's own noise: B-cos networks take additive noise (appendix D.2)."""
    own = traits_of(model).noise
    return Noise("variance_preserving", t) if own is None else replace(own, level=own.level * t / _RECOMMENDED)


LEVELS = ((10.0, 0.1, 0.05), (0.0, 0.03, 0.05), (0.0, 0.03, 0.0))
"""Of the default, from wide to narrow: rotation, shift, noise."""


@PRESETS.register("default")
def default(model: nn.Module) -> Preset:
    """The best preset over five metrics and six models; docs/decisions/default-recipe.md says how it was chosen."""
    widest, *narrower = neighborhood_levels(model, *LEVELS)
    chosen = Preset(widest, Sharpened(patch=_patch_side(model)), RELEVANCE, samples=20, narrower=tuple(narrower))
    return replace(chosen, weighted=True, against="rivals")


@PRESETS.register("exact")
def exact(model: nn.Module) -> Preset:
    """The default's views with the exact linear map instead of relevance, and nothing but the views."""
    return replace(default(model), rules=EFFECTIVE, reducer=Significant(patch=_patch_side(model)), samples=28)


def _patch_side(model: nn.Module) -> float:
    return traits_of(model).patch or find_patch_side(model) or Significant.patch


@PRESETS.register("threshold")
def threshold(model: nn.Module) -> Preset:
    """The paper's views with less noise, and a threshold at two standard errors."""
    return Preset(_paper_views(model, 0.3), SoftThreshold(2.0))


@PRESETS.register("paper")
def paper(model: nn.Module) -> Preset:
    """The paper's text (section 3, appendix D.2)."""
    return Preset(_paper_views(model, 0.5), Mean())


@PRESETS.register("official")
def official(model: nn.Module) -> Preset:
    """The authors' public code, where it differs from the text."""
    name = str((getattr(model, "default_cfg", None) or {}).get("architecture", ""))
    level = next((value for prefix, value in OFFICIAL_LEVELS.items() if name.startswith(prefix)), 0.5)
    spatial = Spatial(scale=(0.9, 1.1), wrap=False)
    views = _paper_views(model, level, "linspace", spatial=spatial, noise_first=False, pull_back="adjoint")
    return Preset(views, TrimmedMean(), OFFICIAL_GATE, official_postprocess)


def _paper_views(model: nn.Module, level: float, schedule: Schedule = "uniform", **options: Any) -> Neighborhood:
    # A model may know better: B-cos networks take additive noise (appendix D.2).
    noise = traits_of(model).noise or Noise("variance_preserving", level, schedule)
    return Neighborhood(noise=noise, fill=traits_of(model).fill, **options)
