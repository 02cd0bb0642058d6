"""Scans over tokens, Fourier transforms and complex numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from module_pairs.base import GRID, TOKENS, WIDTH, Forms, Function, enter_forms, gate, hold_or_not, image, plain, tokens

N = TOKENS


def decay(m: Forms, x: Tensor) -> Tensor:
    return torch.sigmoid(m.b(x))


def scan_from_zeros(m: Forms, x: Tensor, hold: Function) -> Tensor:
    keep, state, rows = hold(decay(m, x)), torch.zeros(len(x), WIDTH, dtype=x.dtype), []
    for t in range(N):
        state = keep[:, t] * state + x[:, t]
        rows.append(state)
    return torch.stack(rows, 1)


def scan_from_zeros_like(m: Forms, x: Tensor, hold: Function) -> Tensor:
    keep, state, rows = hold(decay(m, x)), torch.zeros_like(x[:, 0]), []
    for now, row in zip(keep.unbind(1), x.unbind(1), strict=True):
        state = torch.addcmul(row, now, state)
        rows.append(state.unsqueeze(1))
    return torch.cat(rows, 1)


def scan_from_first(m: Forms, x: Tensor, hold: Function) -> Tensor:
    keep, state = hold(decay(m, x)), x[:, 0]
    rows = [state]
    for t in range(1, N):
        state = state * keep[:, t] + (1 - keep[:, t]) * x[:, t]
        rows.append(state)
    return torch.stack(rows, dim=1)


def scan_from_new_zeros(m: Forms, x: Tensor, hold: Function) -> Tensor:
    keep, state = hold(decay(m, x)), x.new_zeros(len(x), WIDTH)
    out = torch.empty_like(x)
    for t in range(N):
        state = state * keep[:, t] + x[:, t]
        out[:, t] = state
    return out


def selective_scan(m: Forms, x: Tensor, hold: Function) -> Tensor:
    """Mamba's recurrence with a matrix of states, whose input and output gates are held."""
    step = hold(F.softplus(m.b(x)))
    reads, writes = (hold(torch.sigmoid(part[..., :3])) for part in m.packed(x).chunk(2, -1))
    rates = -torch.exp(m.position[0, :WIDTH, :3])
    state, rows = torch.zeros(len(x), WIDTH, 3, dtype=x.dtype), []
    for t in range(N):
        entering = (step[:, t] * x[:, t])[..., None] * writes[:, t, None]
        state = torch.exp(step[:, t, :, None] * rates) * state + entering
        rows.append((state * reads[:, t, None]).sum(-1))
    return torch.stack(rows, 1) + x * m.scale


def scan_by_cumulative_sum(m: Forms, x: Tensor, hold: Function) -> Tensor:
    logs = hold(F.logsigmoid(m.b(x)).cumsum(1))
    return torch.exp(logs) * torch.cumsum(x * torch.exp(-logs), dim=1)


def scan_by_matrix(m: Forms, x: Tensor, hold: Function) -> Tensor:
    logs = F.logsigmoid(m.b(x)[..., :1]).cumsum(1)
    return hold((logs - logs.mT).exp().tril()) @ x


def scan_by_doubling(m: Forms, x: Tensor, hold: Function) -> Tensor:
    keep, value, step = hold(decay(m, x)), x, 1
    while step < N:
        value = value + keep * F.pad(value, (0, 0, step, 0))[:, :N]
        keep = keep * F.pad(keep, (0, 0, step, 0))[:, :N]
        step *= 2
    return value


def recurrent_cell(m: Forms, x: Tensor, hold: Function) -> Tensor:
    state, rows = torch.zeros(len(x), WIDTH, dtype=x.dtype), []
    for t in range(N):
        update = hold(torch.sigmoid(m.b(x[:, t]) + state))
        state = (1 - update) * state + update * m.packed(x[:, t])[..., :WIDTH]
        rows.append(state)
    return torch.stack(rows, 1)


def retention(m: Forms, x: Tensor, hold: Function) -> Tensor:
    """Linear attention as a recurrence: keys and queries are held."""
    q, k = (hold(F.elu(part) + 1) for part in m.packed(x).chunk(2, -1))
    state, rows = torch.zeros(len(x), WIDTH, WIDTH, dtype=x.dtype), []
    for t in range(N):
        state = m.amount * state + k[:, t, :, None] * x[:, t, None]
        rows.append(torch.einsum("bk,bkv->bv", q[:, t], state))
    return torch.stack(rows, 1)


