"""Models of several inputs, of which one is explained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dave_vit
import tiny_models
from dave_vit.errors import OptionError

X = tiny_models.images(2, torch.float64)
IDS = torch.tensor([[1, 3, 2]])


class Asked(nn.Module):
    """Scores words for an image, by a question and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 6)
        self.patches = nn.Conv2d(3, 6, 8, 8)
        self.head = nn.Linear(6, 5)

    def forward(self, *, pixel_values, input_ids, weight=None, loud=False):
        assert len(pixel_values) == len(input_ids)
        tokens = torch.cat([self.patches(pixel_values).flatten(2).mT, self.words(input_ids)], 1)
        mixed = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens) + tokens
        logits = self.head(mixed) * (2 if loud else 1)
        return {"logits": logits if weight is None else logits * weight}


MODEL = tiny_models.drawn(Asked()).double()


def test_three_lines_explain_a_model_of_several_inputs():
    bound = dave_vit.with_inputs(MODEL, "pixel_values", input_ids=IDS, weight=torch.tensor(0.5), loud=True)
    word = dave_vit.scores.Token(4)
    attribution = dave_vit.DAVE(bound, samples=3, chunk=2).attribute(X, word)
    assert attribution.shape == X.shape
    assert dave_vit.conservation_gap(bound, X, word) < 1e-9
    own = MODEL(pixel_values=X[:1], input_ids=IDS, weight=0.5, loud=True)["logits"]
    torch.testing.assert_close(bound(X[:1])["logits"], own)
    assert not bound.training


def test_constants_take_the_inputs_type_and_rows():
    bound = dave_vit.with_inputs(MODEL, input_ids=IDS, weight=torch.ones(1, 1, 1, dtype=torch.float32))
    assert bound(X)["logits"].shape == (2, 19, 5)
    assert bound(X)["logits"].dtype == torch.float64


def test_embeddings_may_be_the_explained_input():
    """Of a prompt: one contribution a token and number."""

    class Text(nn.Module):
        def forward(self, inputs_embeds, scale):
            return inputs_embeds.mean(1) * scale

    embedded = torch.randn(2, 3, 4, dtype=torch.float64)
    bound = dave_vit.with_inputs(Text(), "inputs_embeds", scale=2.0)
    weight = dave_vit.effective_transformation(bound, embedded, lambda out: out[:, 1])
    torch.testing.assert_close((weight * embedded).sum(-1), embedded[..., 1] * 2 / 3)


@pytest.mark.parametrize(
    ("explained", "constants", "said"),
    [
        ("pixels", {"input_ids": IDS}, "Asked has no input 'pixels'; it takes pixel_values, input_ids"),
        ("pixel_values", {"ids": IDS}, "no input 'ids'"),
        ("pixel_values", {"input_ids": IDS.repeat(2, 1)}, "input_ids has 2 rows; give one row"),
        ("pixel_values", {"pixel_values": X}, "leave it out"),
    ],
)
def test_errors_are_one_clear_line(explained, constants, said):
    with pytest.raises(OptionError, match=said) as caught:
        dave_vit.with_inputs(MODEL, explained, **constants)
    assert "\n" not in str(caught.value)
