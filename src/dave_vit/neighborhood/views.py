"""Views around an image: warps, noise, their seeded sequence, and the way back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit._internal.schema import Bounds, Checked
from dave_vit.errors import InputError, OptionError
from dave_vit.neighborhood.draws import sample_generator
from dave_vit.neighborhood.warp import Size, Warp, affine_matrix

NoiseKind = Literal["variance_preserving", "additive", "none"]
Schedule = Literal["uniform", "linspace"]


@dataclass(frozen=True)
class Noise(Checked):
    """Gaussian noise on a view: x_t = signal(t) x + spread(t) eps.

    Args:
        kind: "variance_preserving": (1-t) x + sqrt(1-(1-t)^2) eps; "additive": x + level eps; "none".
        level: the largest t (at most 1), or the standard deviation of additive noise.
        schedule: t of variance-preserving noise: drawn from U[0, level], or evenly spaced from 0 to level.
    """

    kind: NoiseKind = "variance_preserving"
    level: float = 0.5
    schedule: Schedule = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        top = 1.0 if self.kind == "variance_preserving" else float("inf")
        if not 0 <= self.level <= top:
            raise OptionError(f"noise level {self.level}; expected a number from 0 to {top} for {self.kind} noise")

    @property
    def is_silent(self) -> bool:
        """Whether views have no noise."""
        return self.kind == "none" or self.level == 0

    def time(self, uniform: float, index: int, count: int) -> float:
        """Return the t of draw ``index`` of ``count``; a single evenly spaced draw is the clean one, t = 0.

        Args:
            uniform: a draw from U[0, 1), used by the uniform schedule.
            index: number of the draw.
            count: how many draws the schedule spans.
        """
        if self.is_silent:
            return 0.0
        if self.kind == "additive":
            return self.level
        return self.level * uniform if self.schedule == "uniform" else self.level * index / max(count - 1, 1)

    def weights(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return signal and spread at t: [n] each, in t's type."""
        if self.kind == "variance_preserving":
            return 1 - t, torch.sqrt(t * (2 - t))  # 1 - (1-t)^2 without the cancellation at small t
        return torch.ones_like(t), t


@dataclass(frozen=True)
class Spatial(Checked):
    """Ranges from which a view's warp is drawn.

    Args:
        flip: probability of a left-right flip.
        rotation: the angle is drawn from U(-rotation, rotation), in degrees.
        scale: (low, high); the factor is drawn from U(low, high).
        translation: the shift is drawn from U(-translation, translation) of each side.
        wrap: shift by whole pixels that come back at the other side, instead of filling up with zeros.
    """

    flip: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.5
    rotation: Annotated[float, Bounds(at_least=0, at_most=180)] = 20.0
    scale: tuple[float, float] = (1.0, 1.0)
    translation: Annotated[float, Bounds(at_least=0, below=1)] = 0.1
    wrap: bool = True

    draws: ClassVar[int] = 5  # uniform numbers that one warp takes

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.scale[0] <= self.scale[1]:
            raise OptionError(f"scale {self.scale}; expected (low, high) with 0 < low <= high")

    def warp(self, uniform: Tensor, size: Size) -> Warp:
        """Return the warps of uniform draws [n,5] in float64, for images of size (H, W)."""
        flip, angle, factor = uniform[:, :3].unbind(1)
        low, high = self.scale
        side = torch.tensor([size[1], size[0]], dtype=torch.float64, device="cpu")  # (x, y)
        shift = (2 * uniform[:, 3:] - 1) * self.translation * side  # [n,2]
        matrix = affine_matrix(
            size,
            flip=flip < self.flip,
            rotation=(2 * angle - 1) * self.rotation,
            scale=low + factor * (high - low),
            translation=torch.zeros_like(shift) if self.wrap else shift,
        )
        roll = shift.round().flip(1).to(torch.int64)  # (dy, dx)
        return Warp(matrix, roll if self.wrap else torch.zeros_like(roll))


