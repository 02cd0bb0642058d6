"""All there is to choose from, read off the registries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import get_args

from matplotlib.colors import to_hex

from dave_vit._version import __version__
from dave_vit.methods import METHODS
from dave_vit.methods.presets import PRESETS
from dave_vit.models import Adapter
from dave_vit.models.domain import domain_advice
from dave_vit.models.text_generation import TextGenerator
from dave_vit.neighborhood.noise import NoiseKind
from dave_vit.reduce import REDUCERS
from dave_vit.viz import COLORMAPS
from dave_vit.web.explaining import Served, takes
from dave_vit.web.images import EXAMPLES, PHOTOS
from dave_vit.web.schema import Info, Limits, MethodCard, ModelCard, PresetCard


def info(models: Sequence[Served], limits: Limits, seed: int) -> Info:
    """What the page needs to know before anything is asked for."""
    return Info(
        version=__version__,
        models=[_model(served) for served in models],
        methods=[_method(name) for name in sorted(METHODS, key=lambda name: name != "dave")],
        reducers=list(REDUCERS),
        noises=list(get_args(NoiseKind)),
        limits=limits,
        seed=seed,
        colormaps={name: [to_hex(colours(level)) for level in range(256)] for name, colours in COLORMAPS.items()},
    )


def _model(served: Served) -> ModelCard:
    presets = {name: _preset(served, name) for name in PRESETS}
    return ModelCard(
        name=served.name,
        classes=len(served.model.class_names),
        writes=isinstance(served.model, TextGenerator),
        prompts=isinstance(served.model, TextGenerator) and served.model.processor is not None,
        knows=_knows(served.model),
        examples=[f"/api/examples/{name}.png" for name in (EXAMPLES if domain_advice(served.model) else PHOTOS)],
        presets=presets,
    )


def _knows(model: Adapter) -> str:
    known = domain_advice(model, "dave serve ")
    if isinstance(model, TextGenerator):
        return "This model writes about images; each of its words has a map." + (f" It {known}" if known else "")
    return f"This model {known or f'knows {len(model.class_names)} classes.'}"


def _preset(served: Served, name: str) -> PresetCard:
    preset = PRESETS[name](served.model)
    noise = preset.neighborhood.noise
    reducer = next(known for known in REDUCERS if type(preset.reducer) is REDUCERS[known])
    return PresetCard(samples=preset.samples, noise=noise.kind, noise_level=noise.level, reducer=reducer)


def _method(name: str) -> MethodCard:
    return MethodCard(name=name, takes=takes(name), **asdict(METHODS[name].info))
