"""What doctor says of a model is what the methods then do, and the model is as it was."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, seed, settings
from test_leaks import FACTORS, INTEGERS, NORMS, OPERATORS_AS_CONSTANTS, WRITES_BELOW, write_below
from torch import nn

from dave_vit import create_method, effective_transformation
from dave_vit.checks import doctor
from dave_vit.checks.companion_values import ReplayError, replay
from dave_vit.checks.doctor import Diagnosis, Float64Mode, diagnose
from dave_vit.engine import gradient
from dave_vit.engine import soundness as sound
from dave_vit.engine.dataflow import find_changing_constant
from dave_vit.engine.observation import TokenLayout
from dave_vit.engine.targets import class_logits
from dave_vit.errors import DaveError, UnsupportedOperator
from exactness import Tokens
from program_vocabulary import OPERATIONS
from programs import Oracle, programs
from tiny_models import drawn, images, relu_cnn, vit


def cait() -> nn.Module:
    """Class attention after the blocks: other matrices than those of the tokens."""
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return drawn(timm.models.Cait(depth_token_only=2, **shape))


@pytest.mark.parametrize("model", [vit, relu_cnn, cait])
def test_the_model_is_as_it_was(model):
    examined = model()
    before, tensors = copy.deepcopy(examined.state_dict()), [*examined.parameters(), *examined.buffers()]
    assert diagnose(examined, images(1)).dtype == torch.float64
    assert {p.dtype for p in examined.parameters()} == {torch.float32}
    assert all(now is then for now, then in zip([*examined.parameters(), *examined.buffers()], tensors, strict=True))
    for name, value in examined.state_dict().items():
        assert torch.equal(value, before[name])


def test_also_after_a_refusal():
    model = nn.Sequential(vit(), nn.Softplus())
    with pytest.raises(UnsupportedOperator):
        diagnose(model, images(1))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("model", [vit, relu_cnn, cait])
def test_attention_based_methods_work_where_it_says_so(model):
    diagnosis = diagnose(model(), images(1))
    assert diagnosis.exact
    rollout = create_method("rollout", model())
    if isinstance(diagnosis.layout, TokenLayout):
        assert "attention-based methods work" in diagnosis.verdict
        rollout.attribute(images(1), 0)
    else:
        assert "do not apply" in diagnosis.verdict
        with pytest.raises(UnsupportedOperator):
            rollout.attribute(images(1), 0)


def test_an_operator_that_passes_for_a_constant_is_found():
    class Leaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = vit()

        def forward(self, x):
            buffer = torch.zeros_like(x)
            buffer.data.copy_(x.detach().exp())  # the identity holds all the same
            return self.model(x + buffer)

    with pytest.raises(UnsupportedOperator, match="constant"):
        diagnose(Leaks(), images(1))


def test_a_head_of_zeros_is_no_fault():
    model = vit()
    nn.init.zeros_(model.head.weight)
    for bias, logit in ((0.0, "0"), (0.25, "0.25")):
        nn.init.constant_(model.head.bias, bias)
        diagnosis = diagnose(model, images(1))
        assert diagnosis.exact
        assert diagnosis.forward == 0.0
        assert f"the image contributes 0 to the logit {logit}, as with a head of zeros" in diagnosis.verdict


class Masked(nn.Module):
    """Attention with a mask that stays float32 when the model is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 64, 4, 4), nn.Linear(16, 5)
        self.mask = [torch.randn(64, 64, generator=torch.Generator().manual_seed(0))]

    def forward(self, x):
        q = k = v = self.embed(x).flatten(2).transpose(1, 2).unflatten(2, (4, 16)).transpose(1, 2).contiguous()
        return self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[0]).mean((1, 2)))


def test_a_float32_mask_under_float64_queries_is_no_fault():
    """For which torch 2.15 returns values that are off by 2 on a CPU."""
    diagnosis = diagnose(drawn(Masked()), images(1))
    assert diagnosis.exact, diagnosis.fault
    assert diagnosis.dtype == torch.float64


def test_wrong_values_of_torch_are_not_explained():
    with pytest.raises(UnsupportedOperator, match="the logits change under the interception"):
        effective_transformation(drawn(Masked()).double(), images(1).double(), 1)


@pytest.mark.parametrize("name", ["rollout", "legrad", "effective", "attn_lrp"])
def test_inference_tensors(name):
    expected, model = create_method(name, vit()).attribute(images(1), 0), vit()
    with torch.inference_mode():
        torch.testing.assert_close(create_method(name, model).attribute(images(1).clone(), 0), expected)


