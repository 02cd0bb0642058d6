"""What every method promises, whatever it computes: one suite over all registered names."""

from __future__ import annotations

import copy
import functools
import gc
import re

import numpy as np
import pytest
import torch
from torch import nn

import tiny_models
from dave_vit import METHODS, create_method
from dave_vit.engine.forward import count_passes
from dave_vit.errors import DaveError, InputError, OptionError, TargetError, TrainingModeError
from dave_vit.methods import Method

NAMES = list(METHODS)
# Methods on tokens need attention among all tokens of an image; bcos needs a B-cos model, tam words.
ON_TOKENS = {"raw_attention", "rollout", "attention_flow", "chefer_lrp", "chefer_generic", "legrad", "iia", "tis"} | {
    "beyond_intuition",
    "mda",
}
REFUSED = {
    "vit": {"bcos", "tam"},
    "torchvision": {"bcos", "tam"},
    "swin": {"bcos", "tam", "ablationcam", *ON_TOKENS},
    "cnn": {"bcos", "tam", *ON_TOKENS},
}
ON_A_VIT = [name for name in NAMES if name not in REFUSED["vit"]]
MODELS: dict[str, nn.Module] = {}
X = tiny_models.images()


@torch.inference_mode(mode=False)  # tests share the models, whichever comes first
def model_of(family: str) -> nn.Module:
    if family not in MODELS:
        MODELS[family] = tiny_models.FAMILIES[family]()
    return MODELS[family]


def method(name: str, family: str = "vit", **options):
    return create_method(name, model_of(family), **tiny_models.FEW.get(name, {}) | options)


@functools.cache
def usual(name: str, family: str = "vit"):
    """The explanation of all images, image i for class i; made once."""
    return method(name, family).explain(X, [0, 1, 2])


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    scale = expected.abs().max().clamp_min(1e-12)
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=tolerance)


