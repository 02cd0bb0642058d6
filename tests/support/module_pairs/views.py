"""Moving numbers about: scatter, masks, in-place writes and views."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from module_pairs.base import GRID, TOKENS, WIDTH, Forms, enter_forms, image, plain, spell, tokens

N = TOKENS

index = lambda m, x: m.order[None, :, None].expand_as(x)  # noqa: E731
held_mean = lambda m, x: torch.zeros_like(x).scatter_add(1, (index(m, x) // 2), x)  # noqa: E731


def place_rows(m: Forms, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, m.order] = x
    return out


def put_rows(m: Forms, x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape)
    return out.index_put((torch.arange(len(x))[:, None], m.order), x)


enter_forms(
    "scatter",
    "Permutation",
    spell(
        lambda m, x: x[:, m.order.argsort()],
        scatter=lambda m, x: torch.zeros_like(x).scatter(1, index(m, x), x),
        scatter_in_place=lambda m, x: torch.zeros_like(x).scatter_(1, index(m, x), x),
        scatter_keywords=lambda m, x: torch.scatter(torch.zeros_like(x), dim=1, index=index(m, x), src=x),
        scatter_add=lambda m, x: torch.zeros_like(x).scatter_add_(dim=1, index=index(m, x), src=x),
        scatter_reduce=lambda m, x: torch.zeros_like(x).scatter_reduce(1, index(m, x), x, reduce="sum"),
        index_copy=lambda m, x: torch.empty_like(x).index_copy_(1, m.order, x),
        index_add=lambda m, x: torch.zeros_like(x).index_add(1, m.order, x),
        index_add_alpha=lambda m, x: torch.zeros_like(x).index_add_(1, m.order, x, alpha=2).div(2),
        rows=place_rows,
        put=put_rows,
        gather=lambda m, x: x.gather(1, m.order.argsort()[None, :, None].expand_as(x)),
        gather_keywords=lambda m, x: torch.gather(input=x, dim=1, index=m.order.argsort()[None, :, None].expand_as(x)),
        select=lambda m, x: torch.index_select(x, 1, m.order.argsort()),
        select_keywords=lambda m, x: torch.index_select(input=x, dim=1, index=m.order.argsort()),
        one_hot=lambda m, x: F.one_hot(m.order, N).to(x.dtype).mT @ x,
        sparse=lambda m, x: torch.stack(
            [
                torch.sparse.mm(
                    torch.sparse_coo_tensor(
                        torch.stack([m.order, torch.arange(N)]), torch.ones(N, dtype=x.dtype), (N, N)
                    ),
                    row,
                )
                for row in x
            ]
        ),
        take=lambda m, x: x.take_along_dim(m.order.argsort()[None, :, None], dim=1),
        list=lambda m, x: torch.stack([x[:, int(i)] for i in m.order.argsort()], dim=1),
    ),
)
enter_forms(
    "scatter",
    "Masks",
    {
        "where": plain(lambda m, x: torch.where(m.mask[0][:, None], x, m.position)),
        "where keywords": plain(lambda m, x: torch.where(condition=m.mask[0][:, None], input=x, other=m.b(x))),
        "where number": plain(lambda m, x: torch.where(m.mask[0][:, None], x, 0.0)),
        "fill": plain(lambda m, x: x.masked_fill(m.mask[1][:, None], 0.5)),
        "fill in place": plain(lambda m, x: m.b(x).masked_fill_(m.mask[1][:, None], 0.5)),
        "boolean rows": plain(lambda m, x: F.pad(x[:, m.mask[0]], (0, 0, 0, N - int(m.mask[0].sum())))),
        "masked select": plain(
            lambda m, x: F.pad(
                x.masked_select(m.mask[0][:, None]).view(len(x), -1, WIDTH), (0, 0, 0, N - int(m.mask[0].sum()))
            )
        ),
        "masked scatter": plain(lambda m, x: torch.zeros_like(x).masked_scatter(m.mask[0][:, None], x[:, m.mask[0]])),
        "embedding tokens": plain(
            lambda m, x: (
                m.position.expand_as(x).clone().masked_scatter(m.mask[0][None, :, None].expand_as(x), x[:, m.mask[0]])
            )
        ),
        "setitem mask": plain(lambda m, x: set_rows(m.b(x), m.mask[0])),
        "triangle": plain(lambda m, x: torch.ones(N, N, dtype=x.dtype).tril() @ x / N),
        "index fill": plain(lambda m, x: x.index_fill(1, m.order[:3], 0.25)),
        "groups": (lambda m, x: torch.zeros_like(x).scatter_reduce(1, index(m, x) // 2, x, "sum"), held_mean),
        "reduce mean": (
            lambda m, x: torch.zeros_like(x).scatter_reduce(1, index(m, x) // 2, x, "mean", include_self=False),
            lambda m, x: (
                held_mean(m, x)
                / torch.ones_like(x)
                .cumsum(1)
                .gather(1, index(m, x))
                .mul(0)
                .add(1)
                .scatter_add(1, index(m, x) // 2, torch.ones_like(x))
                .sub(1)
                .clamp(min=1)
            ),
        ),
    },
)


def set_rows(x: Tensor, rows: Tensor) -> Tensor:
    x[:, rows] = 0.0
    return x


def write_parts(m: Forms, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for row in range(N):
        out[:, row] = x[:, row] * m.scale
    return out


def write_into_view(m: Forms, x: Tensor) -> Tensor:
    y = m.b(x)
    y[:, :3] += m.position[:, :3]
    y[:, 3:].mul_(0.5)
    return y


def write_split(m: Forms, x: Tensor) -> Tensor:
    y = m.b(x)
    left, right = y.narrow(-1, 0, 4), y.narrow(-1, 4, 4)
    left.add_(right)
    return y


def accumulate(m: Forms, x: Tensor) -> Tensor:
    total = torch.zeros(len(x), WIDTH, dtype=x.dtype)
    rows = []
    for row in x.unbind(1):
        total += row
        rows.append(total.clone())
    return torch.stack(rows, 1)


def copy_halves(m: Forms, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), N, WIDTH, dtype=x.dtype)
    out[..., : WIDTH // 2].copy_(x[..., WIDTH // 2 :])
    out[..., WIDTH // 2 :].copy_(x[..., : WIDTH // 2])
    return out


def turn_in_place(m: Forms, x: Tensor) -> Tensor:
    y = m.b(x)
    y.unsqueeze_(1)
    y.squeeze_(1)
    return y.transpose_(1, 2).contiguous().transpose_(1, 2)


def clone_and_write(m: Forms, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, ::2] = y[:, ::2] - 1
    y[:, 0, :] = m.latent
    return y


enter_forms(
    "in-place",
    "Writes",
    {
        "parts": plain(write_parts),
        "view": plain(write_into_view),
        "split": plain(write_split),
        "accumulate": (accumulate, lambda m, x: x.cumsum(1)),
        "halves": (copy_halves, lambda m, x: x.roll(WIDTH // 2, -1)),
        "turn": (turn_in_place, lambda m, x: m.b(x)),
        "clone": (
            clone_and_write,
            lambda m, x: torch.cat(
                [m.latent.expand(len(x), 1, -1), x[:, 1:] - (torch.arange(1, N) % 2 == 0)[:, None].double()], 1
            ),
        ),
        "add": (lambda m, x: m.b(x).add_(x, alpha=0.5).sub_(1), lambda m, x: m.b(x) + 0.5 * x - 1),
        "operators": (
            lambda m, x: in_place_operators(m, x),
            lambda m, x: (m.b(x) + x - m.position) * m.scale / 2,
        ),
        "relu": (lambda m, x: m.b(x).relu_(), lambda m, x: m.b(x).relu()),
        "module relu": (lambda m, x: torch.nn.ReLU(inplace=True)(m.b(x)), lambda m, x: m.b(x).relu()),
        "mul sigmoid": (lambda m, x: m.b(x).mul_(x.sigmoid()), lambda m, x: m.b(x) * x.sigmoid().detach()),
        "div norm": (
            lambda m, x: m.b(x).div_(x.norm(dim=-1, keepdim=True)),
            lambda m, x: m.b(x) / x.norm(dim=-1, keepdim=True).detach(),
        ),
        "zero": (lambda m, x: m.b(x).zero_() + x, lambda m, x: x),
        "fill": (lambda m, x: m.b(x).fill_(0.5) + x, lambda m, x: x + 0.5),
        "copy": (lambda m, x: m.b(x).copy_(x), lambda m, x: x),
        "addcmul": (lambda m, x: m.b(x).addcmul_(x, m.scale, value=0.5), lambda m, x: m.b(x) + 0.5 * x * m.scale),
        "clamp": (lambda m, x: x * m.b(x).clamp_(-0.5, 0.5), lambda m, x: x * m.b(x).clamp(-0.5, 0.5).detach()),
    },
)


def in_place_operators(m: Forms, x: Tensor) -> Tensor:
    y = m.b(x)
    y += x
    y -= m.position
    y *= m.scale
    y /= 2
    return y


enter_forms(
    "views",
    "Views",
    {
        "permute": plain(lambda m, x: torch.permute(input=x, dims=(0, 2, 1)).reshape(x.shape)),
        "transpose": plain(lambda m, x: torch.transpose(input=x, dim0=1, dim1=2).reshape(x.shape)),
        "reshape": plain(lambda m, x: torch.reshape(input=x, shape=(len(x), WIDTH, N)).mT),
        "strided": plain(lambda m, x: torch.as_strided(x.contiguous(), x.shape, (N * WIDTH, 1, N))),
        "unfold": plain(lambda m, x: F.pad(x.unfold(1, 3, 1).mean(-1), (0, 0, 1, 1))),
        "unfold and fold": plain(
            lambda m, x: tokens(F.fold(F.unfold(image(x), 2, padding=1), (GRID, GRID), 2, padding=1))
        ),
        "diagonal": plain(lambda m, x: torch.diag_embed(x).diagonal(dim1=-2, dim2=-1)),
        "windows": plain(
            lambda m, x: F.pad(
                tokens(F.pixel_shuffle(F.pixel_unshuffle(F.pad(image(x), (0, 1, 0, 1)), 2), 2)[..., :GRID, :GRID]),
                (0, 0, 0, 0),
            )
        ),
        "roll": plain(lambda m, x: tokens(torch.roll(image(x), shifts=(1, -1), dims=(2, 3)))),
        "flip": plain(lambda m, x: x.flip(dims=[1, 2])),
        "tensor split": plain(lambda m, x: torch.cat(torch.tensor_split(x, [2, 5], dim=1)[::-1], dim=1)),
        "chunk keywords": plain(lambda m, x: torch.cat(tensors=torch.chunk(input=x, chunks=2, dim=-1)[::-1], dim=-1)),
        "stack": plain(lambda m, x: torch.stack(tensors=[x, m.b(x)], dim=-1).mean(dim=-1)),
        "repeat": plain(lambda m, x: x.repeat(1, 2, 1)[:, ::2][:, :N]),
        "interleave": plain(lambda m, x: x.repeat_interleave(2, dim=1)[:, :N]),
        "expand": plain(lambda m, x: x[:, :1].expand(-1, N, -1) + x[:, None].squeeze(1)),
        "movedim": plain(lambda m, x: x.movedim(1, 2).unflatten(-1, (3, 3)).swapaxes(2, 3).flatten(2).mT),
        "pad": plain(lambda m, x: F.pad(input=x, pad=(0, 0, 1, 0), mode="constant", value=0.1)[:, :-1]),
        "pad reflect": plain(lambda m, x: tokens(F.avg_pool2d(F.pad(image(x), (1, 1, 1, 1), mode="reflect"), 3, 1))),
        "pad replicate": plain(
            lambda m, x: tokens(
                F.conv2d(F.pad(image(x), (1, 1, 1, 1), mode="replicate"), m.kernel.weight, groups=m.kernel.groups)
            )
        ),
        "pad circular": plain(lambda m, x: tokens(F.pad(image(x), (1, 0, 1, 0), mode="circular")[..., :GRID, :GRID])),
        "convolution": plain(lambda m, x: tokens(m.kernel(image(x)))),
        "convolution keywords": plain(
            lambda m, x: tokens(
                F.conv2d(
                    input=image(x), weight=m.kernel.weight, bias=m.kernel.bias, padding="same", groups=m.kernel.groups
                )
            )
        ),
        "transposed": plain(
            lambda m, x: tokens(F.conv_transpose2d(image(x), m.kernel.weight, groups=m.kernel.groups, padding=1))
        ),
        "interpolate": plain(
            lambda m, x: tokens(
                F.interpolate(
                    F.interpolate(image(x), scale_factor=2, mode="bicubic"),
                    size=(GRID, GRID),
                    mode="bilinear",
                    antialias=True,
                )
            )
        ),
        "adaptive": plain(lambda m, x: tokens(F.interpolate(F.adaptive_avg_pool2d(image(x), 2), (GRID, GRID)))),
        "linear keywords": plain(lambda m, x: F.linear(input=x, weight=m.b.weight, bias=m.b.bias)),
        "matmul": plain(lambda m, x: torch.matmul(input=x, other=m.b.weight.T)),
        "tensordot": plain(lambda m, x: torch.tensordot(x, m.b.weight, dims=([2], [1]))),
        "inner": plain(lambda m, x: torch.inner(x, m.b.weight)),
        "add keywords": plain(lambda m, x: torch.add(input=x, other=m.b(x), alpha=2)),
        "mean keywords": plain(lambda m, x: x - torch.mean(input=x, dim=1, keepdim=True)),
        "sum": plain(lambda m, x: x + torch.sum(input=x, dim=(1, 2), keepdim=True) / N),
        "multiply": plain(lambda m, x: torch.multiply(x, m.scale) - torch.subtract(m.position, x)),
        "divide": plain(lambda m, x: torch.true_divide(x, m.scale.square() + 1)),
        "iterate": plain(lambda m, x: torch.stack([row * 2 for row in x])),
        "setattr": plain(lambda m, x: remember(m, x)),
        "meshgrid": plain(
            lambda m, x: (
                x
                + torch.stack(torch.meshgrid(torch.arange(3.0), torch.arange(3.0), indexing="ij"), -1)
                .flatten(0, 1)
                .sum(-1, keepdim=True)
                .to(x)
            )
        ),
        "bincount": plain(lambda m, x: x / (1 + torch.bincount(m.order, minlength=N)[:, None])),
        "lerp": plain(lambda m, x: torch.lerp(input=x, end=m.b(x), weight=0.3)),
        "cast": plain(lambda m, x: x.to(dtype=torch.float64, copy=True).type(torch.float64).double()),
        "ravel": plain(lambda m, x: x.ravel().view(x.size()).view_as(x).contiguous()),
    },
)


def remember(m: Forms, x: Tensor) -> Tensor:
    """Keep what nothing reads again, as models do for pictures of their attention."""
    m.last = x
    return m.b(x)
