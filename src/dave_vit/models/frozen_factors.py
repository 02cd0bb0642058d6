"""Models of transformers in which more is held than attention matrices.

- A mask is the product of a query's embedding with the features of all pixels, and OWL-ViT multiplies all patches by
  the class token. Both factors depend on the image: the query and the class token are frozen, as an attention matrix
  is; pixels and patches carry.
- Attention of the image over constants (learned queries, a text) is a frozen matrix times constants: a constant. So is
  the quality that D-FINE adds to its logits, which is made of probabilities.
- Qwen3.5's linear attention solves a system for its values, which carry, and for its keys, which are frozen.
- A limit to a range is a gate. So is the activation of Pix2Struct, which is written out in several functions.
- ViLT shuffles its patches, to take some where there are too many; they stay in order where it takes all.
- Some detectors detach what they go on with, for their training; they are explained as if they did not.

The values are the model's own.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dave_vit.engine.states import depends_on_input
from dave_vit.models.adapter import traits_of

Replacements = Mapping[Any, Callable[..., Any]]
"""Functions of torch, and what is called instead of them with the pixels and the arguments."""


def _multiply_masks(pixels: Tensor, equation: str, *operands: Tensor) -> Tensor:
    if equation.replace(" ", "").endswith("bqc,bchw->bqhw"):
        operands = (operands[0].detach(), *operands[1:])
    return torch.einsum(equation, *operands)


def _limit(pixels: Tensor, input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    if min is None or max is None or not min < 0 < max:
        return input.clamp(min, max)
    return F.hardtanh(input, min, max)


def _keep_mask(pixels: Tensor, mask: Tensor, *choices: Tensor) -> Any:
    """Return a mask itself instead of the indices of its true places, as many as the image says."""
    return torch.where(mask, *choices) if choices else (mask,)


def _attend(pixels: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if depends_on_input(query) and not depends_on_input(value):
        value = value + _carry_zero(pixels, value)
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def _attend_packed(pixels: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return ``F.multi_head_attention_forward``, of values ``[S, B, E]``."""
    if depends_on_input(key) and not depends_on_input(value):
        value = value + _carry_zero(pixels, value).transpose(0, 1)
    return F.multi_head_attention_forward(query, key, value, *args, **kwargs)


def _keep_likeliest(pixels: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return ``topk``; what is left of the image in probabilities counts as a constant."""
    values, indices = input.topk(*args, **kwargs)
    return (values * (1 + _carry_zero(pixels, values)) if depends_on_input(values) else values), indices


def _solve(pixels: Tensor, system: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
    """Return the solution for values, the first one of a system; the second one is for keys and frozen."""
    solution: Tensor = torch.linalg.solve_triangular(system, right, **kwargs)
    is_second, system._dave_is_solved = hasattr(system, "_dave_is_solved"), True  # type: ignore[attr-defined]
    return solution.detach() if is_second else solution


def _keep_order(pixels: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return indices drawn without replacement; in order where these are all."""
    return torch.arange(count, device=weights.device) if count == len(weights) else torch.multinomial(weights, count)


def _multiply_by_gate(pixels: Tensor, gate: Tensor, other: Any) -> Tensor:
    """Return a product; of two carriers the first is a gate, made by an activation that is written out."""
    is_gate = gate.requires_grad and isinstance(other, Tensor) and other.requires_grad
    return torch.mul(gate.detach() if is_gate else gate, other)


def _carry_zero(pixels: Tensor, like: Tensor) -> Tensor:
    """Return zeros ``[B, 1, ...]`` that count as linear in the image."""
    return 0 * pixels.flatten(1).sum(1).reshape(-1, *[1] * (like.ndim - 1))


_MASKS: Replacements = {torch.einsum: _multiply_masks}
_CLASS_TOKEN: Replacements = {torch.broadcast_to: lambda pixels, token, size: torch.broadcast_to(token.detach(), size)}
_DETACHED: Replacements = {Tensor.detach: lambda pixels, input: input.clone()}
_CONSTANTS: Replacements = {F.scaled_dot_product_attention: _attend, F.multi_head_attention_forward: _attend_packed}
_KEYS: Replacements = {torch.linalg.solve_triangular: _solve}
_LIMITS: Replacements = {Tensor.clamp: _limit}
REPLACEMENTS: dict[str, Replacements] = {
    **dict.fromkeys(("mask2former", "maskformer", "eomt", "eomt_dinov3"), _MASKS),
    "oneformer": {**_MASKS, **_CONSTANTS, torch.where: _keep_mask},
    **dict.fromkeys(("owlvit", "owlv2"), _CLASS_TOKEN),
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), _DETACHED),
    "d_fine": {**_DETACHED, **_LIMITS, Tensor.topk: _keep_likeliest},
    "rf_detr": {**_DETACHED, **_CONSTANTS},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _KEYS),
    "vilt": {torch.multinomial: _keep_order},
    "pix2struct": {Tensor.mul: _multiply_by_gate},
    "sam3": {**_MASKS, **_CONSTANTS, **_LIMITS},
}
"""By the type of the model."""


