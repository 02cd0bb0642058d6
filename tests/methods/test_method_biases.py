"""Methods that attribute biases: their sums, and the places where biases act."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tiny_models
from dave_vit import create_method
from dave_vit.engine.observation import find_token_grid
from dave_vit.errors import OptionError
from dave_vit.methods.constants import spread_evenly

FAMILIES = dict(tiny_models.FAMILIES)
X = tiny_models.images(2, torch.float64)


def double(family: str) -> nn.Module:
    return copy.deepcopy(FAMILIES[family]()).double()


class TestConservation:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_omenn_sums_to_the_logit(self, family):
        model = double(family)
        found = create_method("omenn", model).attribute(X, [1, 2])
        expected = model(X)[[0, 1], [1, 2]]
        torch.testing.assert_close(found.flatten(1).sum(1), expected, rtol=1e-10, atol=1e-12)

    def test_fullgrad_of_a_piecewise_linear_model_sums_to_the_logit(self):
        model = double("cnn")
        found = create_method("fullgrad", model, rescale=False).attribute(X, [1, 2])
        torch.testing.assert_close(found.flatten(1).sum(1), model(X)[[0, 1], [1, 2]], rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("family", ["vit", "cnn"])
    def test_several_targets_each_sum_to_their_own_logit(self, family):
        model = double(family)
        found = create_method("omenn", model).attribute(X, [[0, 3], [4, 1]])
        expected = model(X).gather(1, torch.tensor([[0, 3], [4, 1]]))
        torch.testing.assert_close(found.flatten(2).sum(2), expected, rtol=1e-10, atol=1e-12)


class Turned(nn.Module):
    """A model that turns its batch around and back: constants of an image lie at another one's place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 4, 8, stride=8), nn.Linear(4 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.embed(x.flip(0))).flip(0).flatten(1))


class SequenceFirst(nn.Module):
    """Tokens [N, B, D], as many as there are images in the batch of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Conv2d(3, 4, 16, stride=16), nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).permute(2, 0, 1)  # [4, B, 4]
        return self.head(torch.relu(self.mix(tokens)).mean(0))


FOUR, TARGETS = tiny_models.images(4, torch.float64), [[0, 3], [4, 1], [2, 0], [1, 2]]
MODELS = {**FAMILIES, "turned": Turned, "sequence first": SequenceFirst}


class TestBatches:
    """A batch in one pass has the attributions of its images alone."""

    @pytest.mark.parametrize("name", ["omenn", "fullgrad", "libragrad"])
    @pytest.mark.parametrize("family", MODELS)
    def test_are_images_alone(self, family, name):
        torch.manual_seed(0)
        method = create_method(name, copy.deepcopy(MODELS[family]()).double().eval())
        alone = [method.attribute(FOUR[i : i + 1], [TARGETS[i]]) for i in range(4)]
        torch.testing.assert_close(method.attribute(FOUR, TARGETS), torch.cat(alone), rtol=1e-10, atol=1e-12)

    def test_go_through_in_one_pass(self):
        model, sizes = double("vit"), []
        method = create_method("omenn", model)
        with model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output))):
            method.attribute(FOUR, TARGETS)  # the model is looked into once
            sizes.clear()
            method.attribute(FOUR, TARGETS)
        assert sizes == [4]


class Patches(nn.Module):
    """A linear model of patches: with a bias and a position embedding for each, a class token, and a head bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 4, 8, stride=8), nn.Linear(4 * 9, 5)
        self.position = nn.Parameter(torch.randn(1, 8, 4))
        self.token = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.position
        return self.head(torch.cat([self.token.expand(len(x), -1, -1), tokens], 1).flatten(1))


def test_biases_act_where_they_are():
    torch.manual_seed(0)
    model = Patches().double()
    x = torch.randn(1, 3, 16, 32, dtype=torch.float64)
    biases = create_method("omenn", model).attribute(x, 2) - create_method("effective", model).attribute(x, 2)
    by_token = model.head.weight[2].detach().unflatten(0, (9, 4))  # [9, 4]
    placed = (by_token[1:] * (model.embed.bias + model.position[0])).sum(1)  # [8]
    unplaced = (by_token[0] * model.token[0, 0]).sum() + model.head.bias[2]
    expected = placed.reshape(2, 4) + unplaced / 8
    found = biases.sum(1).unflatten(1, (2, 8)).unflatten(3, (4, 8)).sum((2, 4))[0]
    torch.testing.assert_close(found, expected.detach())


class TestFullGrad:
    def test_by_hand(self):
        """Two channels of a convolution and the input, each rescaled to [0, 1] by its absolute value."""
        model = nn.Sequential(nn.Conv2d(1, 2, 2, stride=2), nn.Flatten(), nn.Linear(8, 3)).double()
        x = torch.randn(1, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        slope = model[2].weight[1].detach().reshape(2, 2, 2)  # [channels, 2, 2]
        biases = (slope * model[0].bias.detach()[:, None, None]).abs()
        layer = sum((channel - channel.min()) / (channel.max() - channel.min()) for channel in biases)
        direct = create_method("input_x_gradient", model).attribute(x, 1)[0, 0].abs()
        direct = (direct - direct.min()) / (direct.max() - direct.min())
        up = nn.functional.interpolate(layer[None, None], (4, 4), mode="bilinear")[0, 0]
        for biases in ("all", "conv"):  # the head's bias has no place in the image
            found = create_method("fullgrad", model, biases=biases).attribute(x, 1)
            torch.testing.assert_close(found[0, 0], direct + up)

    def test_linear_and_norm_biases_count_unless_told_otherwise(self):
        model, x = tiny_models.vit(), tiny_models.images(1)
        found = [create_method("fullgrad", model, biases=biases).attribute(x, 1) for biases in ("all", "conv")]
        assert (found[0] >= found[1]).all()
        assert found[0].sum() > 2 * found[1].sum()

    def test_unknown_choice_is_refused(self):
        with pytest.raises(OptionError, match="linear"):
            create_method("fullgrad", nn.Flatten(), biases="linear")


class TestPlaces:
    @pytest.mark.parametrize(
        ("tokens", "size", "grid"),
        [
            (197, (224, 224), (14, 14)),
            (198, (224, 224), (14, 14)),
            (201, (224, 224), (14, 14)),
            (49, (224, 224), (7, 7)),
            (257, (224, 224), (16, 16)),
            (25, (64, 64), (4, 4)),
            (9, (16, 32), (2, 4)),
        ],
    )
    def test_token_grids(self, tokens, size, grid):
        assert find_token_grid(tokens, size) == grid

    def test_spreading_keeps_sums(self):
        grid = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(spread_evenly(grid, (10, 13)).sum(), grid.sum())
        wide = spread_evenly(grid, (6, 8))
        torch.testing.assert_close(wide.unflatten(0, (3, 2)).unflatten(2, (4, 2)).sum((1, 3)), grid)
