"""Explanation of a batch: attributions, targets, and the certainty of the maps."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dave_vit.engine.targets import Opponents, class_names
from dave_vit.errors import import_optional
from dave_vit.maps import collapse, normalize
from dave_vit.reduce.base import energy_share

TOO_MUCH = 0.25  # share of a map's energy that is sampling error above which users are warned
ENOUGH = 0.1  # share at which `samples="auto"` stops, too


@dataclass(frozen=True, eq=False)
class ExplainedBatch:
    """The images of an explanation, and what figures need of the model; the model itself is not held.

    Attributes:
        inputs: preprocessed images ``[B, C, H, W]``, or clips ``[B, T, C, H, W]``.
        names: of the model's classes, if it has any.
        to_colours: from preprocessed images to colours in [0, 1], if the preprocessing is known.
    """

    inputs: Tensor
    names: Sequence[str] | None = None
    to_colours: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(cls, inputs: Tensor, model: nn.Module) -> ExplainedBatch:
        """Return the batch of inputs of a model."""
        return cls(inputs, class_names(model), getattr(getattr(model, "preprocessing", None), "picture", None))

    @property
    def pictures(self) -> Tensor:
        """Colours in [0, 1], as the model sees them: ``[B, 3, H, W]``; of clips ``[B * T, 3, H, W]``.

        Without known preprocessing, every image is scaled to the range from black to white.
        """
        frames = self.inputs.flatten(0, -4)
        if self.to_colours is not None:
            return self.to_colours(frames)
        shown = frames[:, :3] if frames.shape[1] >= 3 else frames[:, :1].expand(-1, 3, -1, -1)
        low, high = shown.amin((1, 2, 3), keepdim=True), shown.amax((1, 2, 3), keepdim=True)
        return ((shown - low) / (high - low).clamp(min=1e-12)).detach().float().cpu()

    def select(self, images: Tensor) -> ExplainedBatch:
        """Select images by index."""
        return replace(self, inputs=self.inputs[images.to(self.inputs.device)])


def describe_uncertainty(samples: int, share: float, *, significant: bool) -> str | None:
    """Return a warning for a map that rests on too few samples, or None."""
    if not significant:
        return f"nothing exceeds the noise of {samples} samples: the map is their plain average and may be only noise"
    if samples < 2:
        return "one sample does not show how much of the map is noise; draw more"
    if share <= TOO_MUCH:
        return None
    needed = math.ceil(samples * share / ENOUGH)
    return f"with {samples} samples, {share:.0%} of this map is noise; with {needed} it would be {ENOUGH:.0%}"


@dataclass(frozen=True)
class Explanation:
    """Explanation of a batch of images.

    Attributes:
        attribution: signed, in the shape of the inputs ``[B, C, H, W]``; of clips ``[B, T, C, H, W]``.
        target: the explained class of each image ``[B]``, or ``[B, K]``; None for score functions.
        standard_error: of the map over the samples ``[B, H, W]``, for methods that draw samples.
        samples: how many samples it rests on; the most of any image, where images took different numbers.
        postprocess: function from the channel sum to the map, where the method prescribes one.
        against: what the classes of each image are contrasted with: a class index, "rivals", or None; None as a whole
            where no image has a contrast.
        significant: whether anything exceeds the noise of the samples, ``[B]`` or ``[B, K]``; where nothing does, the
            map is their mean. None for methods that draw no samples.
        drawn: how many samples each image took, ``[B]``, for methods that draw samples.
        neighborhood_level: which of the method's neighbourhoods each image took, ``[B]``, counted from the widest.
        mean: the average of the samples' maps ``[B, H, W]``, of which ``standard_error`` is the error.
        is_signed: whether a negative value of the map is evidence against the target.
        subject: the images, and what figures need of the model.
        unit: of the numbers of its maps: "logit", "range" where they are drawn from the smallest to the largest, or
            empty where only their order means anything.
        probability: that the model gives the explained classes, ``[B]`` or ``[B, K]``, where it is known: from DAVE's
            presets that look at the clean image, and from ``dave_vit.explain``.

    Example:
        >>> explanation = DAVE(model).explain(model.preprocess("photo.jpg"))
        >>> explanation.save("map.png")
    """

    attribution: Tensor
    target: Tensor | None
    standard_error: Tensor | None = None
    samples: int = 1
    postprocess: Callable[[Tensor], Tensor] | None = None
    against: Opponents | None = None
    significant: Tensor | None = None
    drawn: Tensor | None = None
    neighborhood_level: Tensor | None = None
    mean: Tensor | None = None
    is_signed: bool = True
    subject: ExplainedBatch | None = None
    unit: str = ""
    probability: Tensor | None = None

    def select(self, images: Tensor) -> Explanation:
        """Select images by index."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        chosen: dict[str, Any] = {name: value[images.to(value.device)] for name, value in tensors.items()}
        against = None if self.against is None else tuple(self.against[index] for index in images.tolist())
        return replace(self, **chosen, against=against, subject=self.subject and self.subject.select(images))

    def select_class(self, index: int) -> Explanation:
        """Select one of K classes or scores; the K axis is dropped."""
        names = ("attribution", "target", "standard_error", "significant", "mean", "probability")
        values = {name: getattr(self, name) for name in names}
        return replace(self, **{name: value[:, index] for name, value in values.items() if value is not None})

    @property
    def map(self) -> Tensor:
        """The map ``[B, H, W]``: the channel sum, or the method's own post-processing of it.

        Of clips ``[B, T, H, W]``, a map for each frame.
        """
        summed = self._channel_sum
        return summed if self.postprocess is None else self.postprocess(summed.flatten(0, -3)).reshape(summed.shape)

    @property
    def heatmap(self) -> Tensor:
        """The positive part of the map in [0, 1], ``[B, H, W]``: divided by its 99 % quantile, then clipped.

        It is what pytorch-grad-cam's ``show_cam_on_image`` takes, as ``heatmap[0].numpy()``.
        """
        values = self.map
        return normalize(values.flatten(0, -3), 0.99)[0].reshape(values.shape)

    def mask(self, threshold: float = 0.5) -> Tensor:
        """Return where the heatmap is at least ``threshold``, as booleans in the shape of ``heatmap``."""
        return self.heatmap >= threshold

    def to_dataframe(self) -> Any:
        """Return a pandas table with a row for each map: what it shows, its sums, its highest pixel, its samples."""
        maps = self.map.detach().flatten(0, -3).cpu()  # [N, H, W]

        def repeat(values: Tensor | None) -> list[Any] | None:
            return None if values is None else values.flatten().repeat_interleave(len(maps) // values.numel()).tolist()

        target, names = repeat(self.target), self.subject and self.subject.names
        peak = maps.flatten(1).argmax(1)
        columns = {
            "image": repeat(torch.arange(len(self.attribution))),
            "target": target,
            "label": [names[index] for index in target] if names and target else None,
            "positive": maps.clamp(min=0).sum((1, 2)).tolist(),
            "negative": maps.clamp(max=0).sum((1, 2)).tolist(),
            "x": (peak % maps.shape[-1]).tolist(),
            "y": (peak // maps.shape[-1]).tolist(),
            "samples": repeat(self.drawn) or self.samples,
            "noise_share": repeat(self.noise_share),
        }
        return import_optional("pandas").DataFrame(columns)

    def __repr__(self) -> str:
        images, shape = len(self.attribution), list(self.attribution.shape[1:])
        classes = "" if self.target is None else str(self.target.tolist())
        target = f"target {classes if len(classes) <= 40 else f'{classes[:37]}...'}" if classes else "a score"
        samples = f", {self.samples} samples" if self.standard_error is not None else ""
        return f"Explanation({images} image{'s' if images > 1 else ''} {shape}, {target}{samples})"

    @property
    def signed(self) -> Tensor:
        """Evidence for the target and, below zero, against it, ``[B, H, W]``.

        The map itself, or the average of the samples where an estimate keeps only what speaks for a class.
        """
        return self._channel_sum if self.is_signed or self.mean is None else self.mean

    @property
    def certainty(self) -> Tensor | None:
        """Average of each pixel in standard errors, ``[B, H, W]``, 0 where no error is known; None without samples."""
        error = self.standard_error
        if self.mean is None or error is None:
            return None
        return torch.where(error > 0, self.mean.abs() / error.where(error > 0, 1), 0)

    @property
    def noise_share(self) -> Tensor | None:
        """The share of each map's energy that is sampling error, ``[B]`` or ``[B, K]``; None without samples."""
        if self.mean is None or self.standard_error is None:
            return None
        return energy_share(self.mean, self.standard_error).clamp(max=1)

    @property
    def warnings(self) -> list[str | None]:
        """One entry per image: a warning if its maps rest on too few samples, else None."""
        if self.noise_share is None or self.significant is None or self.drawn is None:
            return [None] * len(self.attribution)
        shares = self.noise_share.flatten(1).amax(1) if self.noise_share.ndim > 1 else self.noise_share
        significant = self.significant.flatten(1).all(1) if self.significant.ndim > 1 else self.significant
        rows = zip(self.drawn.tolist(), shares.tolist(), significant.tolist(), strict=True)
        return [describe_uncertainty(drawn, share, significant=is_certain) for drawn, share, is_certain in rows]

    def show(self, *, view: Literal["map", "signed"] = "map", scales: Literal["shared", "own"] = "shared") -> Any:
        """Draw a figure of the images, their maps and their certainty; notebooks show it, scripts open a window.

        Args:
            view: "map" for evidence for the target, "signed" to include evidence against it.
            scales: one colour scale for all maps, or one for each.

        Returns:
            The matplotlib figure.
        """
        figure = self._figure(view=view, scales=scales)
        figure.open()
        return figure

    def save(
        self, path: str | Path, *, view: Literal["map", "signed"] = "map", scales: Literal["shared", "own"] = "shared"
    ) -> None:
        """Write the figure of ``show`` to a .png, .svg or .pdf file."""
        self._figure(view=view, scales=scales).save(path)

    @property
    def _channel_sum(self) -> Tensor:
        several = self.attribution.shape[:-3]  # [B], or [B, K]; of clips with T at the end
        summed = collapse(self.attribution.flatten(0, -4))
        return summed.reshape(*several, *summed.shape[1:])

    def _figure(self, **options: Any) -> Any:
        return import_module("dave_vit.viz").show(self, **options)  # imported late: viz is a layer above

    def _repr_png_(self) -> bytes:
        """Return the maps as a picture, for notebooks."""
        return self._figure()._repr_png_()  # type: ignore[no-any-return]

    def _repr_html_(self) -> str | None:
        """Return the maps as HTML for reports; None in Jupyter, which shows the widget or the picture already."""
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
            return None
        picture = base64.b64encode(self._repr_png_()).decode()
        return f'<img alt="{self!r}" src="data:image/png;base64,{picture}">'

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return the maps with controls if anywidget is installed, and as a picture, for notebooks."""
        return import_module("dave_vit.viz.widget").mime_bundle(self)  # type: ignore[no-any-return]


def join_explanations(parts: Sequence[Explanation]) -> Explanation:
    """Join the explanations of consecutive chunks."""
    names = [name for name, value in vars(parts[0]).items() if isinstance(value, Tensor)]
    tensors: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    against = None if parts[0].against is None else tuple(chain(*(part.against or () for part in parts)))
    return replace(parts[0], samples=max(part.samples for part in parts), against=against, **tensors)
