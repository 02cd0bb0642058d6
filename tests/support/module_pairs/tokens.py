"""Fewer tokens and other places: pruning, merging, routing and deformable sampling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from module_pairs.base import GRID, TOKENS, WIDTH, Form, Forms, Function, enter_forms, hold_or_not, image, tokens

N = TOKENS


def saliency(m: Forms, x: Tensor) -> Tensor:
    return (m.b(x) * m.latent).sum(-1)


def prune(m: Forms, x: Tensor, hold: Function) -> Tensor:
    kept = saliency(m, x).topk(4, dim=1).indices
    chosen = x.gather(1, kept.unsqueeze(-1).expand(-1, -1, WIDTH))
    return m.packed(chosen)[..., :WIDTH].mean(1, keepdim=True).expand(-1, N, -1)


def prune_by_sort(m: Forms, x: Tensor, hold: Function) -> Tensor:
    order = torch.argsort(saliency(m, x), dim=1, descending=True)
    return torch.take_along_dim(x, order[:, :5, None], dim=1).sum(1, keepdim=True).repeat(1, N, 1)


def prune_by_index(m: Forms, x: Tensor, hold: Function) -> Tensor:
    kept = torch.topk(saliency(m, x), k=3).indices
    rows = torch.arange(len(x))[:, None]
    return F.pad(x[rows, kept], (0, 0, 0, N - 3))


def prune_by_mask(m: Forms, x: Tensor, hold: Function) -> Tensor:
    score = saliency(m, x)
    return x * (score > score.mean(1, keepdim=True)).unsqueeze(-1)


def prune_by_fill(m: Forms, x: Tensor, hold: Function) -> Tensor:
    score = saliency(m, x)
    return x.masked_fill((score < score.median(1, keepdim=True).values).unsqueeze(-1), 0.0)


def prune_and_fuse(m: Forms, x: Tensor, hold: Function) -> Tensor:
    """EViT: the rest becomes one token."""
    score = hold(saliency(m, x).softmax(1))
    value, order = score.sort(dim=1, descending=True)
    rest = torch.take_along_dim(x, order[:, 4:, None], 1)
    fused = (rest * value[:, 4:, None]).sum(1, keepdim=True)
    return torch.cat([torch.take_along_dim(x, order[:, :4, None], 1), fused.expand(-1, N - 4, -1)], 1)


def merge_similar(m: Forms, x: Tensor, hold: Function) -> Tensor:
    """ToMe: each odd token is added to the even one that it is most similar to."""
    metric = F.normalize(x, dim=-1)
    even, odd = metric[:, ::2], metric[:, 1::2]
    best = (odd @ even.mT).argmax(-1)
    target = x[:, ::2].scatter_add(1, best.unsqueeze(-1).expand(-1, -1, WIDTH), x[:, 1::2])
    return F.pad(target, (0, 0, 0, N - target.shape[1]))


def merge_by_one_hot(m: Forms, x: Tensor, hold: Function) -> Tensor:
    groups = F.one_hot((x @ m.position[0, :3].mT).argmax(-1), 3).to(x.dtype)
    mean = groups.mT @ x / groups.sum(1)[..., None].clamp(min=1)
    return groups @ mean


def merge_by_reduce(m: Forms, x: Tensor, hold: Function) -> Tensor:
    best = (x[:, 1::2] @ x[:, ::2].mT).argmax(-1).unsqueeze(-1).expand(-1, -1, WIDTH)
    target = x[:, ::2].scatter_reduce(1, best, x[:, 1::2], reduce="mean")
    return F.pad(target, (0, 0, 0, N - target.shape[1]))


def route(m: Forms, x: Tensor, hold: Function) -> Tensor:
    """A mixture of experts: the best of two."""
    value, place = hold(m.packed(x)[..., :2].softmax(-1)).max(-1, keepdim=True)
    return value * torch.where(place == 0, m.b(x), m.packed(x)[..., WIDTH:])


def branch(m: Forms, x: Tensor, hold: Function) -> Tensor:
    return m.b(x) if bool(x.mean() > 0) else m.packed(x)[..., :WIDTH]


def snap(m: Forms, x: Tensor, hold: Function) -> Tensor:
    """The nearest of some constants scales the tokens."""
    nearest = torch.cdist(hold(x), m.position[0, :4]).argmin(-1)
    return x * m.position[0][nearest]


enter_forms(
    "token pruning",
    "Pruning",
    hold_or_not(
        prune,
        prune_by_sort,
        prune_by_index,
        prune_by_mask,
        prune_by_fill,
        prune_and_fuse,
        merge_similar,
        merge_by_one_hot,
        merge_by_reduce,
        route,
        branch,
        snap,
    ),
    decides=True,
)


def grid(x: Tensor) -> Tensor:
    line = torch.linspace(-0.8, 0.8, GRID, dtype=x.dtype)
    return torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).expand(len(x), -1, -1, -1)


def offsets(m: Forms, x: Tensor) -> Tensor:
    return 0.2 * torch.tanh(m.b(x)[..., :2]).unflatten(1, (GRID, GRID))


def sampled(**options: object) -> Form:
    def sample(m: Forms, x: Tensor, hold: Function) -> Tensor:
        return tokens(F.grid_sample(image(x), grid(x) + hold(offsets(m, x)), **options))

    sample.__name__ = str(options)
    return sample


def sample_by_position(m: Forms, x: Tensor, hold: Function) -> Tensor:
    return tokens(torch.grid_sampler(image(x), grid(x) + hold(offsets(m, x)), 0, 1, False))


def sample_constant(m: Forms, x: Tensor, hold: Function) -> Tensor:
    return tokens(F.grid_sample(input=image(x), grid=grid(x) * 0.7, align_corners=True))


def sample_by_theta(m: Forms, x: Tensor, hold: Function) -> Tensor:
    """A spatial transformer."""
    turn = hold(0.2 * torch.tanh(m.b(x.mean(1)))[:, :6]).view(-1, 2, 3)
    theta = torch.tensor([[1.0, 0, 0], [0, 1, 0]], dtype=x.dtype) + turn
    return tokens(
        F.grid_sample(image(x), F.affine_grid(theta, list(image(x).shape), align_corners=False), align_corners=False)
    )


def sample_by_hand(m: Forms, x: Tensor, hold: Function) -> Tensor:
    """Between two neighbours in a row."""
    place = hold(torch.sigmoid(m.b(x)[..., :1])) * (N - 1.01)
    low = place.floor()
    index, share = low.long(), place - low
    left, right = (torch.gather(x, 1, i.expand_as(x)) for i in (index, index + 1))
    return left * (1 - share) + right * share


enter_forms(
    "deformable sampling",
    "Sampling",
    hold_or_not(
        sampled(align_corners=False),
        sampled(mode="bilinear", padding_mode="border", align_corners=True),
        sampled(mode="nearest", padding_mode="zeros", align_corners=False),
        sampled(mode="bicubic", padding_mode="reflection", align_corners=False),
        sample_by_position,
        sample_constant,
        sample_by_theta,
        sample_by_hand,
    ),
)
