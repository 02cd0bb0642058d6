"""Methods that read the tokens after every block, or cluster channels: LeGrad, TIS, ViT-CX."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype, working_dtype
from dave_vit._internal.schema import Bounds, Count, NonNegative
from dave_vit.engine import PLAIN, Call, RuleSet, carry
from dave_vit.engine.forward import Read
from dave_vit.engine.observation import AttentionMatrix, Observation, find_text_decoder, observe
from dave_vit.engine.rules.attention import is_attention
from dave_vit.engine.rules.linear import ordinary
from dave_vit.engine.targets import Target, class_logits
from dave_vit.errors import OptionError, UnsupportedOperator, first_line, import_optional
from dave_vit.methods.base import METHODS, Method, MethodInfo
from dave_vit.methods.cams import features
from dave_vit.methods.constants import scale_to_unit, to_explanation, upsample
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.masking import Score, score_rows, target_scores
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import (
    Recorded,
    TokenGraph,
    TokenMethod,
    gradients,
    record_blocks,
    refuse_words,
    tap_blocks,
    token_graph,
)
from dave_vit.neighborhood.draws import normal_samples, sample_generator

_READOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "model": lambda tokens: tokens,
    "cls": lambda tokens: tokens[:, :1].expand_as(tokens),
    "mean": lambda tokens: tokens.mean(1, keepdim=True).expand_as(tokens),
}


@METHODS.register("legrad")
class LeGrad(TokenMethod):
    """Positive gradient of every layer's class score with respect to its attention.

    The tokens after each block go through the model's final norm and head, which gives a class score for every layer.
    Its gradient with respect to the attention of this block alone is clamped at zero and averaged over heads and
    queries.

    Args:
        model: a model with softmax attention among all tokens, whose blocks are modules in a list.
        layers: indices of the blocks that count; all by default. The authors' CLIP code takes the last two.
        readout: which tokens the head sees: "model" leaves it to the model; "cls" replaces each token by the first one,
            "mean" by the mean of all tokens. The authors' CLIP code takes the mean.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(paper="Bousselham et al., ICCV 2025", passes="1 forward, 1 backward")

    layers: Sequence[int] | None = None
    readout: Literal["model", "cls", "mean"] = "model"

    def _subject(self, target: Target) -> nn.Module:
        refuse_words(find_text_decoder(self.model))
        return Layered(getattr(self.model, "_orig_mod", self.model), _READOUTS[self.readout], target.read)

    def _read(self, target: Target) -> Read:
        return class_logits  # read already, of all layers together

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        layered = cast(Layered, observed.model)
        matrices = [attention.matrix for attention in _block_attention(observed, layered)]
        slopes = gradients(layered.logits.flatten(0, 1), target.repeat(len(matrices)), matrices)  # K lists
        depth = len(matrices)
        chosen = range(depth) if self.layers is None else self.layers
        if not chosen or not all(-depth <= index < depth for index in chosen):
            raise OptionError(f"layers {list(chosen)}; the model has layers 0 to {depth - 1}")
        # The positive part is averaged over heads and queries: one value per key.
        gains = [[grad.to(working_dtype(grad.dtype)).clamp(min=0).mean((1, 2)) for grad in column] for column in slopes]
        maps = [torch.stack([column[index] for index in chosen]).mean(0) for column in gains]  # [b, N]
        return token_graph(observed, images).layout.to_grid(torch.stack(maps, 1))


