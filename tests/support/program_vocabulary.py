"""The instructions that programs are made of: the engine's vocabulary, and what lies just outside of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from program_semantics import (
    activation,
    affine,
    attend,
    branch,
    centred,
    convolved,
    copied,
    copied_and_held,
    first_carries,
    glu,
    half_scaled,
    held,
    last_carries,
    move,
    multi_head,
    of_constant,
    power,
    product,
    relu_of_sum,
    rms,
    rows_replaced,
    scaled,
    scaled_by,
    selection,
    self_gated,
    shifted_norm,
    swiglu,
    total,
    unit,
)
from programs import BIAS, CONSTANTS, MASK, ORDER, Operation, Semantics, State, Value, W


def op(source: str, kinds: str, means: Semantics, gives: str = "x", *, covered: bool = True) -> Operation:
    return Operation(source, kinds, gives, means, covered)


# Kinds: x tokens [B, T, D]; m attention matrix [B, T, T]; s scale [B, T, 1]; t mask [B, T, D]; i places [B, T, D];
# n whole numbers [B, T, D].
MOVES = [
    op("{o} = {a}.flip(1)", "x", move(lambda x: x.flip(1))),
    op("{o} = {a}[:, order]", "x", move(lambda x: x[:, ORDER])),
    op("{o} = {a}.roll(1, 1).clone()", "x", move(lambda x: x.roll(1, 1))),
    op("{o} = {a}.permute(2, 0, 1).reshape(D, -1).T.view({a}.shape)", "x", move(lambda x: x)),
    op("{o} = {a}.unflatten(-1, (2, 3)).transpose(1, 2).transpose(1, 2).flatten(2)", "x", move(lambda x: x)),
    op("{o} = {a}.double().to({a}.dtype).contiguous()", "x", move(lambda x: x)),
    op("{o} = torch.stack(list({a}.unbind(1)), 1)", "x", move(lambda x: x, mixes=True)),
    # Over tokens: a loop over the batch makes one gate of a single image, and no gate of several.
    op("{o} = torch.stack([row * 1 for row in {a}.transpose(0, 1)], 1)", "x", move(lambda x: x, mixes=True)),
    op(
        "{o} = torch.cat({a}.chunk(2, -1)[::-1], -1)",
        "x",
        move(lambda x: torch.cat(x.chunk(2, -1)[::-1], -1), mixes=True),
    ),
    op("{o} = {a}.gather(1, {b})", "xi", scaled(lambda x, i: x.gather(1, i))),
    op("{o} = {a}.take_along_dim({b}, 1)", "xi", scaled(lambda x, i: x.take_along_dim(i, 1))),
    op("{o} = -{a}.tril()", "x", move(lambda x: -x.tril())),
    op("{o} = F.dropout({a}, 0.5, training=False)", "x", move(lambda x: x)),
]
MIXES = [
    op("{o} = F.linear({a}, W, b)", "x", move(affine, mixes=True)),
    op("{o} = {a} @ W.T + b", "x", move(affine, mixes=True)),
    op("{o} = torch.einsum('btd,ed->bte', {a}, W) + b", "x", move(affine, mixes=True)),
    op("{o} = torch.addmm(b, {a}.flatten(0, 1), W.T).view({a}.shape)", "x", move(affine, mixes=True)),
    op("{o} = F.conv1d({a}.mT, K, b, padding=1).mT", "x", move(convolved, mixes=True)),
    op(
        "{o} = {a}.mean(1, keepdim=True).expand_as({a})",
        "x",
        move(lambda x: x.mean(1, keepdim=True).expand_as(x), mixes=True),
    ),
    op("{o} = {a}.cumsum(1)", "x", move(lambda x: x.cumsum(1), mixes=True)),
    op("{o} = F.avg_pool1d({a}, 3, 1, 1)", "x", move(lambda x: F.avg_pool1d(x, 3, 1, 1), mixes=True)),
    op(
        "{o} = F.pad(torch.diff({a}), (1, 0), value=0.5)",
        "x",
        move(lambda x: F.pad(torch.diff(x), (1, 0), value=0.5), mixes=True),
    ),
    op(
        "{o} = F.interpolate({a}, scale_factor=2, mode='linear')[..., ::2]",
        "x",
        move(lambda x: F.interpolate(x, scale_factor=2, mode="linear")[..., ::2], mixes=True),
    ),
]
SUMS = [
    op("{o} = {a} + {b}", "xx", total(torch.add)),
    op("{o} = {a} - {b}", "xx", total(torch.sub)),
    op("{o} = torch.add({a}, {b}, alpha=0.5)", "xx", total(lambda a, b: a + 0.5 * b)),
    op("{o} = 1.5 - {a}", "x", total(lambda a: 1.5 - a)),
    op("{o} = {a} + P", "x", total(lambda a: a + CONSTANTS["P"])),
    op("{o} = torch.where(M, {a}, {b})", "xx", total(lambda a, b: torch.where(MASK, a, b))),
    op("{o} = torch.where({a}, {b}, {c})", "txx", total(torch.where, places=1)),
    op("{o} = {b}.masked_fill({a}, 0.25)", "tx", total(lambda t, x: x.masked_fill(t, 0.25), places=1)),
    op("{o} = {b}.scatter_add(1, {a}, {c})", "ixx", total(lambda i, x, y: x.scatter_add(1, i, y), places=1)),
    op("{o} = {a}.lerp({b}, 0.3)", "xx", total(lambda a, b: a.lerp(b, 0.3))),
    op("{o} = torch.cat([{a}[:, :1], {b}[:, 1:]], 1)", "xx", total(lambda a, b: torch.cat([a[:, :1], b[:, 1:]], 1))),
    op(
        "{o} = F.pad({a}, (0, 0, 1, 0), value=0.5)[:, :-1]",
        "x",
        total(lambda a: F.pad(a, (0, 0, 1, 0), value=0.5)[:, :-1]),
    ),
    op("{o} = {a}.index_add(1, order, {b})", "xx", total(lambda a, b: a.index_add(1, ORDER, b))),
    op(
        "{o} = {a}.index_copy(1, order[:2], {b}[:, :2])", "xx", total(lambda a, b: a.index_copy(1, ORDER[:2], b[:, :2]))
    ),
    op("{o} = {a} + {b}", "xn", total(torch.add)),
    op("{o} = torch.where(M, {a}, {b})", "xn", total(lambda a, b: torch.where(MASK, a, b))),
    op("{o} = {a} + {b}", "xt", total(torch.add)),
    op(
        "{o} = torch.cat([{a}[:, 1:], {b}[:, :1]], 1)",
        "xn",
        total(lambda a, b: torch.cat([a[:, 1:], b[:, :1].double()], 1)),
    ),
]
PRODUCTS = [
    op("{o} = {a} * {b}", "xx", product(torch.mul)),
    op("{o} = {a}.mul({b})", "xs", product(torch.mul)),
    op("{o} = {a} / {b}", "xs", scaled(torch.div)),
    op("{o} = {a} * {b}", "xt", product(torch.mul)),
    op("{o} = {a} * {b}", "xn", product(torch.mul)),
    op("{o} = {a} * 0.5", "x", move(lambda x: x * 0.5)),
    op("{o} = {a} @ {b}", "mx", product(torch.matmul, mixes=True)),
    op("{o} = torch.bmm({a}, {b})", "mx", product(torch.matmul, mixes=True)),
    op("{o} = torch.einsum('bij,bjd->bid', {a}, {b})", "mx", product(torch.matmul, mixes=True)),
    op("{o} = torch.einsum('btd,btd->btd', {a}, {b})", "xx", product(torch.mul)),
    op("{o} = F.silu({a}) * {b}", "xx", swiglu),
    op("{o} = {a} * torch.sigmoid({a})", "x", self_gated),
    op("{o} = F.glu(torch.cat([{a}, {b}], -1))", "xx", glu),
]
ACTIVATIONS = [
    op("{o} = F.gelu({a})", "x", activation(F.gelu, 0.5)),
    op("{o} = F.gelu({a}, approximate='tanh')", "x", activation(lambda x: F.gelu(x, approximate="tanh"), 0.5)),
    op("{o} = F.silu({a})", "x", activation(F.silu, 0.5)),
    op("{o} = torch.tanh({a})", "x", activation(torch.tanh, 1.0)),
    op("{o} = F.hardswish({a})", "x", activation(F.hardswish, 0.5)),
    op("{o} = nn.ELU()({a})", "x", activation(F.elu, 1.0)),
    op("{o} = F.relu({a})", "x", selection(F.relu)),
    op("{o} = F.leaky_relu({a}, 0.2)", "x", selection(lambda x: F.leaky_relu(x, 0.2))),
    op("{o} = {a}.abs()", "x", selection(torch.abs)),
    op("{o} = {a} ** 2", "x", power),
    op(
        "{o} = F.relu({a}).square()",
        "x",
        lambda v: power(Value(State.GATE, F.relu(v.at), selection(F.relu)(v)[1])) if v.carries else held(v),
    ),
    op("{o} = {a}.sort(1).values", "x", selection(lambda x: x.sort(1).values)),
    op("{o} = {a}.topk(4, 1)[0]", "x", selection(lambda x: x.topk(4, 1)[0])),
    op("{o} = F.max_pool1d({a}, 3, 1, 1)", "x", selection(lambda x: F.max_pool1d(x, 3, 1, 1))),
    op(
        "{o} = {a}.amax(1, keepdim=True).expand_as({a})", "x", selection(lambda x: x.amax(1, keepdim=True).expand_as(x))
    ),
]
NORMS = [
    op("{o} = F.layer_norm({a}, (D,), b, W[0])", "x", first_carries(lambda x, at: centred(x, at) * BIAS + W[0])),
    op("{o} = F.layer_norm({a}, (D,))", "x", first_carries(centred)),
    op("{o} = F.rms_norm({a}, (D,), b, 1e-5)", "x", scaled_by(lambda at: rms(at) * BIAS)),
    op("{o} = F.normalize({a}, dim=-1)", "x", scaled_by(lambda at: unit(torch.ones_like(at), at))),
    op("{o} = F.group_norm({a}, 4, None, None)", "x", first_carries(centred)),
    op(
        "{o} = ({a} - {a}.mean(-1, keepdim=True)) * ({a}.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()",
        "x",
        first_carries(centred),
    ),
    op(
        "{o} = {a} / {a}.norm(dim=-1, keepdim=True).clamp_min(1e-12)",
        "x",
        scaled_by(lambda at: unit(torch.ones_like(at), at)),
    ),
]
ATTENTION = [
    op("{o} = F.scaled_dot_product_attention({a}, {b}, {c})", "xxx", last_carries(attend)),
    op(
        "{o} = F.scaled_dot_product_attention({a}[:, None], {b}[:, None], {c}[:, None])[:, 0]",
        "xxx",
        last_carries(attend),
    ),
    op(
        "{o} = F.scaled_dot_product_attention({a}, W[:4], {b}, attn_mask={c})",
        "xxm",
        lambda a, v, m: last_carries(lambda a, m, v: attend(a, W[:4].expand_as(a), v, m))(a, m, v),
    ),
    op("{o} = ({a} @ {b}.mT * D ** -0.5).softmax(-1) @ {c}", "xxx", last_carries(attend)),
    op(
        "{o} = torch.baddbmm(W[:4, :4], {a}, {b}.mT).softmax(-1) @ {c}",
        "xxx",
        last_carries(lambda q, k, v: (W[:4, :4] + q @ k.mT).softmax(-1) @ v),
    ),
    op(
        "q = {a}.transpose(0, 1)\n"
        "{o}, _ = F.multi_head_attention_forward(q, q, q, D, 2, qkv, qkv_b, None, None, False, 0.0, W, b)\n"
        "{o} = {o}.transpose(0, 1)",
        "x",
        multi_head,
    ),
]
OPERATORS = [
    op("{o} = ({a} @ {b}.mT).softmax(-1)", "xx", held, "m"),
    op("{o} = torch.sigmoid({a} @ {b}.mT)", "xx", held, "m"),
    op("{o} = {a} * 0.5 + 0.1", "m", held, "m"),
    op("{o} = ({a} + {b}).softmax(-1)", "mm", held, "m"),
    op("{o} = ({a}.square().mean(-1, keepdim=True) + 0.1).rsqrt()", "x", held, "s"),
    op("{o} = 1 + {a}.norm(dim=-1, keepdim=True)", "x", held, "s"),
    op("{o} = {a}.detach().sigmoid().mean(-1, keepdim=True)", "x", held, "s"),
    op("{o} = {a} > {b}", "xx", held, "t"),
    op("{o} = {a} < 0.2", "x", held, "t"),
    op("{o} = ~{a}", "t", held, "t"),
    op("{o} = {a}.argsort(1)", "x", held, "i"),
    op("{o} = {a}.topk(4, 1).indices", "x", held, "i"),
    op("{o} = (3 * {a}).long()", "x", held, "n"),
    op("{o} = {a}.long() * 2", "t", held, "n"),
    op("{o} = torch.exp(0.3 * {a})", "x", held),
    op("{o} = F.softplus({a})", "x", held),
    op("{o} = {a}.softmax(-1)", "x", held),
    op("{o} = torch.maximum({a}, {b})", "xx", held),
    op("{o} = {a}.clamp(-0.5, 0.5)", "x", held),
    op("{o} = {a}.detach()", "x", held),
]
WRITES = [
    op("{o} = {a} * 1.0; {o}.add_({b})", "xx", total(torch.add)),
    op("{o} = {a} * 1.0; {o} += {b}; F.relu_({o})", "xx", relu_of_sum),
    op("{o} = {a} * 1.0; {o}[:, 0] = {b}[:, 0]", "xx", rows_replaced),
    op("{o} = {a}.clone(); {o}[:, :2].mul_({b}[:, :2])", "xx", half_scaled, covered=False),
    op("{o} = torch.zeros_like({a}); {o}.copy_({b})", "xx", copied),
    op(
        "{o} = torch.zeros({a}.shape).double(); {o}.view(-1).copy_({b}.flatten())",
        "xx",
        copied,
        covered=False,
    ),
    op(
        "{o} = {a}.clone(); {o}.index_put_((torch.arange(len({a}))[:, None], order[:2]), {b}[:, :2])",
        "xx",
        total(lambda a, b: a.index_copy(1, ORDER[:2], b[:, :2])),
    ),
    op("{o} = {a} * 1.0; {o}.masked_fill_(M, 0.5)", "x", total(lambda a: a.masked_fill(MASK, 0.5))),
    op("{o} = {a} * 0.5; {o} = {o} + {a}; {o} = {o} * 0.5", "x", move(lambda x: 0.75 * x, mixes=True)),
    op(
        "{o} = {a}\nfor _ in range(3): {o} = F.linear({o}, W, b) * 0.5",
        "x",
        move(lambda x: affine(affine(affine(x) * 0.5) * 0.5) * 0.5, mixes=True),
    ),
    op("with torch.autocast('cpu', torch.bfloat16): {o} = F.linear({a}, W, b)", "x", move(affine, mixes=True)),
    op("with torch.autocast('cpu', torch.bfloat16): {o} = F.layer_norm({a}, (D,))", "x", first_carries(centred)),
]
OUTSIDE = [
    op("{o} = torch.full_like({a}, {b}.detach().mean())", "xx", copied_and_held, covered=False),
    op("{o} = {a}.new_tensor({b}.detach())", "xx", copied_and_held, covered=False),
    op("{o} = {a}.detach().clone().requires_grad_()", "x", held, covered=False),
    op("{o} = {a} + int({b}.sum())", "xx", of_constant(lambda a, b: a + int(b.sum())), covered=False),
    op(
        "{o} = {a} + (({b} > 0).nonzero().shape[0])",
        "xx",
        of_constant(lambda a, b: a + (b > 0).nonzero().shape[0]),
        covered=False,
    ),
    op(
        "{o} = torch.zeros_like({a}); early = {o}[:, :]; {o}.copy_({b}.detach()); {o} = early",
        "xx",
        copied_and_held,
        covered=False,
    ),
    op("{o} = torch.zeros_like({a}); {o}.data.copy_({b}.detach())", "xx", copied_and_held, covered=False),
    op("{o} = torch.empty_like({a}); torch.exp({b}.detach(), out={o})", "xx", copied_and_held, covered=False),
    op("{o} = {a} * 1.0; {o}.detach().mul_({b}.detach())", "xx", held, covered=False),
    op("{o} = {a} * 2.0 if bool({b}.sum() > 0) else {a} * 3.0", "xx", branch, covered=False),
    op(
        "{o} = torch.addcmul({a}, {b}, P, value=0.5)",
        "xx",
        total(lambda a, b: a + 0.5 * b * CONSTANTS["P"]),
        covered=False,
    ),
    op(
        "{o} = F.layer_norm({a}, (D,), None, {b}[0, 0].detach())",
        "xx",
        shifted_norm,
        covered=False,
    ),
]
OPERATIONS = [*MOVES, *MIXES, *SUMS, *PRODUCTS, *ACTIVATIONS, *NORMS, *ATTENTION, *OPERATORS, *WRITES, *OUTSIDE]
