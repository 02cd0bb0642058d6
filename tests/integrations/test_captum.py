"""captum's signatures for all methods, captum's README with one changed import, and its attributions as methods."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import threading

import captum.attr
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dave_vit.integrations.captum as ours
from dave_vit import METHODS, Contrast, cli, create_method
from dave_vit.errors import DaveError, InputError, OptionError, TargetError, UnknownName
from dave_vit.evaluate import evaluate
from evaluation_fixtures import build_plan, load, paint
from tiny_adapters import adapter
from tiny_models import FEW, HIDING, SIZE, images, relu_cnn, vit

X = images()
CLASSES = [0, 1, 2]


def test_the_readme_of_captum_runs_with_one_changed_import():
    readme = importlib.metadata.metadata("captum").get_payload()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    code = "\n".join(block for block in blocks if "pip" not in block)
    changed = code.replace("from captum.attr import", "from dave_vit.integrations.captum import")
    assert changed != code
    results: dict[str, object] = {"print": lambda *values: printed.append(values)}
    printed: list[tuple[object, ...]] = []
    exec(changed, results)
    assert isinstance(results["ig"], ours.Attribution)
    shown = {label: value for label, value in printed if label != "Convergence Delta:"}
    # the numbers that the README prints below its example
    expected = torch.tensor([[-0.5922, -1.5497, -1.0067], [0.0, -0.2219, -5.1991]])
    torch.testing.assert_close(shown["IG Attributions:"], expected, atol=1e-4, rtol=0)
    assert float(printed[1][1].abs().max()) < 1e-5
    smoothed = torch.tensor([[-0.4574, -1.5493, -1.0893], [0.0, -0.2647, -5.1619]])
    torch.testing.assert_close(shown["IG + SmoothGrad Attributions:"], smoothed, atol=0.2, rtol=0)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_class_with_captums_signature(name):
    kind = getattr(ours, METHODS[name].__name__)
    assert kind.__name__ in dir(ours)
    try:
        found = kind(vit(), **FEW.get(name, {})).attribute(X[:1], target=torch.tensor([1]))
    except DaveError:  # methods for other models than this one
        with pytest.raises(DaveError):
            create_method(name, vit()).attribute(X[:1], 1)
    else:
        assert found.shape == X[:1].shape
        assert found.isfinite().all()
    names = list(inspect.signature(kind.attribute).parameters)
    theirs = getattr(captum.attr, captum_name(kind.__name__), None)
    if theirs is not None:
        shared = [one for one in inspect.signature(theirs.attribute).parameters if one in names]
        assert names[: len(shared)] == shared
    assert {"inputs", "target"} <= set(names)


@pytest.mark.parametrize("name", ["dave", "smoothgrad", "attn_lrp", "rollout"])
def test_a_class_computes_what_the_method_computes(name):
    options = FEW.get(name, {})
    found = getattr(ours, METHODS[name].__name__)(vit()).attribute(X, CLASSES, **options)
    torch.testing.assert_close(found, create_method(name, vit(), **options).attribute(X, CLASSES))


def captum_name(name: str) -> str:
    return {"LIME": "Lime", "KernelSHAP": "KernelShap"}.get(name, name)


def test_arguments_of_captum_mean_the_same():
    model, baseline = vit(), torch.full_like(X, 0.5) * torch.tensor([0.0, 1.0, 2.0]).reshape(3, 1, 1, 1)
    found, delta = ours.IntegratedGradients(model).attribute(X, baseline, 1, n_steps=6, return_convergence_delta=True)
    theirs = captum.attr.IntegratedGradients(model)
    expected, gap = theirs.attribute(X, baseline, 1, n_steps=6, return_convergence_delta=True)
    torch.testing.assert_close(found, expected.to(found), atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(delta, gap.to(delta), atol=1e-5, rtol=1e-2)
    torch.testing.assert_close(
        ours.Saliency(model).attribute(X, CLASSES, abs=False),
        captum.attr.Saliency(model).attribute(X.clone().requires_grad_(), CLASSES, abs=False),
    )
    hidden = ours.Occlusion(model, score="logit").attribute(X, (3, 16, 16), (3, 16, 16), 0, target=1)
    removed = captum.attr.Occlusion(model).attribute(X, (3, 16, 16), (3, 16, 16), 0, target=1)
    # captum gives every value of a window the whole drop
    torch.testing.assert_close(rank(hidden.sum(1)), rank(removed.sum(1)))
    assert ours.Lime is ours.LIME
    assert ours.DeepLift is captum.attr.DeepLift


def rank(maps: torch.Tensor) -> torch.Tensor:
    return maps[:, ::16, ::16].flatten(1).argsort(1)


def test_functions_tuples_and_other_shapes_of_inputs():
    model = vit()
    expected = create_method("input_x_gradient", model).attribute(X, CLASSES)
    attribution = ours.InputXGradient(lambda x: model(x))
    torch.testing.assert_close(attribution.attribute(X, target=CLASSES), expected)
    (found,) = attribution.attribute((X,), target=CLASSES)
    torch.testing.assert_close(found, expected)
    linear = nn.Linear(6, 2)
    rows = torch.randn(4, 6)
    torch.testing.assert_close(ours.InputXGradient(linear).attribute(rows, target=1), rows * linear.weight[1].detach())


def test_what_captum_has_and_methods_here_do_not_is_refused():
    with pytest.raises(OptionError, match="DAVE has no baseline"):
        ours.DAVE(vit(), samples=2).attribute(X, 0, baselines=torch.ones_like(X))
    assert ours.DAVE(vit(), samples=2).attribute(X, 0, torch.zeros_like(X)).shape == X.shape
    with pytest.raises(OptionError, match="Saliency has no convergence delta"):
        ours.Saliency(vit()).attribute(X, 0, return_convergence_delta=True)
    with pytest.raises(InputError, match="with_inputs"):
        ours.Saliency(vit()).attribute((X, X), 0)
    with pytest.raises(TargetError, match="tuple"):
        ours.Saliency(vit()).attribute(X, (0, 1))
    with pytest.raises(OptionError, match="no option 'feature_mask'"):
        ours.Lime(vit(), **HIDING["lime"]).attribute(X, target=0, feature_mask=torch.zeros(1))
    with pytest.raises(AttributeError, match="NoSuchName"):
        ours.NoSuchName  # noqa: B018


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("IntegratedGradients", {"n_steps": 4}),
        ("DeepLift", {}),
        ("Occlusion", {"sliding_window_shapes": (3, 16, 16), "strides": (3, 16, 16)}),
        ("GradientShap", {"baselines": torch.zeros(2, 3, SIZE, SIZE), "n_samples": 2}),
    ],
)
def test_an_attribution_of_captum_is_a_method(name, options):
    model = relu_cnn()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    found = create_method(f"captum:{name}", model, **options).explain(X, CLASSES)
    assert torch.equal(torch.get_rng_state(), generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        np.random.seed(0)
        expected = getattr(captum.attr, name)(model).attribute(
            X.clone().requires_grad_(), target=torch.tensor(CLASSES), **options
        )
    torch.testing.assert_close(found.attribution, expected.detach().float())
    assert found.target.tolist() == CLASSES
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_random_numbers_of_other_threads_go_on():
    model, drawn = relu_cnn(), []

    def draw_elsewhere(*_):
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(1).item()))
        thread.start()
        thread.join()

    model.register_forward_pre_hook(draw_elsewhere)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        create_method("captum:IntegratedGradients", model, n_steps=2).attribute(X, 1)
        torch.manual_seed(5)
        assert drawn == [torch.rand(1).item() for _ in drawn] != []


def test_a_layer_is_named_by_its_path_and_its_map_covers_the_image():
    model = relu_cnn()
    method = create_method("captum:LayerGradCam", model, layer="4")
    assert method.attribute(X, 1).shape == X.shape
    with pytest.raises(OptionError, match="no layer 'patch_embd'; did you mean patch_embed"):
        create_method("captum:LayerGradCam", vit(), layer="patch_embd")
    with pytest.raises(OptionError, match="captum:LayerGradCam needs layer"):
        create_method("captum:LayerGradCam", model)
    with pytest.raises(OptionError, match="has no option 'n_step'; did you mean n_steps"):
        create_method("captum:IntegratedGradients", model, n_step=3)
    with pytest.raises(UnknownName, match="'captum:DeepLif'; did you mean DeepLift"):
        create_method("captum:DeepLif", model)
    with pytest.raises(UnknownName, match="captum:NoiseTunnel"):
        create_method("captum:NoiseTunnel", model)


def test_contrasts_and_scores_are_targets_of_captum_too():
    method = create_method("captum:IntegratedGradients", vit(), n_steps=4)
    first, second = method.attribute(X, 1), method.attribute(X, 3)
    torch.testing.assert_close(method.attribute(X, Contrast(1, against=3)), first - second, atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(method.attribute(X, lambda logits: 2 * logits[:, 1]), 2 * first)
    both = method.attribute(X, [[1, 3]] * 3)
    torch.testing.assert_close(both, torch.stack([first, second], 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["FeatureAblation", "FeaturePermutation", "ShapleyValueSampling", "Lime", "KernelShap"]
)
def test_attributions_of_captum_that_hide_features_run_on_a_vit(name):
    mask = torch.arange(4).reshape(1, 1, 2, 2).repeat_interleave(16, -1).repeat_interleave(16, -2)
    found = create_method(f"captum:{name}", vit(), feature_mask=mask).attribute(X[:2], 1)
    assert found.shape == X[:2].shape
    assert found.isfinite().all()


def test_the_command_line_takes_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dave_vit.models.loading.load_model", lambda *args, **options: adapter())
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((40, 30), 60).convert("RGB").save("photo.png")
    methods = ["captum:InputXGradient", "grad_cam:GradCAM", "saliency"]
    assert cli.run(["compare", "photo.png", "--methods", ",".join(methods), "--json", "--out", "out"]) == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)["maps"]] == methods
    words = ["explain", "photo.png", "--method", "captum:IntegratedGradients", "--set", "n_steps=3", "--out", "out"]
    assert cli.run([*words, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["options"]["n_steps"] == 3
    assert all((tmp_path / name).is_file() for name in record["files"])


@pytest.mark.slow
def test_an_evaluation_scores_them(tmp_path):
    methods = ["captum:Saliency", "grad_cam:EigenCAM"]
    plan = build_plan(paint(tmp_path / "data", 1), methods=methods, metrics=["energypg"])
    results = evaluate(plan, tmp_path / "run", loader=load, threads=1)["results"]
    assert [(row["method"], row["n"]) for row in results] == [(name, 5) for name in methods]
