"""Everything there is to choose from on the page, read from the registries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from dave_vit._version import __version__
from dave_vit.methods import METHODS
from dave_vit.methods.presets import PRESETS
from dave_vit.models import Adapter
from dave_vit.models.text_generation import TextGenerator
from dave_vit.models.traits import domain_advice
from dave_vit.viz.colors import hex_colormaps
from dave_vit.web.images import EXAMPLES, PHOTOS
from dave_vit.web.options import accepted_options, form_options, method_names, preset_values
from dave_vit.web.schema import Info, Limits, MethodCard, ModelCard
from dave_vit.web.service import ServedModel


def build_info(models: Sequence[ServedModel], limits: Limits, seed: int) -> Info:
    """Return what the page needs before its first request."""
    return Info(
        version=__version__,
        models=[_describe_model(served.model) for served in models],
        methods=[
            MethodCard(name=name, takes=accepted_options(name), **asdict(METHODS[name].info)) for name in method_names()
        ],
        options=form_options(limits, seed),
        limits=limits,
        seed=seed,
        colormaps=hex_colormaps(),
    )


def _describe_model(model: Adapter) -> ModelCard:
    return ModelCard(
        name=model.spec,
        classes=len(model.class_names),
        writes=isinstance(model, TextGenerator),
        prompts=isinstance(model, TextGenerator) and model.processor is not None,
        knows=_describe_training(model),
        examples=[f"/api/examples/{name}.png" for name in (EXAMPLES if domain_advice(model) else PHOTOS)],
        presets={name: preset_values(PRESETS[name](model)) for name in PRESETS},
    )


def _describe_training(model: Adapter) -> str:
    domain = domain_advice(model, "dave serve ")
    if isinstance(model, TextGenerator):
        return "This model writes about images; each word has a map." + (f" It {domain}" if domain else "")
    return f"This model {domain or f'knows {len(model.class_names)} classes.'}"