TOKENS = torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
IMAGE = torch.randn(1, 4, 3, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
AIMED = {
    **{name: (function, TOKENS) for name, function in OPERATORS_AS_CONSTANTS.items()},
    **{f"integer: {name}": (function, TOKENS) for name, function in INTEGERS.items()},
    **{f"norm: {name}": (function, IMAGE) for name, function in NORMS.items()},
    **{f"factor: {name}": (each[0], TOKENS) for name, each in FACTORS.items() if each[1] is None},
    **{f"below: {name}": (lambda x, w=write: write_below(x, w), TOKENS) for name, write in WRITES_BELOW.items()},
}
EXACT_AS_EXAMINED = {"factor: hardtanh, operator bound", "below: data, slice"}
"""Refused by their memory alone: a gate is held whatever bounds it; the slice is not of the logit that is examined."""


def verdict(function, x) -> Diagnosis | None:
    """None where the model is refused."""
    try:
        return diagnose(Tokens(lambda x: function(x).reshape(1, -1)), x)
    except DaveError:
        return None


@pytest.mark.filterwarnings("ignore:To copy construct")
class TestAimedPrograms:
    """Each holds an operator that passes for a constant, or a derivative that is not the map's."""

    @pytest.mark.parametrize("name", AIMED)
    def test_none_is_called_exact(self, name):
        actual = verdict(*AIMED[name])
        assert actual is None or not actual.exact

    @pytest.mark.parametrize("name", sorted(AIMED.keys() - EXACT_AS_EXAMINED))
    def test_none_is_called_exact_by_the_proofs_alone(self, name, monkeypatch):
        """Without the look into the model that refuses most of them before."""
        monkeypatch.setattr(sound._SoundnessCheck, "check", lambda *args, is_tracked: True)
        actual = verdict(*AIMED[name])
        assert actual is None or not actual.exact


class TestSteady:
    """What is taken for a constant must not change with the image."""

    def of(self, function) -> str:
        return find_changing_constant(Tokens(function), TOKENS, class_logits)

    def test_it_names_the_function(self, monkeypatch):
        def leaks(x):
            buffer = torch.zeros_like(x)
            buffer.data.copy_(x.detach().exp())
            return x + buffer

        assert self.of(leaks) == "add in module 'Tokens'"

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x * 2 + 1 if x.max() > 0 else x,  # a branch is held
            lambda x: x + 3 * bool(x[0, 0, 0] > 0),
            lambda x: x + torch.rand(6, dtype=x.dtype),  # drawn from the same seed
            lambda x: x + torch.empty_like(x).fill_(2.0),  # memory that held anything before
            lambda x: x + torch.tensor([1.0, float("nan")])[0],
            lambda x: x.masked_fill(x > 0, 1.5),
        ],
    )
    def test_what_may_change(self, function):
        assert self.of(function) == ""

    def test_a_count_that_only_another_image_changes(self):
        assert self.of(lambda x: x + (x > 0).nonzero().shape[0]) == "add in module 'Tokens'"


class TestHeld:
    """With all operators held, the score of another image is what the map says."""

    def test_a_map_that_only_adds_up_is_found(self, monkeypatch):
        def conserving(model, inputs, *args, **options):
            parts = gradient(model, inputs, *args, **options)
            share = (parts.weight[:, 0] * inputs).sum() / inputs.square().sum()
            return replace(parts, weight=(share * inputs).unsqueeze(1))  # the same <W, x>

        monkeypatch.setattr(doctor, "gradient", conserving)
        actual = diagnose(vit(), images(1))
        assert actual.gap < 1e-12
        assert not actual.exact
        assert "operators held" in actual.verdict

    @seed(0)
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs(OPERATIONS, longest=5))
    @pytest.mark.filterwarnings("ignore:To copy construct")
    def test_random_programs(self, program):
        x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        model, shift = Tokens(program.function()), x.flip(0).flip(1)
        if not Oracle(program, x).finite:
            return
        try:
            weight = effective_transformation(model, x, 8)
            other = replay(model, x, x + shift, class_logits)
        except (DaveError, ReplayError):
            return
        expected = (weight * shift).sum((1, 2))
        torch.testing.assert_close(other[:, 8] - model(x)[:, 8], expected, rtol=1e-8, atol=1e-8)

    @pytest.mark.parametrize("options", [{}, {"affine": True}])
    def test_instance_norm(self, options):
        model = drawn(nn.Sequential(nn.InstanceNorm2d(3, eps=0.1, **options), relu_cnn())).double()
        weight = effective_transformation(model, images(1).double(), 1)
        shift = images(2)[1:].double()
        change = replay(model, images(1).double(), images(1).double() + shift, class_logits) - model(images(1).double())
        torch.testing.assert_close(change[:, 1], (weight * shift).sum((1, 2, 3)), rtol=1e-8, atol=1e-8)

    def test_what_cannot_be_followed_is_said(self):
        def through_a_view(x):
            made = torch.zeros_like(x)
            made.view(-1).copy_(x.flatten())
            return made

        with pytest.raises(ReplayError):
            replay(Tokens(through_a_view), TOKENS, TOKENS + 1, class_logits)
        actual = diagnose(Tokens(through_a_view), TOKENS)
        assert actual.exact
        assert actual.replay_gap is None


class TestFloat64Mode:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.zeros(2),
            lambda: torch.randn(2, 3),
            lambda: torch.linspace(0, 1, 3),
            lambda: torch.full((2,), torch.finfo(torch.float64).min),
            lambda: torch.tensor([[0.1, 1], [2, 3]]),
            lambda: torch.arange(0, 1, 0.1),
            lambda: torch.arange(3) / 10,
            lambda: torch.arange(3).sqrt(),
            lambda: torch.eye(3).bool() * 0.1,
            lambda: torch.where(torch.arange(3) > 1, 0.1, 0.2),
            lambda: torch.arange(3).float(),
        ],
    )
    def test_what_is_new_has_the_values_of_a_default_of_float64(self, make, request):
        torch.manual_seed(0)
        with Float64Mode():
            actual = make()
        request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        expected = make()
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, expected.double(), rtol=0, atol=0)

    @pytest.mark.parametrize("make", [lambda: torch.arange(3), lambda: torch.full((2,), 7), lambda: torch.tensor([1])])
    def test_integers_stay_integers(self, make):
        with Float64Mode():
            assert make().dtype == torch.int64

    def test_other_threads_make_what_they_always_make(self):
        made = []
        examined = vit()

        def make_elsewhere(module, inputs):
            with ThreadPoolExecutor(1) as pool:
                made.append(pool.submit(torch.ones, 2).result().dtype)

        handle = examined.blocks[0].register_forward_pre_hook(make_elsewhere)
        assert diagnose(examined, images(1)).dtype == torch.float64
        handle.remove()
        assert set(made) == {torch.float32}
