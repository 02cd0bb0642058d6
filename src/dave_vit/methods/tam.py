"""Token Activation Map: what the image's tokens in a language model say of a word, without what earlier words say."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit.engine.forward import autocast_context
from dave_vit.engine.observation import find_text_decoder
from dave_vit.engine.scores import Word
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import METHODS, Method, MethodInfo
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import TokenMethod, explain_grids
from dave_vit.methods.words import image_layout, words_of

_WINDOW = 3  # tokens along a side of the filter
_TINY = 1e-8


@METHODS.register("tam")
class TAM(Method):
    """The logits of a word at the image's tokens, minus what the tokens before it explain.

    The map of a token holds its logits, above zero, at the image's tokens. From it the interference is subtracted: the
    average of the maps of other tokens before it, weighted by the token's logit where these stand (in the prompt) or
    are predicted (in the answer), and scaled by least squares. A rank Gaussian filter removes noise. The maps of a
    word's tokens are added up.

    Args:
        model: a vision-language model with one answer, whose language model has the image in its sequence.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(
        "Logits of a word at the image's tokens, without the interference of the words before.",
        "Li et al., ICCV 2025",
        "1 forward",
        resolution="patch",
    )
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
        layout = image_layout(decoder, images)
        with autocast_context(images, self.autocast):
            logits = model.compute_all_logits(images).float().clamp(min=0)  # [b, L, vocabulary]
        special = {*model.tokenizer.all_special_ids, *model.token_ids[0, list(decoder.image_tokens)].tolist()}
        context = _Context(model.token_ids[0].tolist(), len(model.tokens), special)
        maps = [self._map_word(word, logits, list(decoder.image_tokens), context) for word in words_of(target)]
        return explain_grids(filter_by_rank(layout.to_grid(torch.stack(maps, 1))), images, target)

    @staticmethod
    def _map_word(word: Word, logits: Tensor, places: list[int], context: _Context) -> Tensor:
        """Return the activation of a word at the image's tokens, ``[b, N]``."""
        maps = []
        for token, position in zip(word.tokens, word.positions, strict=True):
            own = logits[:, places, token]  # [b, N]
            tokens, positions = context.before(token, position)
            others = logits[:, places][..., tokens]  # [b, N, context]
            weights = logits[:, positions, token]  # [b, context]
            interference = (others * weights.unsqueeze(1)).sum(-1) / (weights.sum(-1, keepdim=True) + _TINY)
            maps.append(subtract_scaled(own, interference))
        return torch.stack(maps).sum(0)


class _Context:
    """The text of a sequence: its tokens, and the positions at which each is read.

    Args:
        tokens: of the whole sequence.
        answer: how many of them are the answer.
        skipped: tokens that are no text.
    """

    def __init__(self, tokens: list[int], answer: int, skipped: set[int]) -> None:
        start = len(tokens) - answer  # a token of the answer is read where it is predicted
        self._length = len(tokens)
        text = [index for index, token in enumerate(tokens) if token not in skipped]
        self._text = [(index, tokens[index], index - (index >= start)) for index in text]

    def before(self, token: int, position: int) -> tuple[list[int], list[int]]:
        """Return other tokens before the one that is predicted at a position, and where these are read."""
        last = position % self._length
        found = [(other, place) for index, other, place in self._text if index <= last and other != token]
        return [other for other, _ in found], [place for _, place in found]


def subtract_scaled(values: Tensor, interference: Tensor) -> Tensor:
    """Subtract the multiple of a map ``[b, N]`` that explains most of another, and keep what is positive."""
    scale = (values * interference).sum(-1, keepdim=True) / (interference.square().sum(-1, keepdim=True) + _TINY)
    return (values - scale * interference).clamp(min=0)


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
