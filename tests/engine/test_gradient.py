"""The engine as a user meets it: errors, targets, and a model that is left as it was."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dave_vit import conservation_gap, effective_transformation
from dave_vit.engine import gradient
from dave_vit.engine.calls import RuleSet, carry
from dave_vit.engine.fast.compiled import CompiledGradient
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.engine.targets import Contrast, Target
from dave_vit.errors import (
    CheckpointingError,
    InputError,
    OutputError,
    TargetError,
    TrainingModeError,
    UnsupportedOperator,
)
from fast_marker import needs_fast
from tiny_models import drawn, vit


@pytest.fixture
def model() -> nn.Module:
    return vit()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Through(nn.Module):
    """A function between the image and a linear head."""

    def __init__(self, function):
        super().__init__()
        self.function, self.head = function, nn.Linear(48, 4)

    def forward(self, x):
        return self.head(self.function(x.flatten(1)))


SMALL = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))


class TestRefusals:
    @pytest.mark.parametrize(
        ("function", "named"),
        [
            (torch.i0, "i0"),
            (lambda x: x + torch.exp(x), "add"),
            (lambda x: x + torch.sigmoid(x), "add"),
            (lambda x: x * x + x, "add"),
            (lambda x: torch.cat([x[:, :24], x[:, :24] ** 2], 1), "cat"),
            (lambda x: x + x.detach(), "add"),
            (lambda x: x + x.softmax(1), "add"),
            (lambda x: x + x.mean().item(), "item"),
            (lambda x: torch.exp(x), "exp"),
            (lambda x: torch.maximum(x, torch.ones_like(x)), "maximum"),
            (lambda x: F.softplus(x), "softplus"),
        ],
    )
    def test_never_a_silently_wrong_map(self, function, named):
        with pytest.raises(UnsupportedOperator, match=named) as caught:
            effective_transformation(Through(function), SMALL, 0)
        assert "Through" in str(caught.value)  # the module
        assert "\n" not in str(caught.value)

    def test_the_module_is_named(self, model, images):
        model.blocks[1].mlp.act = Digamma()
        with pytest.raises(UnsupportedOperator, match=r"digamma in module 'blocks\.1\.mlp\.act'"):
            effective_transformation(model, images, 0)

    def test_custom_autograd_functions(self):
        with pytest.raises(UnsupportedOperator, match="Square"):
            effective_transformation(Through(Square.apply), SMALL, 0)

    def test_operators_written_into_views(self):
        def write(x):
            y = torch.zeros_like(x)
            y[:, :5].copy_(x[:, :5] ** 2)
            return y + x

        with pytest.raises(UnsupportedOperator, match="view"):
            effective_transformation(Through(write), SMALL, 0)

    def test_probabilities_instead_of_logits(self, model, images):
        with pytest.raises((OutputError, UnsupportedOperator), match="logits"):
            effective_transformation(nn.Sequential(model, nn.Softmax(-1)), images, 0)

    def test_output_shapes(self, images):
        with pytest.raises(OutputError, match=r"shape \(3, 8, 30, 30\)"):
            effective_transformation(nn.Conv2d(3, 8, 3), images, 0)
        with pytest.raises(OutputError, match="dict"):
            effective_transformation(Returns(lambda x: {"logits": x}), images, 0)
        with pytest.raises(OutputError, match="do not depend"):
            effective_transformation(Returns(lambda x: torch.zeros(len(x), 2)), images, 0)

    @pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(48)])
    def test_training_mode(self, layer):
        with pytest.raises(TrainingModeError, match=type(layer).__name__):
            effective_transformation(Through(layer).train(), SMALL, 0)

    def test_functional_dropout_left_on(self):
        with pytest.raises(TrainingModeError, match="dropout"):
            effective_transformation(Through(lambda x: F.dropout(x, 0.5)).eval(), SMALL, 0)

    def test_training_mode_without_randomness_is_fine(self, model, images):
        expected = effective_transformation(model, images, 0)
        torch.testing.assert_close(effective_transformation(model.train(), images, 0), expected)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointing(self, model, images, reentrant):
        def rerun(x):
            return checkpoint(F.gelu, x, use_reentrant=reentrant)

        with pytest.raises(CheckpointingError, match="checkpointing"):
            effective_transformation(Through(rerun), SMALL, 0)
        model.set_grad_checkpointing()
        with pytest.raises(CheckpointingError, match="set_grad_checkpointing"):
            effective_transformation(model, images, 0)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "uint8"),
            (torch.full((1, 3, 32, 32), float("nan")), "NaN"),
            (torch.full((1, 3, 32, 32), float("inf")), "infinite"),
            (torch.zeros(0, 3, 32, 32), "shape"),
            ("image.png", "str"),
        ],
    )
    def test_inputs(self, model, bad, message):
        with pytest.raises(InputError, match=message):
            effective_transformation(model, bad, 0)

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (5, "0 to 4"),
            (-1, "out of range"),
            ([0, 1], r"\[3\] indices"),
            (1.5, "integers"),
            (torch.zeros(3, 2, 2, dtype=torch.long), "shape"),
            (lambda logits: logits, "one number per image"),
        ],
    )
    def test_targets(self, model, images, target, message):
        with pytest.raises(TargetError, match=message):
            effective_transformation(model, images, target)


class Digamma(nn.Module):
    def forward(self, x):
        return torch.digamma(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class TestTargets:
    def test_forms_agree(self, model, images):
        expected = effective_transformation(model, images, [1, 1, 1])
        for target in (1, torch.tensor([1, 1, 1]), lambda logits: logits[:, 1]):
            torch.testing.assert_close(effective_transformation(model, images, target), expected)

    def test_none_is_the_prediction(self, model, images):
        predicted = model(images).argmax(1)
        torch.testing.assert_close(
            effective_transformation(model, images), effective_transformation(model, images, predicted)
        )

    def test_several_targets_share_one_forward_pass(self, model, images):
        calls = []
        model.register_forward_pre_hook(lambda *_: calls.append(1))
        effective_transformation(model, images, 0)  # the first map of a model also looks into it
        calls.clear()
        target = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 2, 3]])
        weight = effective_transformation(model, images, target)
        assert len(calls) == 1
        assert weight.shape == (3, 3, 3, 32, 32)
        for column in range(3):
            torch.testing.assert_close(weight[:, column], effective_transformation(model, images, target[:, column]))

    def test_a_difference_of_logits(self, model, images):
        margin = effective_transformation(model, images, lambda logits: logits[:, 0] - logits[:, 1])
        pair = effective_transformation(model, images, torch.tensor([[0, 1]] * 3))
        torch.testing.assert_close(margin, pair[:, 0] - pair[:, 1], rtol=1e-3, atol=1e-5)


class TestNothingStays:
    def snapshot(self, model):
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
        attributes = [sorted(vars(m)) for m in model.modules()]
        flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
        return hooks, attributes, flags, torch.get_rng_state(), torch.is_grad_enabled()

    def compare(self, model, before, state):
        hooks, attributes, flags, rng, grad = self.snapshot(model)
        assert (hooks, attributes, flags, grad) == (before[0], before[1], before[2], before[4])
        assert torch.equal(rng, before[3])
        assert all(p.grad is None for p in model.parameters())
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key])

    def test_after_success(self, model, images):
        before, state, copy_of = self.snapshot(model), copy.deepcopy(model.state_dict()), images.clone()
        effective_transformation(model, images, 0)
        self.compare(model, before, state)
        assert torch.equal(images, copy_of)
        assert not images.requires_grad

    def test_after_an_exception(self, model, images):
        model.blocks[1].mlp.act = Digamma()
        before, state = self.snapshot(model), copy.deepcopy(model.state_dict())
        with pytest.raises(UnsupportedOperator):
            effective_transformation(model, images, 0)
        self.compare(model, before, state)
        torch.digamma(torch.ones(1, requires_grad=True))  # the interception is gone

    def test_random_models_do_not_move_the_generator(self):
        class Noisy(Through):
            def forward(self, x):
                return super().forward(x) + torch.rand(())

        noisy = Noisy(F.gelu)
        before = torch.get_rng_state()
        with pytest.raises(UnsupportedOperator, match="random numbers"):
            effective_transformation(noisy, SMALL, 0)
        assert torch.equal(before, torch.get_rng_state())

    def test_works_under_no_grad_and_inference_mode(self, model, images):
        expected = effective_transformation(model, images, 0)
        with torch.no_grad():
            torch.testing.assert_close(effective_transformation(model, images, 0), expected)
        with torch.inference_mode():
            torch.testing.assert_close(effective_transformation(model, images.clone(), 0), expected)

    def test_a_model_may_write_into_its_input(self, images):
        before = images.clone()
        effective_transformation(Returns(lambda x: x.mul_(2).flatten(1)[:, :4]), images, 0)
        assert torch.equal(images, before)


class Attending(nn.Module):
    """Patches, a norm, attention, a gate and a head: of a Vision Transformer what a compiler makes kernels of."""

    def __init__(self):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 8, 8), nn.LayerNorm(16)
        self.mixed, self.head = nn.Linear(16, 48), nn.Linear(16, 5)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)[:, None]  # [B, 1, N, 16]
        attended = F.scaled_dot_product_attention(*self.mixed(self.norm(tokens)).chunk(3, -1))
        return self.head(F.gelu(tokens + attended).mean((1, 2)))


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_stays_near_float32(self, model, images, dtype):
        exact = effective_transformation(model, images, 0)
        rounded = effective_transformation(model, images, 0, autocast=dtype)
        assert rounded.dtype == torch.float32
        assert torch.cosine_similarity(exact.flatten(), rounded.flatten(), 0) > 0.995

    @needs_fast
    @pytest.mark.parametrize(("dtype", "stream"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
    def test_residual_streams_stay_in_a_type_of_their_range(self, images, dtype, stream):
        model, met = vit(), []
        for block in model.blocks:
            block.register_forward_hook(lambda module, args, output: met.append(output.dtype))
        effective_transformation(model, images, 0, autocast=dtype)
        assert set(met[-len(model.blocks) :]) == {stream}

    @pytest.mark.slow
    def test_compiled_equals_eager(self, images):
        model = drawn(Attending())
        compiled = CompiledGradient(model, EFFECTIVE)
        target = torch.tensor([[0, 1]] * 3)
        torch.testing.assert_close(
            compiled(images, Target(target))[0], effective_transformation(model, images, target), rtol=1e-3, atol=1e-5
        )
        torch.testing.assert_close(  # a smaller batch is filled up
            compiled(images[:2], Target(target[:2]))[0],
            effective_transformation(model, images[:2], target[:2]),
            rtol=1e-3,
            atol=1e-5,
        )
        against = Contrast(target, "rivals")
        weight, logits = compiled(images, Target.of(against, 3).resolve(model(images)))
        torch.testing.assert_close(weight, effective_transformation(model, images, against), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(logits, model(images).detach(), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(
            effective_transformation(torch.compile(model), images, 0), effective_transformation(model, images, 0)
        )

    def test_forward_is_bit_for_bit_the_models_own(self, model, images):
        with torch.no_grad():
            assert torch.equal(gradient(model, images, 0, rules=EFFECTIVE).logits, model(images))


def test_rule_sets_are_immutable_and_extensible(images):
    def digamma(call, input):
        value = call.func(input.detach())
        return carry(lambda: value, torch.mul, input, saved=(value / input.detach(),))

    extended = EFFECTIVE.extend("with digamma", {"digamma": digamma})
    model = Through(torch.digamma).double()
    assert conservation_gap(model, SMALL.double().abs(), 0, rules=extended) < 1e-12
    with pytest.raises(UnsupportedOperator):
        effective_transformation(model, SMALL.double(), 0)
    with pytest.raises(TypeError):
        EFFECTIVE.rules["digamma"] = digamma
    assert isinstance(extended, RuleSet)


FAMILIES = {
    "ViT": ("vit_tiny_patch16_224", {"img_size": 96}),
    "DeiT": ("deit_tiny_distilled_patch16_224", {"img_size": 96}),
    "DeiT-III": ("deit3_small_patch16_224", {"img_size": 96, "depth": 2}),
    "DINOv2 with registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 56, "depth": 2}),
    "Swin": ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 2, 1), "embed_dim": 48}),
    "BEiT": ("beit_base_patch16_224", {"depth": 2, "embed_dim": 96, "num_heads": 4}),
    "SigLIP": ("vit_base_patch16_siglip_224", {"depth": 2, "embed_dim": 96, "num_heads": 4}),
    "EVA-02": ("eva02_tiny_patch14_224", {"depth": 2}),
    "CLIP": ("vit_base_patch32_clip_quickgelu_224", {"depth": 2, "embed_dim": 96, "num_heads": 4}),
    "ResNet": ("resnet18", {}),
    "ConvNeXt": ("convnextv2_atto", {}),
}
WITHOUT_ATTENTION = {"ResNet", "ConvNeXt"}


@pytest.mark.parametrize(
    ("family", "fused"),
    [(family, fused) for family in FAMILIES for fused in (True, False) if fused or family not in WITHOUT_ATTENTION],
)
def test_conservation(family, fused):
    from timm.layers import set_fused_attn, use_fused_attn

    name, options = FAMILIES[family]
    before = use_fused_attn()
    set_fused_attn(fused)
    try:
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=7, **options).double().eval()
    finally:
        set_fused_attn(bool(before))
    with torch.no_grad():
        for parameter in model.parameters():  # zero-initialised heads and scales would hide an error
            parameter += 0.02 * torch.randn_like(parameter)
    size = 64 if family in WITHOUT_ATTENTION else options.get("img_size", model.default_cfg["input_size"][-1])
    images = torch.randn(1, 3, size, size, dtype=torch.float64)
    assert conservation_gap(model, images, 3) < 1e-9
    parts = gradient(model, images, 3, rules=EFFECTIVE)
    torch.testing.assert_close(parts.logits, model(images).detach(), rtol=1e-9, atol=1e-9)
    assert parts.weight.abs().sum() > 0