class _Replace(TorchFunctionMode):
    def __init__(self, replacements: Replacements, pixels: Tensor) -> None:
        super().__init__()
        self.replacements, self.pixels = replacements, pixels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement, kwargs = self.replacements.get(func), kwargs or {}
        return func(*args, **kwargs) if replacement is None else replacement(self.pixels, *args, **kwargs)


class FrozenFactors(nn.Module):
    """A model of transformers that runs with some functions replaced by others of the same value.

    Args:
        model: takes ``pixel_values``; it is unchanged.
        replacements: the functions.
    """

    def __init__(self, model: Any, replacements: Replacements) -> None:
        super().__init__()
        self.model, self.replacements = model, replacements
        self.traits = traits_of(model)
        self.train(model.training)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, such as its configuration."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> Any:
        """Return the model's output."""
        with _Replace(self.replacements, pixel_values):
            return self.model(pixel_values=pixel_values, **kwargs)


class DocumentReader(FrozenFactors):
    """Pix2Struct with images instead of patches that begin with their row and column, which depend on no image."""

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> Any:
        """Return the output of the decoder for images ``[B, C, H, W]``."""
        encoder = self.model.encoder
        embeddings = encoder.embeddings
        side = math.isqrt(embeddings.patch_projection.in_features // pixel_values.shape[1])
        patches = F.pixel_unshuffle(pixel_values, side).unflatten(1, (-1, side**2)).permute(0, 3, 4, 2, 1).flatten(3)
        rows, columns = (torch.arange(1, 1 + count, device=patches.device) for count in patches.shape[1:3])
        places = embeddings.row_embedder(rows).unsqueeze(1) + embeddings.column_embedder(columns)
        with _Replace(self.replacements, pixel_values):
            states = encoder.encoder((embeddings.patch_projection(patches) + places).flatten(1, 2)).last_hidden_state
            return self.model(encoder_outputs=(encoder.layernorm(states),), **kwargs)


class QuestionReader(FrozenFactors):
    """BLIP for questions, with the logits of its answers, which its own forward pass keeps to itself."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the module that embeds the answer; the question goes into an encoder."""
        return self.model.text_decoder.get_input_embeddings()  # type: ignore[no-any-return]

    def forward(  # type: ignore[override]
        self, pixel_values: Tensor, input_ids: Tensor, decoder_input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Any:
        """Return the output of the decoder."""
        image = self.model.vision_model(pixel_values=pixel_values).last_hidden_state
        texts = {"input_ids": input_ids, "attention_mask": attention_mask}
        question = self.model.text_encoder(**texts, encoder_hidden_states=image)[0]
        read = {"encoder_hidden_states": question, "encoder_attention_mask": attention_mask}
        return self.model.text_decoder(input_ids=decoder_input_ids, **read)


def freeze_factors(model: Any) -> Any:
    """Return a model of transformers with all held that it needs; the model itself where it needs no more."""
    if hasattr(model, "text_encoder") and hasattr(model, "text_decoder"):
        return QuestionReader(model, {})
    replacements = REPLACEMENTS.get(model.config.model_type)
    kind = DocumentReader if model.config.model_type == "pix2struct" else FrozenFactors
    return model if replacements is None else kind(model, replacements)
