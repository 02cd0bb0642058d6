"""Words of an answer in methods on tokens: where a language model predicts them, and where it has the image."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit.engine.forward import autocast_context
from dave_vit.engine.observation import AttentionMatrix, Observation, TokenLayout, find_text_decoder, find_token_grid
from dave_vit.engine.scores import Token, Word
from dave_vit.engine.targets import ScoreSet, Target
from dave_vit.errors import OptionError, UnsupportedOperator
from dave_vit.methods.base import METHODS, Method, MethodInfo
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import TokenMethod, explain_grids


def words_of(target: Target) -> list[Word]:
    """Return the words of a target; raise OptionError for a target that is none."""
    words = []
    for part in target.score.parts if isinstance(target.score, ScoreSet) else [target.score]:
        if isinstance(part, Token):
            part = Word((part.token,), (part.position,))
        if not isinstance(part, Word):
            raise OptionError("this method explains words of an answer here; give the score of a word or a token")
        words.append(part)
    return words


def vision_features(observed: Observation, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the tokens of the last vision layer that a word depends on, and a function that arranges them in a grid.

    Where the vision encoder packs its tokens, these are the image's tokens as they enter the language model.
    """
    for attention in reversed(_used_layers(observed)):
        tokens, shape = attention.tokens, attention.matrix.shape
        grid = find_token_grid(shape[-1], images.shape[-2:], observed.maps) if observed.maps else None
        if grid is None or shape[-1] >= 2 * math.prod(grid):  # several tiles, as in Llama 3.2
            continue
        if tokens is not None and tokens.shape[:2] == (len(images), shape[-1]) and shape[-2] == shape[-1]:
            return tokens, partial(tokens_to_grid, TokenLayout(grid, shape[-1] - math.prod(grid)))
    tokens, places = observed.text[0].tokens, observed.image_tokens
    layout = observed.writer.layout(images)
    assert tokens is not None
    return tokens, lambda values: tokens_to_grid(layout, values[:, places])


def tokens_to_grid(layout: TokenLayout, tokens: Tensor) -> Tensor:
    """Arrange tokens ``[b, N, D]`` as features ``[b, D, h, w]``."""
    return layout.to_grid(tokens.mT)


def _used_layers(observed: Observation) -> list[AttentionMatrix]:
    """Return the attention of the vision encoder on which the scores depend: some models skip the last layers."""
    if not observed.attention:
        return []
    matrices = [layer.matrix for layer in observed.attention]
    slopes = torch.autograd.grad(observed.logits.sum(), matrices, retain_graph=True, allow_unused=True)
    return [layer for layer, slope in zip(observed.attention, slopes, strict=True) if slope is not None]


def residual(matrix: Tensor) -> Tensor:
    """Return A + I with rows scaled to sum to one: ``[b, N, N]``."""
    mixed = matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return mixed / mixed.sum(-1, keepdim=True)


Fuse = Callable[[AttentionMatrix], Tensor]
"""Function from a layer to its attention over all heads, ``[b, L, S]``."""


def roll_words(observed: Observation, images: Tensor, target: Target, fuse: Fuse) -> Tensor:
    """Roll attention out from each word, through the language model and the vision encoder: grids ``[b, K, h, w]``.

    Attention to an image outside of the sequence is averaged with the residual path, as all attention is. The vision
    encoder takes part if its tokens are those that the language model has or attends to.

    Args:
        observed: a pass with attention of a language model.
        images: ``[b, C, H, W]``.
        target: K words.
        fuse: of the heads of each layer.
    """
    words, length = words_of(target), observed.text[-1].matrix.shape[-2]
    row = images.new_zeros(len(images), len(words), length)
    for index, word in enumerate(words):
        for position in word.positions:
            row[:, index, position] += 1 / len(word.positions)
    outside: Tensor | None = None
    for layer in reversed(observed.text):
        attention = fuse(layer).to(row)
        if attention.shape[-2] != length:
            raise observed.writer.refusal()
        if attention.shape[-1] == length:
            row = row @ residual(attention)
        else:
            row = row / (attention.sum(-1) + 1).unsqueeze(1)
            read = row @ attention
            outside = read if outside is None else outside + read
    return _roll_vision(observed, images, row[..., observed.image_tokens] if outside is None else outside, fuse)


