"""From attributions to maps: every step of post-processing explicit, none of it hidden inside a method.

An attribution is signed and shaped as the input, [B,C,H,W]; a map has one channel, [B,H,W].
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit.errors import InputError, OptionError

Smoothing = Literal["none", "mean", "gaussian"]


def collapse(attribution: Tensor) -> Tensor:
    """Return the map of an attribution, its channel sum: [B,C,H,W] -> [B,H,W]."""
    if attribution.ndim != 4:
        raise InputError(f"attribution shaped {list(attribution.shape)}; expected [B,C,H,W]")
    return attribution.sum(1, dtype=working_dtype(attribution.dtype))


def positive(maps: Tensor) -> Tensor:
    """Keep evidence for the target: negative values become zero."""
    return maps.clamp(min=0)


def smooth(maps: Tensor, kind: Smoothing = "none", size: int = 15, sigma: float | None = None) -> Tensor:
    """Smooth maps: average each pixel with those around it, [B,H,W] -> [B,H,W].

    At the border only pixels of the image count, so that a constant map stays as it is.

    Args:
        maps: [B,H,W].
        kind: "none", "mean" (all alike) or "gaussian".
        size: side of the square window; odd.
        sigma: of the Gaussian, in pixels; a sixth of ``size`` by default.
    """
    if kind not in get_args(Smoothing):
        raise OptionError(f"smoothing {kind!r}; expected one of {', '.join(get_args(Smoothing))}")
    if size < 1 or size % 2 == 0:
        raise OptionError(f"smoothing window of {size} pixels; expected an odd number, 1 or above")
    if kind == "none":
        return _check_maps(maps)
    maps = _to_working_dtype(maps)
    width = size / 6 if sigma is None else sigma
    kernel = maps.new_full((size,), 1 / size) if kind == "mean" else gaussian_weights(size, width, maps)
    return _filter(maps, kernel) / _filter(torch.ones_like(maps[:1]), kernel)


def to_patches(maps: Tensor, patch: int) -> Tensor:
    """Make maps as coarse as those of methods on tokens, [B,H,W] -> [B,H,W]: mean of each patch, then bilinear.

    Args:
        maps: [B,H,W].
        patch: side of a patch in pixels.
    """
    if patch < 1:
        raise OptionError(f"patches of {patch} pixels; expected 1 or more")
    wide = _to_working_dtype(maps).unsqueeze(1)
    means = F.avg_pool2d(wide, patch, ceil_mode=True, count_include_pad=False)  # [B,1,h,w]
    return F.interpolate(means, maps.shape[-2:], mode="bilinear", align_corners=False)[:, 0]


def official_postprocess(maps: Tensor) -> Tensor:
    """Post-process as the DAVE authors' public code does: [B,H,W] -> [B,H,W] with maximum 1 per map.

    Positive part; half and half with its Gaussian average (11 pixels, sigma 7); bilateral filter (5 pixels, sigma 0.5
    in space and 0.05 in value); division by the maximum. Both filters see zeros outside of the image. The bilateral
    sigma is absolute and meets the map before it is scaled, so that the result depends on the map's scale.
    """
    raw = positive(_to_working_dtype(maps))
    blend = (raw + _filter(raw, gaussian_weights(11, 7.0, raw))) / 2
    out = _bilateral(blend, size=5, space=0.5, value=0.05)
    top = out.amax(dim=(1, 2), keepdim=True)
    return out / torch.where(top > 0, top, 1)


def normalize(maps: Tensor, quantile: float = 0.99) -> tuple[Tensor, Tensor]:
    """Normalise for display: positive part over a high quantile of it, clamped at 1; also return the scales.

    Where the quantile is 0, as in a map with very few positive pixels, the maximum is used instead; a map without any
    is black, with scale 1.

    Args:
        maps: [B,H,W].
        quantile: share of the pixels that stay below 1, from 0 to 1.

    Returns:
        The maps in [0, 1], [B,H,W], and the scales [B].
    """
    if not 0 <= quantile <= 1:
        raise OptionError(f"quantile {quantile}; expected a number from 0 to 1")
    raw = positive(_to_working_dtype(maps))
    ranked = raw.flatten(1).sort(dim=1).values  # [B,H*W]; torch.quantile refuses large images
    scale = ranked[:, round(quantile * (ranked.shape[1] - 1))]
    scale = torch.where(scale > 0, scale, ranked[:, -1])
    scale = torch.where(scale > 0, scale, 1)
    return (raw / scale[:, None, None]).clamp(max=1), scale


def gaussian_weights(size: int, sigma: float, like: Tensor) -> Tensor:
    """Return Gaussian weights [size] with sum 1."""
    if not 0 < sigma < float("inf"):
        raise OptionError(f"sigma {sigma}; expected pixels above 0")
    at = torch.arange(size, dtype=like.dtype, device=like.device) - size // 2
    weights = torch.exp(-at.square() / (2 * sigma**2))
    return weights / weights.sum()


def _filter(maps: Tensor, kernel: Tensor) -> Tensor:
    """Separable filter with zeros outside; sums instead of a convolution, which CUDA may round to TF32."""
    reach = len(kernel) // 2
    rows = (F.pad(maps, (reach, reach)).unfold(2, len(kernel), 1) * kernel).sum(-1)  # [B,H,W]
    return (F.pad(rows, (0, 0, reach, reach)).unfold(1, len(kernel), 1) * kernel).sum(-1)


def _bilateral(maps: Tensor, *, size: int, space: float, value: float) -> Tensor:
    """Average each pixel with those that are near in space and in value; zeros outside count as values."""
    reach = size // 2
    near = F.pad(maps, (reach, reach, reach, reach)).unfold(1, size, 1).unfold(2, size, 1)  # [B,H,W,size,size]
    kernel = gaussian_weights(size, space, maps)
    weights = torch.exp((near - maps[..., None, None]).square() / (-2 * value**2)) * kernel[:, None] * kernel
    return (near * weights).sum((-1, -2)) / weights.sum((-1, -2))


def _to_working_dtype(maps: Tensor) -> Tensor:
    return _check_maps(maps).to(working_dtype(maps.dtype))


def _check_maps(maps: Tensor) -> Tensor:
    if maps.ndim != 3 or not maps.is_floating_point():
        raise InputError(f"map is {maps.dtype} shaped {list(maps.shape)}; expected floats shaped [B,H,W]")
    return maps
