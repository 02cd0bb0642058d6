"""The inherent explanation of B-cos networks."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from dave_vit import create_method
from dave_vit.errors import UnsupportedOperator


def test_equals_the_models_own_explanation_mode():
    from dave_vit.models.architectures.vits import BcosViT

    model = tiny_models.drawn(BcosViT(5, dim=16, depth=2, heads=2, size=32))
    images = torch.rand(2, 6, 32, 32, generator=torch.Generator().manual_seed(0))
    found = create_method("bcos", model).attribute(images, [1, 2])
    for module in model.modules():
        if hasattr(module, "set_explanation_mode"):
            module.set_explanation_mode(True)
    leaf = images.clone().requires_grad_()
    model(leaf)[[0, 1], [1, 2]].sum().backward()
    expected = leaf.grad * images
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_other_models_are_refused():
    with pytest.raises(UnsupportedOperator, match="no B-cos module"):
        create_method("bcos", tiny_models.vit())