SCANS = (scan_from_zeros, scan_from_zeros_like, scan_from_first, scan_from_new_zeros, selective_scan)
SCANS += (scan_by_cumulative_sum, scan_by_matrix, scan_by_doubling, recurrent_cell, retention)
enter_forms("scans", "Scans", hold_or_not(*SCANS))


def constant_decay(m: Forms, x: Tensor) -> Tensor:
    return torch.stack([sum(m.amount ** (t - s) * x[:, s] for s in range(t + 1)) for t in range(N)], 1)


def linear_recurrence(m: Forms, x: Tensor) -> Tensor:
    state, rows = torch.zeros(1, WIDTH, dtype=x.dtype), []
    for row in x.transpose(0, 1):
        state = F.linear(state, m.b.weight) * 0.3 + row
        rows.append(state)
    return torch.stack(rows).transpose(0, 1)


def causal_convolution(m: Forms, x: Tensor) -> Tensor:
    return F.conv1d(F.pad(x.mT, (2, 0)), m.kernel.weight[:, :1, 0], groups=WIDTH).mT


def scan_both_ways(m: Forms, x: Tensor) -> Tensor:
    return sum(tokens(image(x).cumsum(axis).flip(axis)) for axis in (2, 3)) / 2


enter_forms(
    "scans",
    "ConstantScans",
    {
        **{f.__name__: plain(f) for f in (constant_decay, linear_recurrence, causal_convolution, scan_both_ways)},
        "cumsum": plain(lambda m, x: torch.cumsum(input=x, dim=1)),
        "reverse": plain(lambda m, x: x.flip(1).cumsum(1).flip(1)),
        "diff": plain(lambda m, x: torch.diff(x, dim=1, prepend=x[:, :1] * 0)),
    },
)


def weights(m: Forms, *shape: int) -> Tensor:
    count = int(torch.tensor(shape).prod())
    pool = torch.cat([m.b.weight.flatten(), m.packed.weight.flatten()])
    return torch.complex(pool[:count], pool[-count:]).view(shape)


