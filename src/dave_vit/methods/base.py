"""Base of all methods: from a model and images to signed attributions in the shape of the images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from dave_vit._internal.registry import Registry
from dave_vit.engine import gradient
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.forward import check_inputs
from dave_vit.engine.gradient import Gradient
from dave_vit.engine.targets import Opponents, Target, TargetLike, class_names
from dave_vit.errors import InputError, OptionError, OutputError
from dave_vit.maps import collapse
from dave_vit.methods.certainty import ExplainedBatch, describe_uncertainty, sureness
from dave_vit.methods.pass_size import PassSize, clean_logits
from dave_vit.reduce.base import energy_share

Count = TypeVar("Count", int, int | None)


@dataclass(frozen=True)
class MethodInfo:
    """Description of a method for tables and help texts.

    Attributes:
        summary: one sentence.
        paper: where it was published.
        passes: forward and backward passes a map costs, as a phrase such as "1 forward, 1 backward".
        resolution: whether it resolves pixels or patches.
        class_specific: whether another target gives another map.
        unit: what its numbers are shares of: "logit" where they are parts of the class score, "own" where only their
            order means anything; maps of one unit can share a colour scale.
    """

    summary: str
    paper: str
    passes: str
    resolution: Literal["pixel", "patch"] = "pixel"
    class_specific: bool = True
    unit: Literal["logit", "own"] = "own"


@dataclass(frozen=True)
class Explanation:
    """Explanation of a batch of images.

    Attributes:
        attribution: signed, in the shape of the inputs ``[B, C, H, W]``; of clips ``[B, T, C, H, W]``.
        target: the explained class of each image ``[B]``, or ``[B, K]``; None for a score function.
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
        subject: the images and the model, for figures.

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
    subject: ExplainedBatch | None = None

    def select(self, images: Tensor) -> Explanation:
        """Select images by index."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        chosen: dict[str, Any] = {name: value[images.to(value.device)] for name, value in tensors.items()}
        against = None if self.against is None else tuple(self.against[index] for index in images.tolist())
        return replace(self, **chosen, against=against, subject=self.subject and self.subject.select(images))

    def _without_class_axis(self) -> Explanation:
        """Drop the axis of K = 1 classes."""
        values = {
            name: getattr(self, name) for name in ("attribution", "target", "standard_error", "significant", "mean")
        }
        return replace(self, **{name: value[:, 0] for name, value in values.items() if value is not None})

    @property
    def map(self) -> Tensor:
        """The map ``[B, H, W]``: the channel sum, or the method's own post-processing of it.

        Of clips ``[B, T, H, W]``, a map for each frame.
        """
        summed = self._channel_sum
        if self.postprocess is None:
            return summed
        return self.postprocess(summed.flatten(0, -3)).reshape(summed.shape)

    @property
    def signed(self) -> Tensor:
        """Evidence for the target and, below zero, against it, ``[B, H, W]``.

        The average of the samples where there are any: the estimate keeps only what is significant for a class.
        """
        return self._channel_sum if self.mean is None else self.mean

    @property
    def sureness(self) -> Tensor | None:
        """Average of each pixel in standard errors, ``[B, H, W]``; None without samples."""
        if self.mean is None or self.standard_error is None:
            return None
        return sureness(self.mean, self.standard_error)

    @property
    def chance(self) -> Tensor | None:
        """The share of each map's energy that is sampling error, ``[B]`` or ``[B, K]``; None without samples."""
        if self.mean is None or self.standard_error is None:
            return None
        return energy_share(self.mean, self.standard_error).clamp(max=1)

    @property
    def doubts(self) -> list[str | None]:
        """One entry per image: a warning if its maps rest on too few samples, else None."""
        if self.chance is None or self.significant is None or self.drawn is None:
            return [None] * len(self.attribution)
        shares = self.chance.flatten(1).amax(1) if self.chance.ndim > 1 else self.chance
        significant = self.significant.flatten(1).all(1) if self.significant.ndim > 1 else self.significant
        rows = zip(self.drawn.tolist(), shares.tolist(), significant.tolist(), strict=True)
        return [describe_uncertainty(drawn, share, significant=is_certain) for drawn, share, is_certain in rows]

    def show(self, *, view: Literal["map", "signed"] = "map", scales: Literal["shared", "own"] = "shared") -> Any:
        """Draw a figure of the images, their maps and how sure they are; notebooks show it, scripts open a window.

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
        picture: bytes = self._figure()._repr_png_()
        return picture

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return the maps with controls if anywidget is installed, and as a picture, for notebooks."""
        bundle: dict[str, Any] = import_module("dave_vit.viz.widget").mime_bundle(self, self._repr_png_())
        return bundle