@dataclass(frozen=True)
class Neighborhood(Checked):
    """Distribution of the views, and how attributions on them are pulled back. The defaults are the paper's.

    Args:
        spatial: ranges of the warps.
        noise: kind, level and schedule of the noise.
        noise_first: noise the image before it is warped, tau(x + eps), instead of after, tau(x) + eps.
        pull_back: "inverse" warps back; "adjoint" takes the gradient with respect to the image before noise and warp.
        antithetic: samples 2k and 2k+1 share t and have opposite eps; their warps stay independent.
        fill: what warps bring in from outside of the picture. Zero is the mean colour of most models' inputs, but no
            colour at all where channels are colours and their complements (B-cos): there it is 0.5.
    """

    spatial: Spatial = field(default_factory=Spatial)
    noise: Noise = field(default_factory=Noise)
    noise_first: bool = True
    pull_back: Literal["inverse", "adjoint"] = "inverse"
    antithetic: bool = False
    fill: float = 0.0

    def views(
        self,
        shape: tuple[int, ...],
        *,
        samples: int,
        seed: int = 0,
        start: int = 0,
        stop: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Views:
        """Draw views start..stop-1 out of ``samples``; draw i depends on the seed and i only, however they are chunked.

        The views hold draws, not images: they may be kept and applied to other images of the same shape.

        Args:
            shape: (C, H, W) of the images, or (T, C, H, W) of clips: all frames of a clip share its warp, and each has
                noise of its own.
            samples: length T of the whole sequence; evenly spaced noise spans it.
            seed: any integer.
            start: first draw.
            stop: one past the last draw; all by default.
            device: where the noise is kept.
            dtype: type of the noise; it is drawn in float32 and then cast.
        """
        stop = samples if stop is None else stop
        if not 0 <= start < stop <= samples:
            raise OptionError(f"draws {start} to {stop} of {samples} samples; expected 0 <= start < stop <= samples")
        indices = range(start, stop)
        uniform = torch.stack([_uniform(sample_generator(seed, i, "spatial"), Spatial.draws) for i in indices])
        warp = self.spatial.warp(uniform, (shape[-2], shape[-1]))
        t, eps = self._draw_noise(shape, seed, indices, samples)
        return Views(warp, t, None if eps is None else eps.to(device, dtype, non_blocking=True), self)

    def _draw_noise(self, shape: tuple[int, ...], seed: int, rows: range, samples: int) -> tuple[Tensor, Tensor | None]:
        share = 2 if self.antithetic else 1  # samples to one draw
        t = torch.zeros(len(rows), dtype=torch.float64, device="cpu")
        if self.noise.is_silent:
            return t, None
        eps = torch.empty((len(rows), *shape), dtype=torch.float32, device="cpu")
        for row, i in enumerate(rows):
            generator = sample_generator(seed, i // share, "noise")
            t[row] = self.noise.time(_uniform(generator, 1).item(), i // share, -(-samples // share))
            eps[row].normal_(generator=generator)
            if i % share:
                eps[row].neg_()
        return t, eps


@dataclass(frozen=True, eq=False)
class Views:
    """Draws of a neighborhood, shared by all images of a batch; may also be built from recorded draws.

    Args:
        warp: n warps.
        t: [n], how far each view is noised: t of variance-preserving noise, the level of additive noise.
        eps: [n,C,H,W], or [n,T,C,H,W] of clips, standard normal noise, or None for none.
        neighborhood: says how the draws are put together and pulled back.
    """

    warp: Warp
    t: Tensor
    eps: Tensor | None
    neighborhood: Neighborhood
    _parts: dict[tuple[int, int], Views] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        n = len(self.warp)
        if self.t.shape != (n,) or (self.eps is not None and (self.eps.ndim not in (4, 5) or len(self.eps) != n)):
            shapes = f"t {list(self.t.shape)} and eps {None if self.eps is None else list(self.eps.shape)}"
            raise OptionError(f"views of {n} warps with {shapes}; expected t [{n}] and eps [{n},C,H,W] or None")

    def __len__(self) -> int:
        return len(self.warp)

    def part(self, start: int, stop: int) -> Views:
        """Select draws; the parts are cached with what was computed to apply and pull them back."""
        if (start, stop) not in self._parts:
            eps = None if self.eps is None else self.eps[start:stop]
            self._parts[start, stop] = replace(self, warp=self.warp.part(start, stop), t=self.t[start:stop], eps=eps)
        return self._parts[start, stop]

    def apply(self, x: Tensor) -> Tensor:
        """Return the views of every image: [B,C,H,W] -> [n,B,C,H,W], or of every clip with T before C, in x's type."""
        fits = x.ndim in (4, 5) and (self.eps is None or x.shape[1:] == self.eps.shape[1:])
        if not fits or not x.is_floating_point():
            expected = "[B,C,H,W]" if self.eps is None else f"[B,{','.join(map(str, self.eps.shape[1:]))}]"
            raise InputError(f"views of {x.dtype} shaped {list(x.shape)}; expected floats {expected}, as was drawn for")
        copies = x.to(working_dtype(x.dtype)).expand(len(self), *x.shape)  # [n,B,C,H,W]
        if self.neighborhood.noise_first:
            out = self._warp_images(self._add_noise(copies))  # tau(X + eps), eq. (8)
        else:
            out = self._add_noise(self._warp_images(copies))
        return out.to(x.dtype)

    def move_mask(self, place: Tensor) -> Tensor:
        """Warp a mask of the image as each view does, as floats from 0 to 1: [H,W] -> [n,H,W]."""
        return self.warp.apply(place.expand(len(self), 1, *place.shape))[:, 0]

    def pull_back(self, w: Tensor) -> Tensor:
        """Map attributions on the views back into the frame of the image: [n,B,C,H,W] -> [n,B,C,H,W].

        "inverse" warps back and scales nothing. "adjoint" is the gradient with respect to the image before noise and
        warp. A view is tau(signal x + spread eps) or signal tau(x) + spread eps; both are signal tau(x) plus a
        constant, so that in either order the gradient is signal tau^T(w), with signal = 1 - t for
        variance-preserving noise and 1 otherwise.
        """
        if w.ndim != 5 or len(w) != len(self):
            raise InputError(f"pull back of shape {list(w.shape)}; expected [{len(self)},B,C,H,W], one entry per view")
        if self.neighborhood.pull_back == "inverse":
            return self.warp.inverse(w.flatten(1, 2)).view(w.shape)  # tau^-1 W, eq. (8)
        back = self.warp.adjoint(w.flatten(1, 2)).view(w.shape)
        if self.eps is None:
            return back
        signal, _ = self.neighborhood.noise.weights(self.t)
        return back * _per_sample(signal, back)

    def _warp_images(self, copies: Tensor) -> Tensor:
        # All images and frames of a view share its warp: they travel as channels of one sample.
        return self.warp.apply(copies.flatten(1, -3), fill=self.neighborhood.fill).view(copies.shape)

    def _add_noise(self, copies: Tensor) -> Tensor:
        if self.eps is None:
            return copies
        signal, spread = (_per_sample(weight, copies) for weight in self.neighborhood.noise.weights(self.t))
        eps = self.eps.to(copies.device, copies.dtype, non_blocking=True)
        return signal * copies + spread * eps[:, None]  # [n,B,C,H,W]


def _uniform(generator: torch.Generator, count: int) -> Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Reshape [n] to [n,1,1,...] in the type and on the device of ``like``, with as many dimensions."""
    return values.to(like.device, like.dtype, non_blocking=True).view(-1, *[1] * (like.ndim - 1))


_CACHE_BYTES = 256 * 2**20  # draws of one neighbourhood up to this size are kept
_BYTES_PER_PIXEL = 24  # beside the noise: coordinates to sample from, for a view and in two steps for the way back


class ViewCache:
    """Views of several neighbourhoods for images of one shape.

    Args:
        levels: the neighbourhoods.
        samples: number of views of each.
        seed: of the draws.
    """

    def __init__(self, levels: Sequence[Neighborhood], samples: int, seed: int) -> None:
        self.levels, self.samples, self.seed = levels, samples, seed
        self._views: dict[tuple[Any, ...], Views] = {}

    def views(self, images: Tensor, level: int, start: int, stop: int) -> Views:
        """Return the draws ``start`` to ``stop`` of a neighbourhood, for images of this form."""
        shape = tuple(images.shape[1:])
        key = (level, shape, images.device, images.dtype)
        if key not in self._views:
            draw = partial(self.levels[level].views, shape, samples=self.samples, seed=self.seed)
            draw = partial(draw, device=images.device, dtype=images.dtype)
            bytes_per_view = math.prod(shape) * images.element_size() + math.prod(shape[-2:]) * _BYTES_PER_PIXEL
            if self.samples * bytes_per_view > _CACHE_BYTES:
                return draw(start=start, stop=stop)
            self._views = {known: value for known, value in self._views.items() if known[1:] == key[1:]}
            self._views[key] = draw()
        return self._views[key].part(start, stop)