class Counting(nn.Module):
    """Counts the rows that pass through a model, and those of the gradients that come back."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.forth, self.back = model, 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forth += len(x)
        logits = self.model(x)
        if logits.requires_grad:
            logits.register_hook(self._count)
        return logits

    def _count(self, grad: torch.Tensor) -> None:
        self.back += len(grad)

    def run(self, method, *args) -> None:
        """Count a map that is not the first: before that one the model is looked into."""
        method.attribute(*args)
        self.forth = self.back = 0
        method.attribute(*args)


@pytest.mark.parametrize("name", ON_A_VIT)
class TestOnAViT:
    def test_form(self, name):
        explanation = usual(name)
        assert explanation.attribution.shape == X.shape
        assert explanation.attribution.dtype == X.dtype
        assert explanation.attribution.device == X.device
        assert not explanation.attribution.requires_grad
        assert explanation.attribution.isfinite().all()
        assert explanation.attribution.abs().sum() > 0
        assert explanation.target.tolist() == [0, 1, 2]

    def test_an_image_alone_and_in_a_batch(self, name):
        close(usual(name).attribution[1:2], method(name).attribute(X[1:2], 1))

    def test_repeats_exactly(self, name):
        assert torch.equal(method(name).attribute(X, [0, 1, 2]), usual(name).attribution)

    def test_all_forms_of_targets(self, name):
        tested = method(name)
        predicted = model_of("vit")(X).argmax(1)
        several = tested.explain(X, torch.stack([torch.tensor([0, 1, 2]), predicted], 1))
        assert several.attribution.shape == (3, 2, *X.shape[1:])
        assert several.target.tolist() == [[0, predicted[0]], [1, predicted[1]], [2, predicted[2]]]
        close(several.attribution[:, 0], usual(name).attribution)
        unasked = tested.explain(X)
        assert torch.equal(unasked.target, predicted)
        close(unasked.attribution, several.attribution[:, 1])
        for target in (1, torch.tensor(1), torch.tensor([1]), [[1]]):
            found = tested.attribute(X[1:2], target)
            close(found.reshape(1, *X.shape[1:]), usual(name).attribution[1:2])

    def test_says_whether_the_class_matters(self, name):
        other = method(name).attribute(X, [1, 2, 0])
        assert METHODS[name].info.class_specific != torch.equal(other, usual(name).attribution)

    def test_double_precision(self, name):
        model = copy.deepcopy(model_of("vit")).double()
        found = create_method(name, model, **tiny_models.FEW.get(name, {})).attribute(X[:1].double(), 0)
        assert found.dtype == torch.float64
        close(found.float(), usual(name).attribution[:1], tolerance=1e-3)

    def test_without_grad_mode(self, name):
        with torch.no_grad():
            close(method(name).attribute(X[:1], 0), usual(name).attribution[:1])

    def test_nothing_stays_on_the_model(self, name):
        model = copy.deepcopy(model_of("vit"))
        model.blocks[0].requires_grad_(False)
        inputs = X[:2].clone()
        before, state = copy.deepcopy(model), torch.get_rng_state()
        tested = create_method(name, model, **tiny_models.FEW.get(name, {}))
        tested.attribute(inputs, 1)
        with pytest.raises(DaveError):
            tested.attribute(inputs, tiny_models.CLASSES)  # also not after an error
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(inputs, X[:2])
        assert not inputs.requires_grad
        assert inputs.grad is None
        assert_same(model, before)

    def test_a_model_in_training_mode_is_refused(self, name):
        model = tiny_models.vit(proj_drop_rate=0.1).train()
        with pytest.raises(TrainingModeError):
            create_method(name, model, **tiny_models.FEW.get(name, {})).attribute(X[:1], 1)


def assert_same(model: nn.Module, before: nn.Module) -> None:
    old = dict(before.named_modules())
    assert model.state_dict().keys() == before.state_dict().keys()
    for path, module in model.named_modules():
        assert module.training == old[path].training
        assert not any(getattr(module, kind) for kind in vars(module) if "hooks" in kind), path
        assert module.__dict__.keys() == old[path].__dict__.keys(), path
    for (path, parameter), other in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter, other), path
        assert parameter.grad is None, path
        assert parameter.requires_grad == other.requires_grad, path


@pytest.mark.parametrize("name", ON_A_VIT)
def test_errors_are_one_clear_line(name):
    tested = method(name)
    bad = X[:1].clone()
    bad[0, 0, 0, 0] = float("nan")
    for inputs, target, error, said in [
        (bad, 0, InputError, "NaN"),
        (X[:1].long(), 0, InputError, "int64"),
        (X[0, 0, 0], 0, InputError, "shape"),
        ([1.0], 0, InputError, "list"),
        (X[:1], 99, TargetError, "99"),
        (X[:1], -1, TargetError, "-1"),
        (X[:2], [0, 1, 2], TargetError, "batch of 2"),
        (X[:1], 1.5, TargetError, "integers"),
    ]:
        with pytest.raises(error, match=said) as caught:
            tested.attribute(inputs, target)
        assert "\n" not in str(caught.value)
    with pytest.raises(OptionError, match="no_such_option"):
        create_method(name, model_of("vit"), no_such_option=1)


@pytest.mark.parametrize("name", ON_A_VIT)
def test_in_inference_mode(name):
    with torch.inference_mode():
        close(method(name).attribute(X[:1], 0), usual(name).attribution[:1])


@pytest.mark.parametrize("name", ON_A_VIT)
def test_tensors_of_inference_mode(name):
    with torch.inference_mode():
        image, target = X[:1].clone(), torch.tensor([0])
        within = method(name).attribute(image, target)
    close(within, usual(name).attribution[:1])
    close(method(name).attribute(image, target), usual(name).attribution[:1])


@pytest.mark.parametrize("name", ON_A_VIT)
def test_targets_as_users_have_them(name):
    rows = np.array([[0, 1], [1, 1], [2, 1]])
    several = method(name, chunk=2).explain(X, rows)
    assert several.target.tolist() == rows.tolist()
    close(several.attribution[:, 0], usual(name).attribution)
    for target in (range(3), np.arange(3, dtype=np.int32)):
        close(method(name, chunk=2).attribute(X, target), usual(name).attribution)
    options = tiny_models.OF_THE_LOGIT.get(name, {})  # by default some set a class against its rivals, or explain more
    several = method(name, chunk=2, **options).explain(X, rows)
    scored = method(name, chunk=2, **options).explain(X, lambda logits: logits[:, 1])
    assert scored.target is None
    assert scored.attribution.shape == X.shape
    close(scored.attribution, several.attribution[:, 1])
    with pytest.raises(TargetError, match="one number per image"):
        method(name).attribute(X, lambda logits: logits)


@pytest.mark.parametrize("target", [np.arange(3), (0, 1, 2)], ids=["array", "tuple"])
def test_other_rows_of_targets(target):
    close(method("effective").attribute(X, target), usual("effective").attribution)


class Small(nn.Module):
    """A model on a device where ``limit`` images fit into memory."""

    def __init__(self, model: nn.Module, limit: int) -> None:
        super().__init__()
        self.model, self.limit, self.refused = model, limit, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return self.model(x)


@pytest.mark.parametrize("name", ON_A_VIT)
def test_passes_too_large_for_memory_are_halved(name):
    small = Small(model_of("vit"), limit=1)
    close(create_method(name, small, **tiny_models.FEW.get(name, {})).attribute(X, [0, 1, 2]), usual(name).attribution)
    assert small.refused <= 3  # 9 rows, 4, 2: learnt once, and not again in every chunk
    with pytest.raises(torch.OutOfMemoryError):
        create_method(name, Small(small.model, limit=0), **tiny_models.FEW.get(name, {})).attribute(X, 1)


@pytest.mark.parametrize("name", NAMES)
def test_methods_are_one_or_two_classes_deep(name):
    above = METHODS[name].__mro__
    assert above.index(Method) <= 2


@pytest.mark.parametrize("name", ON_A_VIT)
def test_options_cannot_be_changed_afterwards(name):
    tested = method(name)
    for option in vars(tested):
        with pytest.raises(OptionError, match=f"{option} of a method cannot be changed") as caught:
            setattr(tested, option, None)
        assert "\n" not in str(caught.value)
    close(tested.attribute(X[:1], 0), usual(name).attribution[:1])


@pytest.mark.parametrize("name", ON_A_VIT)
def test_calls_leave_no_mark(name):
    tested = method(name)
    tested.attribute(torch.cat([X, X])[:4, :, ::2, ::2].repeat(1, 1, 2, 2), 1)
    assert torch.equal(tested.attribute(X, [0, 1, 2]), usual(name).attribution)


@pytest.mark.parametrize("name", ["dave", "equivariant", "smoothgrad", "integrated_gradients"])
def test_a_known_target_needs_no_pass_of_its_own(name):
    counting = Counting(model_of("vit"))
    paper = {"preset": "paper"} if name == "dave" else {}  # the default asks the clean image for more than its class
    counting.run(create_method(name, counting, **tiny_models.FEW[name], **paper), X, 1)
    of_clean_image = 2 if name == "dave" else 1
    assert counting.forth == (stated(METHODS[name].info.passes, "forward") - of_clean_image) * len(X)


FIXED = {
    "chefer_lrp": 2,
    "scorecam": 1 + 24,
    "ablationcam": 1 + 24,
    "occlusion": 1 + 9,
    "vit_cx": 1 + 2 * 38 / 3,
    "greedy": 108,
    "mda": 157,
}  # passes of methods whose number is not one and cannot be chosen


@pytest.mark.parametrize("name", ON_A_VIT)
def test_a_budget_is_kept_and_every_pass_is_counted(name):
    budget = 10
    counting = Counting(model_of("vit"))
    options = METHODS[name].options_for_budget(budget)
    tested = create_method(name, counting, **options)
    tested.attribute(X, [0, 1, 2])  # before the first one the model is looked into
    counting.forth = 0
    with count_passes() as count:
        found = tested.explain(X, [0, 1, 2])
    assert count.passes == counting.forth
    passes = count.passes / len(X)
    if not options:
        assert passes == FIXED.get(name, 1)
    elif found.neighborhood_level is not None and found.neighborhood_level.any():
        # Views that left what the model knows are drawn again.
        assert budget < passes <= budget * (1 + len(tested.narrower))
    else:
        assert passes == budget  # nine points of two integrals and the image itself, for example


@pytest.mark.parametrize("budget", [2, 5, 10, 50])
def test_budgets_of_integrals_and_presets(budget):
    assert 1 + METHODS["iia"].options_for_budget(budget)["steps"] ** 2 <= max(budget, 2)
    assert 1 + METHODS["iia"].options_for_budget(budget, layers=2)["steps"] ** 3 <= max(budget, 2)
    assert METHODS["dave"].options_for_budget(budget) == {"samples": max(1, budget - 2)}  # and the image itself
    assert METHODS["dave"].options_for_budget(budget, preset="paper") == {"samples": budget}
    assert METHODS["equivariant"].options_for_budget(budget) == {"samples": budget}


@pytest.mark.parametrize("name", ON_A_VIT)
def test_chunks_change_nothing(name):
    close(method(name, chunk=2).attribute(X, [0, 1, 2]), usual(name).attribution)
    with pytest.raises(OptionError, match="chunk"):
        method(name, chunk=0)


@pytest.mark.parametrize("name", ON_A_VIT)
def test_autocast(name):
    found = method(name, autocast=torch.bfloat16).attribute(X, [0, 1, 2])
    assert found.dtype == X.dtype
    assert torch.cosine_similarity(found.flatten(), usual(name).attribution.flatten(), 0) > 0.9


@pytest.mark.parametrize("family", ["swin", "torchvision", "cnn"])
@pytest.mark.parametrize("name", NAMES)
def test_other_families_are_explained_or_refused(name, family):
    if name in REFUSED[family]:
        with pytest.raises(DaveError) as caught:
            method(name, family).attribute(X[:1], 0)
        assert "\n" not in str(caught.value)
        return
    together = usual(name, family).attribution
    assert together.shape == X.shape
    assert together.isfinite().all()
    close(together[1:2], method(name, family).attribute(X[1:2], 1))


@pytest.fixture(scope="module")
def only_what_is_new():
    """The collector looks at nothing that was there before, which makes it quick."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("only_what_is_new")