class Method(ABC):
    """Base of all methods: options that never change, and one step that explains a chunk of images.

    Args:
        model: any module that maps inputs ``[B, C, H, W]`` to logits ``[B, classes]``, or to anything else that a score
            function can read. It is never changed.
        chunk: rows (images, or images times samples) in one forward pass; it changes speed and memory, not the maps.
        autocast: run the model under autocast, for example ``torch.bfloat16``.

    Example:
        >>> attribution = create_method("input_x_gradient", model).attribute(images, target=207)
    """

    info: ClassVar[MethodInfo]
    _budget_option: ClassVar[tuple[str, int] | None] = None  # sets the number of passes; passes beside these
    _rows: ClassVar[Mapping[str, int]] = {"cuda": 288, "cpu": 20}  # of a pass; 288 of a ViT-B take 8 GiB in bfloat16

    def __init__(self, model: nn.Module, *, chunk: int | None = None, autocast: torch.dtype | None = None) -> None:
        self.model, self.autocast = model, autocast
        self.chunk = check_at_least_one("chunk", chunk)

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):  # what was drawn or compiled for the old value would be served on
            raise OptionError(f"{name} of a method cannot be changed; make another {type(self).__name__} with it")
        super().__setattr__(name, value)

    def attribute(self, inputs: Tensor, target: TargetLike = None) -> Tensor:
        """Compute signed attributions in the shape of the inputs.

        Args:
            inputs: preprocessed images ``[B, C, H, W]``, or clips ``[B, T, C, H, W]``.
            target: a class index or name, one an image, ``[B, K]`` of them, a ``Contrast``, a function of the model's
                output, as the model returns it, to one score an image, or None for the predicted class.

        Returns:
            ``[B, C, H, W]``; ``[B, K, C, H, W]`` for ``[B, K]`` targets.
        """
        return self.explain(inputs, target).attribution

    @torch.inference_mode(mode=False)  # where autograd could not be switched on
    def explain(self, inputs: Tensor, target: TargetLike = None) -> Explanation:
        """Explain a batch of any size; the explanation also holds what is known of its certainty."""
        images, normalised, pass_size = self._prepare(inputs, target)

        def step(start: int, stop: int) -> Explanation:
            return self._explain(images[start:stop], normalised.part(start, stop), pass_size)

        return self._finish(join_explanations(pass_size.run_chunks(step, len(images))), images, normalised)

    @classmethod
    def options_for_budget(cls, budget: int, **options: Any) -> dict[str, Any]:
        """Return the options with which a map of a known class takes this many forward passes, or few more.

        Args:
            budget: forward passes of one map.
            options: that are fixed already.

        Returns:
            Nothing for methods that take a fixed number.
        """
        if cls._budget_option is None:
            return {}
        name, others = cls._budget_option
        return {name: max(1, budget - others)}

    @abstractmethod
    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        """Explain a chunk of images: attributions ``[b, K, C, H, W]``, classes ``[b, K]``, maps ``[b, K, H, W]``.

        Args:
            images: ``[b, C, H, W]``.
            target: what is explained of each of them; its classes may still have to be resolved on logits.
            pass_size: for methods that run the model on more rows than there are images.
        """

    def _prepare(self, inputs: Tensor, target: TargetLike) -> tuple[Tensor, Target, PassSize]:
        """Return images that autograd accepts, the normalised target and the pass size of a call."""
        check_images(inputs)
        images = inputs.clone() if inputs.is_inference() else inputs.detach()
        normalised = Target.of(target, len(images), class_names(self.model)).to(images.device)
        return images, normalised, PassSize(self.chunk or self._rows.get(images.device.type, self._rows["cpu"]))

    def _finish(self, explanation: Explanation, images: Tensor, target: Target) -> Explanation:
        """Add what is common to all methods; this is the one place that drops a K axis that the caller did not give."""
        shape = tuple(explanation.attribution.shape)
        if len(shape) != images.ndim + 1 or shape[:2] != (len(images), target.count):
            raise OutputError(
                f"{type(self).__name__} returned attributions of shape {shape}; a method must return [B, K, ...], "
                f"here [{len(images)}, {target.count}, ...]"
            )
        against = target.against if explanation.against is None else explanation.against
        against = None if against is None or against.count(None) == len(against) else against
        explanation = replace(explanation, against=against, subject=ExplainedBatch(images, self.model))
        return explanation if target.has_class_axis else explanation._without_class_axis()

    def _resolve_target(self, images: Tensor, target: Target, pass_size: PassSize) -> Target:
        """Resolve the target on the clean images; takes no forward pass if it is resolved already."""
        if target.is_resolved:
            return target
        return target.resolve(clean_logits(self.model, images, pass_size, autocast=self.autocast))

    def _gradient(self, images: Tensor, target: Target, rules: RuleSet) -> Gradient:
        """Compute the gradient under a rule set: one forward pass, and a backward pass per class."""
        return gradient(self.model, images, target, rules=rules, autocast=self.autocast)


