"""Triton kernels: gradients of attention values, gates and norms, log-sum-exp, the gamma rule, sums of samples.

The attention matrix A = exp(scale Q K^T + mask - lse) is rebuilt tile by tile and never written to memory. Strides are
compile-time constants: inside a compiled graph run-time strides would lose what Triton knows of their alignment.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32


@triton.jit
def _scores(
    q, k, rows, columns, mask,
    L: tl.constexpr, S: tl.constexpr, stride_l: tl.constexpr, stride_s: tl.constexpr,
    scale: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Transposed scores of one tile in units of log 2: [keys, queries]; -inf where a query must not attend."""
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * _LOG2E)
    if MASK != "none":
        inside = (columns[:, None] < S) & (rows[None, :] < L)
        seen = tl.load(mask + rows[None, :] * stride_l + columns[:, None] * stride_s, mask=inside, other=0)
        if MASK == "boolean":
            scores = tl.where(seen != 0, scores, float("-inf"))
        else:
            scores += seen.to(tl.float32) * _LOG2E
    if CAUSAL:
        scores = tl.where(columns[:, None] <= rows[None, :], scores, float("-inf"))
    return scores


@triton.jit
def values_gradient_kernel(
    grad,  # [K, B, Hq, L, Ev]
    query,  # [B, Hq, L, E]
    key,  # [B, Hk, S, E]
    lse,  # [B, Hq, L]
    mask,  # [B, Hq, L, S]
    out,  # [K, B, Hk, S, Ev]
    g_k: tl.constexpr, g_b: tl.constexpr, g_h: tl.constexpr, g_l: tl.constexpr, g_e: tl.constexpr,
    q_b: tl.constexpr, q_h: tl.constexpr, q_l: tl.constexpr, q_e: tl.constexpr,
    k_b: tl.constexpr, k_h: tl.constexpr, k_s: tl.constexpr, k_e: tl.constexpr,
    l_b: tl.constexpr, l_h: tl.constexpr, l_l: tl.constexpr,
    m_b: tl.constexpr, m_h: tl.constexpr, m_l: tl.constexpr, m_s: tl.constexpr,
    o_k: tl.constexpr, o_b: tl.constexpr, o_h: tl.constexpr, o_s: tl.constexpr,
    scale: tl.constexpr, TARGETS: tl.constexpr,
    HEADS: tl.constexpr,  # of keys and values
    GROUP: tl.constexpr,  # query heads to one of them
    L: tl.constexpr, S: tl.constexpr, E: tl.constexpr, EV: tl.constexpr,
    E_TILE: tl.constexpr, EV_TILE: tl.constexpr,
    TARGET_TILE: tl.constexpr,  # targets that share one rebuild of the matrix
    KEYS: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A^T grad for one tile of keys and some targets, summed over the query heads that share a value head."""
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    columns = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    e = tl.arange(0, E_TILE)
    wide = tl.arange(0, TARGET_TILE * EV_TILE)  # targets side by side
    target = tl.program_id(2) * TARGET_TILE + wide // EV_TILE
    ev = wide % EV_TILE
    wanted = (target < TARGETS) & (ev < EV)
    target = target.to(tl.int64)

    keys = key + batch * k_b + head * k_h + columns[:, None] * k_s + e[None, :] * k_e
    k = tl.load(keys, mask=(columns[:, None] < S) & (e[None, :] < E), other=0.0)
    total = tl.zeros((KEYS, TARGET_TILE * EV_TILE), tl.float32)
    first = (tl.program_id(0) * KEYS // QUERIES) * QUERIES if CAUSAL else 0
    for member in range(GROUP):
        h = head * GROUP + member
        for start in range(first, L, QUERIES):
            rows = start + tl.arange(0, QUERIES)
            queries = query + batch * q_b + h * q_h + rows[:, None] * q_l + e[None, :] * q_e
            q = tl.load(queries, mask=(rows[:, None] < L) & (e[None, :] < E), other=0.0)
            norm = tl.load(lse + batch * l_b + h * l_h + rows * l_l, mask=rows < L, other=float("inf"))
            norm = tl.where(norm == float("-inf"), float("inf"), norm)  # all keys are masked: gives nothing
            here = mask + batch * m_b + h * m_h if MASK != "none" else mask
            scores = _scores(q, k, rows, columns, here, L, S, m_l, m_s, scale, CAUSAL, MASK, PRECISION)
            weight = tl.exp2(scores - norm[None, :] * _LOG2E)  # [KEYS, QUERIES]
            grads = grad + target[None, :] * g_k + batch * g_b + h * g_h + rows[:, None] * g_l + ev[None, :] * g_e
            g = tl.load(grads, mask=(rows[:, None] < L) & wanted[None, :], other=0.0)
            total += tl.dot(weight.to(g.dtype), g, input_precision=PRECISION)
    values = out + target[None, :] * o_k + batch * o_b + head * o_h + columns[:, None] * o_s + ev[None, :]
    tl.store(values, total.to(out.dtype.element_ty), mask=(columns[:, None] < S) & wanted[None, :])


@triton.jit
def log_sum_exp_kernel(
    query,  # [B, Hq, L, E]
    key,  # [B, Hk, S, E]
    mask,  # [B, Hq, L, S]
    out,  # [B, Hq, L]
    q_b: tl.constexpr, q_h: tl.constexpr, q_l: tl.constexpr, q_e: tl.constexpr,
    k_b: tl.constexpr, k_h: tl.constexpr, k_s: tl.constexpr, k_e: tl.constexpr,
    m_b: tl.constexpr, m_h: tl.constexpr, m_l: tl.constexpr, m_s: tl.constexpr,
    scale: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,  # HEADS of queries
    L: tl.constexpr, S: tl.constexpr, E: tl.constexpr, E_TILE: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """log sum exp of the scores of one tile of queries."""
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    e = tl.arange(0, E_TILE)
    queries = query + batch * q_b + head * q_h + rows[:, None] * q_l + e[None, :] * q_e
    q = tl.load(queries, mask=(rows[:, None] < L) & (e[None, :] < E), other=0.0)
    here = mask + batch * m_b + head * m_h if MASK != "none" else mask
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    for start in range(0, S, KEYS):
        columns = start + tl.arange(0, KEYS)
        keys = key + batch * k_b + (head // GROUP) * k_h + columns[:, None] * k_s + e[None, :] * k_e
        k = tl.load(keys, mask=(columns[:, None] < S) & (e[None, :] < E), other=0.0)
        scores = _scores(q, k, rows, columns, here, L, S, m_l, m_s, scale, CAUSAL, MASK, PRECISION)
        scores = tl.where(columns[:, None] < S, scores, float("-inf"))  # [KEYS, QUERIES]
        top = tl.maximum(highest, tl.max(scores, 0))
        still = tl.where(top == float("-inf"), 0.0, top)  # all masked so far: -inf - -inf would be NaN
        total = total * tl.exp2(highest - still) + tl.sum(tl.exp2(scores - still[None, :]), 0)
        highest = top
    seen = tl.where(total == 0.0, 1.0, total)
    result = tl.where(total == 0.0, float("-inf"), (highest + tl.log2(seen)) / _LOG2E)
    tl.store(out + tl.program_id(1).to(tl.int64) * L + rows, result, mask=rows < L)


@triton.jit
def gate_gradient_kernel(grad, x, out, count, AT_ZERO: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """grad * phi(x), element by element."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == "gelu":
        gate = 0.5 * (1.0 + tl.erf(given * 0.7071067811865476))
    elif KIND == "tanh":  # (1 + tanh u) / 2 is the sigmoid of 2 u
        gate = tl.sigmoid(1.5957691216057308 * (given + 0.044715 * given * given * given))
    else:
        gate = tl.sigmoid(given)
    gate = tl.where(given == 0.0, AT_ZERO, gate)
    pulled = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * gate
    tl.store(out + at, pulled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def center_gradient_kernel(grad, inverse, weight, out, WEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(g - mean g) * inverse in a row, with g = grad * weight.

    ``grad`` and ``out`` are [rows, WIDTH], ``inverse`` is [rows], ``weight`` is [WIDTH].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    g = tl.load(grad + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if WEIGHT:
        g *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    pulled = (g - tl.sum(g, 0) / WIDTH) * tl.load(inverse + row).to(tl.float32)
    tl.store(out + row * WIDTH + column, pulled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_sizes_kernel(x, of_input, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The mean of |x| in a row, weighted by ``of_input``: [rows] for [rows, WIDTH] and [WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    size = tl.zeros((BLOCK,), tl.float32)
    whole = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        weight = tl.load(of_input + column, mask=inside, other=0.0)
        size += tl.abs(tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)) * weight
        whole += weight
    total = tl.sum(whole, 0)
    tl.store(out + row, tl.sum(size, 0) / tl.where(total > 0, total, 1.0))


@triton.jit
def share_gradient_kernel(
    grad, value,  # [rows, WIDTH]
    size,  # [rows]
    bias, of_output,  # [WIDTH]
    out,  # [rows, WIDTH]
    summed,  # [rows]
    favour, BIAS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grad * |s|, and the mean of grad * s in a row, weighted by ``of_output``."""
    row = tl.program_id(0).to(tl.int64)
    amount = tl.load(size + row)
    favoured = tl.zeros((BLOCK,), tl.float32)
    whole = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        weight = tl.load(of_output + column, mask=inside, other=0.0)
        a = amount * weight
        if BIAS:
            a += tl.abs(tl.load(bias + column, mask=inside, other=0.0).to(tl.float32))
        z = tl.load(value + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        share = z / tl.maximum(tl.abs(z) + favour * a, _TINY)  # z is 0 where there is nothing to share
        given = tl.load(grad + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * WIDTH + column, (given * tl.abs(share)).to(out.dtype.element_ty), mask=inside)
        favoured += given * share * weight
        whole += weight
    total = tl.sum(whole, 0)
    tl.store(summed + row, tl.sum(favoured, 0) / tl.where(total > 0, total, 1.0))


@triton.jit
def add_favoured_kernel(plain, like, summed, of_input, favour, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """plain + c sign(like) summed of_input, written over ``plain``.

    ``plain`` and ``like`` are [rows, WIDTH], ``summed`` is [rows], ``of_input`` is [WIDTH].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    favoured = favour * tl.load(summed + row) * tl.load(of_input + column, mask=inside, other=0.0)
    signs = tl.load(like + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    signed = tl.where(signs > 0, favoured, tl.where(signs < 0, -favoured, 0.0))
    given = tl.load(plain + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(plain + row * WIDTH + column, (given + signed).to(plain.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n", "batch"])  # any number of samples and images is one kernel
def weighted_sums_kernel(
    samples,  # [n, B, CHANNELS, PIXELS]
    weights,  # [n, B]
    total,  # [B, CHANNELS, PIXELS]
    first, second,  # [B, PIXELS]
    n, batch,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, CHANNEL_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum w x, w^2 s and w^2 s^2 of some pixels of one image, with s the sum of x over its channels."""
    image = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNEL_TILE)
    inside = (channel[:, None] < CHANNELS) & (pixel[None, :] < PIXELS)
    here = channel[:, None] * PIXELS + pixel[None, :]
    of_all = tl.zeros((CHANNEL_TILE, BLOCK), tl.float64)
    of_sums = tl.zeros((BLOCK,), tl.float64)
    of_squares = tl.zeros((BLOCK,), tl.float64)
    for number in range(n):
        row = number * batch + image
        weight = tl.load(weights + row)
        x = tl.load(samples + row * CHANNELS * PIXELS + here, mask=inside, other=0.0).to(tl.float64)
        s = tl.sum(x, 0)
        of_all += weight * x
        of_sums += weight * weight * s
        of_squares += weight * weight * s * s
    tl.store(total + image * CHANNELS * PIXELS + here, of_all, mask=inside)
    tl.store(first + image * PIXELS + pixel, of_sums, mask=pixel < PIXELS)
    tl.store(second + image * PIXELS + pixel, of_squares, mask=pixel < PIXELS)
