"""What is known of a model, and that only typed knowledge counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dave_vit.errors import OptionError, UnknownName
from dave_vit.evaluate import ModelEntry
from dave_vit.models import Adapter, ModelSpec, Preprocessing, Traits, load_model, traits_of
from dave_vit.models.adapter import square_side
from dave_vit.models.families import FAMILIES, Family
from dave_vit.models.loading import backbone
from dave_vit.neighborhood import Noise


def test_a_module_without_traits_has_the_defaults():
    model = nn.Flatten()
    model.fill, model.noise = 3.0, Noise("additive", 0.2)  # somebody's own words
    assert traits_of(model) == Traits(noise=None, fill=0.0, patch=None, compete=None)


def test_traits_are_found_on_an_adapter_a_module_and_a_compiled_one():
    known = Traits(Noise("additive", 0.2), fill=0.5, patch=4, compete=False)
    own = nn.Linear(2, 2)
    own.traits = known
    adapter = Adapter(nn.Linear(2, 2), Preprocessing(torch.as_tensor), ["a", "b"], spec="x", traits=known)
    for model in (own, adapter, torch.compile(adapter)):
        assert traits_of(model) == known


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("builtin", Traits(patch=16, compete=True)),
        ("builtin-bcos", Traits(Noise("additive", 0.2), fill=0.5, patch=16, compete=False)),
        ("timm:test_vit", Traits(patch=16, compete=True)),
        ("timm:test_resnet", Traits(compete=True)),
        ("torchvision:vit_b_16", Traits(patch=16, compete=True)),
        ("bcos:simple_vit_ti_patch16_224", Traits(Noise("additive", 0.2), fill=0.5, compete=False)),
        ("bcos:standard_simple_vit_ti_patch16_224", Traits(compete=True)),
    ],
)
def test_what_families_know(spec, expected):
    if spec.startswith("bcos"):
        pytest.importorskip("bcos", reason="the bcos extra is not installed")
    assert load_model(spec, "random").traits == expected


def test_how_a_new_head_was_trained_is_not_known(tmp_path):
    import timm

    torch.save(timm.create_model("test_vit", num_classes=4).state_dict(), tmp_path / "own.pth")
    assert load_model("timm:test_vit", tmp_path / "own.pth").traits == Traits(patch=16, compete=None)


@pytest.mark.parametrize(("problem", "compete"), [(None, True), ("multi_label_classification", False)])
def test_transformers_say_whether_labels_exclude_each_other(problem, compete):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    from dave_vit.models.families.hf import wrap

    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=3, problem_type=problem, **shape)
    model = wrap(transformers.ViTForImageClassification(config), object(), None, spec="hf:x")
    assert model.traits == Traits(patch=8, compete=compete)


def test_a_registered_family_is_loaded_by_its_name(monkeypatch):
    monkeypatch.setattr(FAMILIES, "data", dict(FAMILIES.data))

    def load(name, weights, classes, **more):
        return Adapter(nn.Linear(2, 2), Preprocessing(torch.as_tensor), classes, spec=f"{name} {weights} {more}")

    FAMILIES.register("mine")(Family(load))
    assert load_model("mine:a:b", "random", classes=["x", "y"]).spec == "a:b random {}"
    with pytest.raises(UnknownName, match="did you mean mine"):
        load_model("min:x")
    with pytest.raises(OptionError, match="hf: and openclip: models"):
        load_model("mine:x", prompts=["a", "b"])
    with pytest.raises(OptionError, match="timm: and hf: models can"):
        backbone("mine:x", None, ["a", "b"])


def test_a_model_is_named_in_one_way_for_commands_and_plans():
    model = ModelSpec("timm:test_vit", "random", classes=None).load("cpu")
    assert model.spec == "timm:test_vit"
    assert isinstance(ModelEntry("builtin", label="b"), ModelSpec)


def test_sides_of_patches():
    assert [square_side(given) for given in (16, (14, 14), [8, 4], None)] == [16, 14, None, None]