def global_filter(m: Forms, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(image(x), dim=(2, 3), norm="ortho")
    return tokens(torch.fft.irfft2(spectrum * weights(m, WIDTH, GRID, GRID // 2 + 1), s=(GRID, GRID), norm="ortho"))


def filter_tokens(m: Forms, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * weights(m, N // 2 + 1, WIDTH), n=N, dim=1)


def filter_real(m: Forms, x: Tensor) -> Tensor:
    spectrum = torch.view_as_real(torch.fft.rfft(x, dim=1))
    spectrum = spectrum * m.position[:, : N // 2 + 1, :, None]
    return torch.fft.irfft(torch.view_as_complex(spectrum), n=N, dim=1)


def spectral_layer(m: Forms, x: Tensor) -> Tensor:
    """AFNO: a linear layer of real and imaginary parts."""
    spectrum = torch.fft.rfft2(image(x), norm="ortho")
    real, imaginary = spectrum.real.movedim(1, -1), spectrum.imag.movedim(1, -1)
    real, imaginary = m.b(real) - F.linear(imaginary, m.b.weight), m.b(imaginary) + F.linear(real, m.b.weight)
    back = torch.complex(real, imaginary).movedim(-1, 1)
    return tokens(torch.fft.irfft2(back, s=(GRID, GRID), norm="ortho"))


def convolve_by_fourier(m: Forms, x: Tensor) -> Tensor:
    kernel = torch.fft.rfft(m.position[0], n=2 * N, dim=0)
    return torch.fft.irfft(torch.fft.rfft(x, n=2 * N, dim=1) * kernel, n=2 * N, dim=1)[:, :N]


def band_pass(m: Forms, x: Tensor) -> Tensor:
    spectrum = torch.fft.fftshift(torch.fft.fft2(image(x)), dim=(-2, -1))
    return tokens(torch.fft.ifft2(torch.fft.ifftshift(spectrum * m.mask[:GRID, :GRID], dim=(-2, -1))).real)


def cosine_transform(m: Forms, x: Tensor) -> Tensor:
    both = torch.cat([x, x.flip(1)], 1)
    turn = torch.polar(torch.ones(N, dtype=x.dtype), -torch.pi * torch.arange(N, dtype=x.dtype) / (2 * N))
    return (torch.fft.fft(both, dim=1)[:, :N] * turn[:, None]).real / N


def several_axes(m: Forms, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfftn(image(x), dim=(2, 3))
    return tokens(torch.fft.irfftn(spectrum, s=(GRID, GRID), dim=(2, 3)))


def by_keywords(m: Forms, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(input=x, dim=1, norm="forward")
    return torch.fft.irfft(input=spectrum, n=N, dim=1, norm="forward")


FOURIER = (global_filter, filter_tokens, filter_real, spectral_layer, convolve_by_fourier, band_pass)
FOURIER += (cosine_transform, several_axes, by_keywords)
enter_forms(
    "fourier",
    "Fourier",
    {
        **{f.__name__: plain(f) for f in FOURIER},
        "fnet": plain(lambda m, x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real / N),
        "fnet 2d": plain(lambda m, x: torch.real(torch.fft.fft2(x, dim=(1, 2), norm="ortho"))),
        "fftn": plain(lambda m, x: torch.fft.fftn(x, dim=(1, 2)).imag / N),
        "hermitian": plain(lambda m, x: torch.fft.ihfft(x, n=2 * N, dim=1).real[:, :N] * N),
    },
)


def turn_values(m: Forms, x: Tensor) -> Tensor:
    """Rotary positions of values, as Llama's code writes them."""
    angles = torch.arange(N, dtype=x.dtype)[:, None] * m.latent[: WIDTH // 2]
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(2)


def complex_linear(m: Forms, x: Tensor) -> Tensor:
    pairs = torch.complex(x[..., : WIDTH // 2], x[..., WIDTH // 2 :])
    out = pairs @ weights(m, WIDTH // 2, WIDTH // 2)
    return torch.cat([out.real, out.imag], -1)


def complex_function(m: Forms, x: Tensor) -> Tensor:
    out = F.linear(x.to(torch.complex128), weights(m, WIDTH, WIDTH).conj())
    return out.real + out.imag


def complex_convolution(m: Forms, x: Tensor) -> Tensor:
    """A kernel as large as its stride."""
    padded = F.pad(image(x), (0, 1, 0, 1)).to(torch.complex128)
    out = F.conv2d(padded, weights(m, 2, WIDTH, 2, 2), stride=2)
    return torch.cat([out.real, out.imag], 1).flatten(1).mean(1)[:, None, None] * m.scale + x


def conjugate(m: Forms, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    out = pairs.conj() * weights(m, WIDTH // 2) + pairs.mean(1, keepdim=True)
    return torch.view_as_real(out.resolve_conj()).flatten(2)


def complex_mean(m: Forms, x: Tensor) -> Tensor:
    z = x + 1j * m.b(x)
    z = torch.einsum("btd,de->bte", z, weights(m, WIDTH, WIDTH))
    return torch.real(z) - torch.imag(z)


def complex_division(m: Forms, x: Tensor) -> Tensor:
    z = torch.complex(x, m.b(x)) / (weights(m, WIDTH) + 2)
    return z.real + z.sum(1, keepdim=True).imag


def magnitude_gate(m: Forms, x: Tensor, hold: Function) -> Tensor:
    z = torch.fft.rfft(x, dim=1)
    return torch.fft.irfft(z * hold(torch.sigmoid(z.abs())), n=N, dim=1)


def unit_phase(m: Forms, x: Tensor, hold: Function) -> Tensor:
    z = torch.complex(x, m.b(x))
    z = z / hold(1 + z.abs())
    return z.real + z.imag


def complex_attention(m: Forms, x: Tensor, hold: Function) -> Tensor:
    z = torch.complex(x, m.b(x))
    matrix = hold(torch.softmax((z @ z.mH).real / WIDTH, -1))
    return (matrix.to(z.dtype) @ z).real


MAPS = (turn_values, complex_linear, complex_function, complex_convolution, conjugate, complex_mean, complex_division)
enter_forms(
    "complex",
    "ComplexMaps",
    {
        **{f.__name__: plain(f) for f in MAPS},
        "activation": (
            lambda m, x: torch.tanh(torch.complex(x, m.b(x))).real,
            lambda m, x: gate(torch.tanh, torch.complex(x, m.b(x)), 1.0).real,
        ),
    },
)
enter_forms("complex", "ComplexGates", hold_or_not(magnitude_gate, unit_phase, complex_attention))