def _roll_vision(observed: Observation, images: Tensor, row: Tensor, fuse: Fuse) -> Tensor:
    """Roll weights of image tokens ``[b, K, N]`` out through the vision encoder, and arrange them in its grid."""
    layers = [layer for layer in _used_layers(observed) if layer.matrix.shape[-2] == layer.matrix.shape[-1]]
    sizes = {(len(layer.matrix), layer.matrix.shape[-1]) for layer in layers}
    batch, tokens = sizes.pop() if len(sizes) == 1 else (0, 0)
    grid = find_token_grid(tokens, images.shape[-2:], observed.maps) if observed.maps else None
    if grid is None or batch != len(images) or row.shape[-1] not in (tokens, math.prod(grid)):
        return observed.writer.layout(images).to_grid(row)
    row = torch.nn.functional.pad(row, (tokens - row.shape[-1], 0))  # class and register tokens that were dropped
    for layer in reversed(layers):
        row = row @ residual(fuse(layer).to(row))
    return TokenLayout(grid, tokens - math.prod(grid)).to_grid(row)


_WINDOW = 3  # tokens along a side of the filter
_TINY = 1e-8


@METHODS.register("tam")
class TAM(Method):
    """Logits of a word at the image's tokens, without the interference of the words before.

    The logits of a word at the image's tokens, minus what the tokens before it explain. The map of a token holds its
    logits, above zero, at the image's tokens. From it the interference is subtracted: the average of the maps of other
    tokens before it, weighted by the token's logit where these stand (in the prompt) or are predicted (in the answer),
    and scaled by least squares. A rank Gaussian filter removes noise. The maps of a word's tokens are added up.

    Args:
        model: a vision-language model with one answer, whose language model has the image in its sequence.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(paper="Li et al., ICCV 2025", passes="1 forward", resolution="patch")
    _why_no_clips = TokenMethod._why_no_clips

    @torch.no_grad()
    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        model: Any = self.model
        decoder = find_text_decoder(model)
        if decoder is None or not decoder.image_tokens:
            raise UnsupportedOperator(
                "tam explains words of a language model that has the patches of the image in its sequence, and this "
                "model has none; use dave, attn_lrp, gradcam or rollout"
            )
        places = list(decoder.image_tokens)
        layout = decoder.layout(images)
        with autocast_context(images, self.autocast):
            logits = model.compute_all_logits(images).float().clamp(min=0)  # [b, L, vocabulary]
        special = {*model.tokenizer.all_special_ids, *model.token_ids[0, places].tolist()}
        tokens = model.token_ids[0].tolist()
        start = len(tokens) - len(model.tokens)  # a token of the answer is read where it is predicted
        text = [(index, token, index - (index >= start)) for index, token in enumerate(tokens) if token not in special]
        maps = [self._map_word(word, logits, places, text) for word in words_of(target)]
        return explain_grids(filter_by_rank(layout.to_grid(torch.stack(maps, 1))), images, target)

    @staticmethod
    def _map_word(word: Word, logits: Tensor, places: list[int], text: list[tuple[int, int, int]]) -> Tensor:
        """Return the activation of a word at the image's tokens, ``[b, N]``.

        Args:
            word: with the positions at which its tokens are predicted.
            logits: ``[b, L, vocabulary]``.
            places: of the image's tokens.
            text: index, token and position at which it is read, of all tokens that are text.
        """
        maps = []
        for token, position in zip(word.tokens, word.positions, strict=True):
            own = logits[:, places, token]  # [b, N]
            last = position % logits.shape[1]
            before = [(other, at) for index, other, at in text if index <= last and other != token]
            tokens, positions = [other for other, _ in before], [at for _, at in before]
            others = logits[:, places][..., tokens]  # [b, N, context]
            weights = logits[:, positions, token]  # [b, context]
            interference = (others * weights.unsqueeze(1)).sum(-1) / (weights.sum(-1, keepdim=True) + _TINY)
            # less the multiple of the interference that explains most of it
            scale = (own * interference).sum(-1, keepdim=True) / (interference.square().sum(-1, keepdim=True) + _TINY)
            maps.append((own - scale * interference).clamp(min=0))
        return torch.stack(maps).sum(0)


def filter_by_rank(grids: Tensor) -> Tensor:
    """Average each window of grids ``[b, K, h, w]`` in the order of its values, with a Gaussian around the median.

    Its width, in ranks, is the coefficient of variation of the window.
    """
    reach = _WINDOW // 2
    mode = "reflect" if min(grids.shape[-2:]) > reach else "replicate"
    windows = F.pad(grids, (reach,) * 4, mode=mode).unfold(2, _WINDOW, 1).unfold(3, _WINDOW, 1)
    ranked = windows.flatten(4).sort(-1).values  # [b, K, h, w, window]
    deviation = ranked.std(-1, correction=0, keepdim=True) / (ranked.mean(-1, keepdim=True) + _TINY)
    ranks = torch.arange(_WINDOW**2, device=grids.device, dtype=grids.dtype) - _WINDOW**2 // 2
    weights = torch.exp(-ranks.square() / (2 * deviation.square() + _TINY))
    return (ranked * weights).sum(-1) / weights.sum(-1)