class Layered(nn.Module):
    """A model whose head also sees the tokens of every block, in the same forward pass.

    Blocks are cut from each other, so that the score of a layer depends on the attention of its own block only.

    Attributes:
        blocks: paths of the blocks, known after a pass.
        logits: of the tokens of each layer, ``[layers, b, classes]``.
    """

    def __init__(self, model: nn.Module, readout: Callable[[Tensor], Tensor], read: Read = class_logits) -> None:
        super().__init__()
        self.model, self._readout, self._read = model, readout, read
        self.blocks: list[str] = []
        self.logits = torch.empty(0)

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's own logits."""
        with tap_blocks(self, len(inputs), self._tap):
            output = self._run(inputs)
            logits = self._read(output, len(inputs) * (1 + len(self.blocks)))
        if not self.blocks:
            return logits
        self.logits = logits[len(inputs) :].unflatten(0, (len(self.blocks), -1))
        return logits[: len(inputs)]

    def _run(self, inputs: Tensor) -> Any:
        try:
            return self.model(inputs)
        except RuntimeError as error:
            if not self.blocks or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            why = first_line(error)
            raise _refusal(f"what follows the blocks does not take the tokens of several layers ({why})") from error

    def _tap(self, paths: list[str], states: list[Tensor]) -> Tensor:
        """Cut a block from the next one; after the last block, append the tokens of all layers to the batch."""
        tokens = states[-1]
        if len(states) < len(paths):
            return carry(tokens.clone, lambda grad: (None,), tokens)  # hands nothing back
        self.blocks = paths
        return torch.cat([tokens, *map(self._readout, states)])  # [(1 + layers) * b, N, D]


def _block_attention(observed: Observation, layered: Layered) -> list[AttentionMatrix]:
    """Return the one attention matrix of each block; attention pooling after the blocks is left out."""
    observed.attention = [each for each in observed.attention if each.matrix.shape[-2] == each.matrix.shape[-1]]
    within = [[one for one in observed.attention if f"{one.module}.".startswith(f"{path}.")] for path in layered.blocks]
    if not within or any(len(block) != 1 for block in within) or len(within) != len(observed.attention):
        raise _refusal("its blocks are not a list of modules that each hold one attention among all tokens")
    return [block[0] for block in within]


def _refusal(why: str) -> UnsupportedOperator:
    return UnsupportedOperator(
        f"legrad reads the tokens out after every block, and in this model {why}; use chefer_generic, or dave, which "
        "works on any model"
    )


_ROUNDS = 100  # of k-means, which comes to rest long before


@METHODS.register("tis")
class TIS(TokenMethod):
    """Mean probability of the class over samples of tokens that a patch is part of.

    The mean score of the samples that contain a token. Each channel of each block's tokens is a map of the patches.
    These maps are clustered by k-means; each centre gives a sample, which keeps the patches where the centre is
    highest. The other tokens are removed from the sequence, not masked in the image.

    Args:
        model: a model with softmax attention among all tokens, whose blocks are modules in a list.
        samples: centres.
        seed: of the channels that k-means begins with.
        kept: share of the patches that a sample keeps.
        score: the class's "probability", as published, or its "logit"; other targets are their own number.
        options: ``resolution``, ``chunk`` (samples in one forward pass) and ``autocast``.
    """

    info = MethodInfo(paper="Englebert et al., ICCV 2023 workshop", passes="1 + T forward")
    _budget_option = ("samples", 1)
    samples: Count = 1024
    seed: int = 0
    kept: Annotated[float, Bounds(above=0, at_most=1)] = 0.5
    score: Score = "probability"

    def _subject(self, target: Target) -> nn.Module:
        return Recorded(self.model, record_blocks)

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        graph = token_graph(observed, images)
        _check_readout(graph, observed)
        channels = _block_channels(cast(Recorded, observed.model).record, graph.layout.tokens)  # [b, channels, N]
        grids = []
        for index, points in enumerate(channels[..., graph.layout.prefix :]):
            centres = kmeans_centres(points.to(precise_dtype(points.device)), self.samples, self.seed)
            best = centres.topk(max(1, int(self.kept * points.shape[1])), 1).indices
            shown = torch.zeros_like(centres, dtype=torch.bool).scatter(1, best, value=True)  # [T, patches]
            kept = nn.functional.pad(shown, (graph.layout.prefix, 0), value=True)  # class and register tokens stay
            scores = self._score_tokens(images[index], target.part(index, index + 1), kept, pass_size)
            weight = shown.to(scores.dtype)
            grids.append(scores.T @ weight / weight.sum(0).clamp(min=1))  # [K, patches]
        return torch.stack(grids).reshape(len(images), -1, *graph.layout.grid)

    def _score_tokens(self, image: Tensor, target: Target, kept: Tensor, pass_size: PassSize) -> Tensor:
        """Return the scores ``[T, K]`` of one image ``[C, H, W]`` of which some tokens ``[T, N]`` are kept."""

        def compute(start: int, stop: int) -> Tensor:
            rows, repeated = image.expand(stop - start, *image.shape), target.repeat(stop - start)
            rules = keep_tokens(kept[start:stop])
            with observe(self.model, rows, rules=rules, autocast=self.autocast, read=repeated.read) as observed:
                return target_scores(observed.logits.detach(), repeated, self.score)

        return torch.cat(pass_size.run_chunks(compute, len(kept)))


