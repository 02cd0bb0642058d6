"""LibraGrad against plain torch in which the same paths are cut by hand, and by its completeness."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny_models
from dave_vit import create_method
from dave_vit.errors import DaveError, OptionError

X, TARGET = tiny_models.images(2, torch.float64), [1, 3]


def halved(value: Tensor) -> Tensor:
    """The same value with half of its derivative."""
    return value.detach() / 2 + value / 2


def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt().detach()
    return centred / spread * layer.weight + layer.bias


def gated(function, x: Tensor) -> Tensor:
    return x * (function(x) / x).detach()


def mlp(block: nn.Module, x: Tensor) -> Tensor:
    if hasattr(block.mlp, "fc1_g"):
        return block.mlp.fc2(halved(gated(F.silu, block.mlp.fc1_g(x)) * block.mlp.fc1_x(x)))
    return block.mlp.fc2(gated(F.gelu, block.mlp.fc1(x)))


def balanced(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits by the paper's backward rules, and the normed tokens of the last block."""
    x = model._pos_embed(model.patch_embed(x))
    for block in model.blocks:
        normed = norm(block.norm1, x)
        q, k, v = block.attn.qkv(normed).unflatten(-1, (3, block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.mT * block.attn.scale).softmax(-1).detach() @ v
        x = x + block.attn.proj(mixed.transpose(1, 2).flatten(2))
        x = x + mlp(block, norm(block.norm2, x))
    return model.head(norm(model.norm, x)[:, 0]), normed


@pytest.fixture(scope="module", params=["plain", "swiglu"])
def model(request) -> nn.Module:
    if request.param == "plain":
        return tiny_models.vit().double()
    from timm.layers import SwiGLU

    return tiny_models.vit(mlp_layer=SwiGLU, act_layer=nn.SiLU).double()


def test_the_reference_keeps_the_forward_pass(model):
    torch.testing.assert_close(balanced(model, X)[0], model(X))


def test_input_x_gradient(model):
    leaf = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(balanced(model, leaf)[0][range(2), TARGET].sum(), leaf)
    found = create_method("libragrad", model, base="input_x_gradient").attribute(X, TARGET)
    torch.testing.assert_close(found, slope * X)


def test_gradcam(model):
    logits, tokens = balanced(model, X)
    (slope,) = torch.autograd.grad(logits[range(2), TARGET].sum(), tokens)
    slope, held = (part[:, 1:].unflatten(1, (4, 4)).detach() for part in (slope, tokens))  # [B, h, w, D]
    grid = (slope.mean((1, 2), keepdim=True) * held).sum(-1).clamp(min=0)
    expected = F.interpolate(grid[:, None], (32, 32), mode="bilinear")[:, 0]
    torch.testing.assert_close(create_method("libragrad", model, base="gradcam").explain(X, TARGET).map, expected)


def test_fullgrad_is_complete(model):
    """What plain FullGrad of a transformer is not."""
    logits = model(X).detach()[range(2), TARGET]
    torch.testing.assert_close(create_method("libragrad", model).attribute(X, TARGET).sum((1, 2, 3)), logits)
    plain = create_method("fullgrad", model, rescale=False).attribute(X, TARGET).sum((1, 2, 3))
    assert ((plain - logits).abs() > 0.01 * logits.abs()).all()


def test_without_gated_products_it_has_other_names():
    model = tiny_models.vit().double()
    for base, name in (("fullgrad", "omenn"), ("input_x_gradient", "effective")):
        found = create_method("libragrad", model, base=base).attribute(X, TARGET)
        torch.testing.assert_close(found, create_method(name, model).attribute(X, TARGET))


def test_unknown_bases_are_refused():
    with pytest.raises(OptionError, match="base 'chefer'; expected one of fullgrad, gradcam, input_x_gradient"):
        create_method("libragrad", nn.Identity(), base="chefer")


def test_attention_that_is_spelled_out_is_seen_as_well():
    model = tiny_models.vit().double()
    fused = create_method("libragrad", model, base="gradcam").attribute(X, TARGET)
    for block in model.blocks:
        block.attn.fused_attn = False
    torch.testing.assert_close(create_method("libragrad", model, base="gradcam").attribute(X, TARGET), fused)


class Bilinear(nn.Module):
    """Multiplies two streams, and has no softmax that would make scores of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 8, 8), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.stem(x).mean((2, 3)).unsqueeze(2)  # [B, 4, 1]
        return self.head((pooled @ pooled.mT).flatten(1))


def test_scores_without_a_softmax_are_refused():
    for base in ("gradcam", "fullgrad", "input_x_gradient"):
        with pytest.raises(DaveError) as caught:
            create_method("libragrad", Bilinear().double().eval(), base=base).attribute(X, TARGET)
        assert "\n" not in str(caught.value)