def join_explanations(parts: Sequence[Explanation]) -> Explanation:
    """Join the explanations of consecutive chunks."""
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name, value in vars(parts[0]).items()
        if isinstance(value, Tensor)
    }
    against = None if parts[0].against is None else tuple(chain(*(part.against or () for part in parts)))
    return replace(parts[0], samples=max(part.samples for part in parts), against=against, **tensors)


def multiply_by_input(passed: Gradient, images: Tensor, target: Target) -> Explanation:
    """Return the explanation gradient times input."""
    return Explanation(passed.weight * images.unsqueeze(1), target.resolve(passed.logits).indices)


def check_images(inputs: Tensor) -> None:
    """Raise InputError for what is no batch of images or clips."""
    check_inputs(inputs)
    if inputs.ndim not in (4, 5):
        raise InputError(
            f"inputs have shape {tuple(inputs.shape)}; give a batch of images [B, C, H, W], or of clips [B, T, C, H, W]"
        )


def check_no_clips(images: Tensor, name: str, why: str) -> None:
    """Raise InputError for clips ``[B, T, C, H, W]``, for methods that work on the places of one image."""
    if images.ndim != 4:
        raise InputError(
            f"{name} {why}, so it takes images [B, C, H, W] and no clips of shape {tuple(images.shape)}; use dave or "
            "input_x_gradient, which explain clips as well"
        )


def check_at_least_one(name: str, value: Count) -> Count:
    """Return the value of a counting option if it is at least 1, or None."""
    if value is not None and value < 1:
        raise OptionError(f"{name} is {value}; it must be at least 1")
    return value


METHODS: Registry[type[Method]] = Registry("method")


def create_method(name: str, model: nn.Module, **options: Any) -> Method:
    """Create a method by its name.

    Args:
        name: one of ``METHODS``.
        model: the model to explain.
        options: the method's own options.
    """
    try:
        return METHODS[name](model, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise OptionError(f"method {name!r}: {str(error).split('() ')[-1]}") from error