def keep_tokens(kept: Tensor) -> RuleSet:
    """Return rules for one forward pass in which attention and means ignore the tokens that are left out.

    The other tokens come out as if those had been removed from the sequence.

    Args:
        kept: True for the tokens that are kept, for each row ``[rows, N]``.
    """
    rows, tokens = kept.shape

    def softmax(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_attention(input, *args, **kwargs) and input.shape[-1] == tokens:
            keys = kept.repeat_interleave(len(input) // rows, 0)  # [rows, N] or [rows * heads, N]
            input = input.masked_fill(~keys.view(len(input), *[1] * (input.ndim - 2), tokens), -float("inf"))
        return call.func(input, *args, **kwargs)  # type: ignore[no-any-return]

    def mean(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        over = kwargs.get("dim", args[0] if args else None)
        if input.ndim != 3 or len(input) != rows or over not in (1, [1], (1,)) or input.shape[1] > tokens:
            return ordinary(call, input, *args, **kwargs)  # type: ignore[no-any-return]
        weight = kept[:, -input.shape[1] :, None].to(input.dtype)  # class and register tokens may be left out before
        keepdim = kwargs.get("keepdim", len(args) > 1 and args[1])
        return (input * weight).sum(1, keepdim=keepdim) / (weight.sum(1, keepdim=True) if keepdim else weight.sum(1))

    return PLAIN.extend("sampled tokens", {**dict.fromkeys(["softmax", "_softmax"], softmax), "mean": mean})


def kmeans_centres(points: Tensor, count: int, seed: int) -> Tensor:
    """Return cluster centres of points ``[n, D]`` by Lloyd's algorithm, ``[count, D]``; all points if n <= count.

    It begins with points drawn at random. A centre that loses all its points stays where it is.
    """
    if len(points) <= count:
        return points
    initial = torch.randperm(len(points), generator=sample_generator(seed, 0, "noise"))[:count]
    centres, before = points[initial.to(points.device)], None
    for _ in range(_ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)  # [n]
        if before is not None and torch.equal(nearest, before):
            break
        members = nn.functional.one_hot(nearest, count).to(points.dtype)  # [n, count]; a product adds in a fixed order
        sizes = members.sum(0).unsqueeze(1)
        centres = torch.where(sizes > 0, members.T @ points / sizes.clamp(min=1), centres)
        before = nearest
    return centres


def _check_readout(graph: TokenGraph, observed: Observation) -> None:
    """Refuse models in whose read-out a token that is taken out would still count."""
    read = (graph.readout() > 0).sum(-1)
    if graph.pooling is None and observed.pooled is None and bool((read > 1).any()):
        raise UnsupportedOperator(
            "tis takes tokens out, and this model reads all of them in a way that is neither attention nor a mean; use "
            "rise, which covers places of the image instead"
        )


def _block_channels(recorded: dict[str, list[Tensor]], tokens: int) -> Tensor:
    """Return all channels of all blocks, as values of the tokens: ``[b, channels, tokens]``."""
    for states in recorded.values():
        if states[0].shape[1] == tokens:
            return torch.cat(states, 2).mT
    raise UnsupportedOperator(
        "tis reads the tokens after every block, and this model's blocks are not a list of modules that return them; "
        "use chefer_generic, or dave, which works on any model"
    )


@METHODS.register("vit_cx")
class ViTCX(Method):
    """Clusters of the last block's feature maps, weighted by the class's probability under them.

    Clusters of feature maps used as masks, weighted by the score under them and divided by coverage. The features are
    those of ``gradcam``. Each channel, enlarged to the image and scaled from 0 to 1, is a mask; masks that point in
    nearly the same direction are added up. Hidden pixels get noise, and the effect of the noise alone is subtracted
    from the score.

    Args:
        model: any module that maps inputs to logits.
        seed: of the noise: the same for every image, batch and chunk.
        distance: masks are joined as long as no two of a cluster are farther apart than this in cosine distance.
        noise: standard deviation, in units of the preprocessed image.
        score: the class's "probability", as published, or its "logit"; other targets are their own number.
        options: ``chunk`` (masked images in one forward pass) and ``autocast``.
    """

    info = MethodInfo(paper="Xie et al., IJCAI 2023", passes="1 + 2 N forward, N being the clusters")
    _why_no_clips = "hides places of one image"
    _kept, _resolution = "attention", "patch"
    seed: int = 0
    distance: NonNegative = 0.1
    noise: NonNegative = 0.1
    score: Score = "probability"

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        with observe(self.model, images, autocast=self.autocast, read=target.read) as observed:
            target = target.resolve(observed.logits)
            clean = target_scores(observed.logits.detach(), target, self.score)  # [b, K]
            source, to_grid = features(observed, images)
            values = to_grid(source.detach()).to(images.dtype)  # [b, D, h, w]
        maps = []
        for index, channels in enumerate(values):
            image = images[index : index + 1]
            channel_masks = scale_to_unit(upsample(channels[None], images.shape[-2:]))[0]  # [D, H, W]
            masks = cluster_masks(channel_masks, self.distance)  # [N, H, W]
            effects = clean[index] + self._effects(image, target.part(index, index + 1), masks, pass_size)  # [N, K]
            # Divided by the coverage, so that pixels under many masks count no more.
            shares = masks / masks.sum(0).clamp(min=torch.finfo(masks.dtype).tiny)
            maps.append(torch.einsum("nk,nhw->khw", effects.to(shares.dtype), shares) / len(masks))
        return to_explanation(torch.stack(maps), images, target)

    def _effects(self, image: Tensor, target: Target, masks: Tensor, pass_size: PassSize) -> Tensor:
        """Return how much each mask ``[N, H, W]`` changes the score beyond the effect of its noise: ``[N, K]``."""
        parts, size = [], max(1, pass_size.rows // 2)
        for start in range(0, len(masks), size):
            some = masks[start : start + size][:, None, None]  # [n, 1, 1, H, W]
            noise = self._noise(image, start, len(some)) * (1 - some)
            rows = torch.cat([image * some + noise, image + noise])  # [2 n, 1, C, H, W]
            masked, noisy = score_rows(self, rows, target, pass_size, self.score)[:, 0].chunk(2)
            parts.append(masked - noisy)
        return torch.cat(parts)

    def _noise(self, image: Tensor, start: int, count: int) -> Tensor:
        eps = normal_samples(self.seed, image.shape, start, start + count)
        return self.noise * eps.to(image.device, image.dtype)  # [n, 1, C, H, W]


def cluster_masks(masks: Tensor, distance: float) -> Tensor:
    """Merge masks ``[D, H, W]`` by complete linkage, scaled from 0 to 1: ``[N, H, W]``, by their first member."""
    hierarchy = import_optional("scipy.cluster.hierarchy", extra="eval")
    flat = nn.functional.normalize(masks.flatten(1), dim=1)
    apart = (1 - flat @ flat.T).cpu().double()
    labels = torch.ones(len(apart))
    if len(apart) > 1:
        above = apart[*torch.triu_indices(len(apart), len(apart), 1)].clamp(min=0)
        tree = hierarchy.linkage(above.numpy(), "complete")
        labels = torch.from_numpy(hierarchy.fcluster(tree, distance, "distance"))
    first = sorted(set(labels.tolist()), key=labels.tolist().index)
    members = (labels == torch.tensor(first)[:, None]).to(masks.device, masks.dtype)  # [N, D]
    return scale_to_unit(torch.einsum("nd,dhw->nhw", members, masks))