@pytest.mark.parametrize("name", ON_A_VIT)
def test_nothing_is_left_in_memory(name):
    explained = method(name)
    counts = []
    for _ in range(3):
        explained.attribute(X[:1], [[0, 1]])
        gc.collect()
        counts.append(sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()))
    assert counts[2] <= counts[1], "tensors outlive the call: a graph that holds itself?"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ON_A_VIT)
def test_on_a_gpu(name):
    model = copy.deepcopy(model_of("vit")).cuda()
    found = create_method(name, model, **tiny_models.FEW.get(name, {})).attribute(X.cuda(), [0, 1, 2])
    assert found.device.type == "cuda"
    close(found.cpu(), usual(name).attribution, tolerance=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_VIT)
def test_transformers(name):
    MODELS.setdefault("huggingface", tiny_models.huggingface_vit())
    found = method(name, "huggingface").attribute(X, [0, 1, 2])
    assert found.shape == X.shape
    assert found.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_methods_is_complete(name):
    info = METHODS[name].info
    assert info.summary.endswith(".")
    assert "\n" not in info.summary
    assert info.paper
    assert info.passes


def stated(passes: str, kind: str) -> int:
    """The number in a phrase such as "1 + T forward, T backward", with the options of FEW."""
    found = re.search(rf"([0-9TDNPRSn^+()/ ]|steps|windows)+(?= {kind})", passes)
    values = {"T": 3, "steps": 4, "n": 2, "D": 24, "windows": 4, "N": 24, "P": 4, "R": 2, "S": 10}
    spelled = re.sub(r"(?<=[0-9A-Z]) (?=[A-Z(])", " * ", found[0]).replace("^", "**") if found else "0"
    return eval(spelled, values)


@pytest.mark.parametrize("name", ON_A_VIT)
def test_the_stated_cost_is_the_cost(name):
    counting = Counting(model_of("vit"))
    counting.run(create_method(name, counting, **tiny_models.FEW.get(name, {})), X)
    passes = METHODS[name].info.passes
    assert counting.forth == stated(passes, "forward") * len(X)
    if name not in ON_TOKENS - {"iia"}:  # these differentiate parts of the model, or propagate by hand
        assert counting.back == stated(passes, "backward") * len(X)
