"""Base of all methods: from a model and images to signed attributions in the shape of the images."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar, dataclass_transform

import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit._internal.registry import Registry
from dave_vit._internal.schema import Count, check_annotations, check_type, declare_options
from dave_vit.engine import EFFECTIVE, PLAIN, RuleSet, gradient
from dave_vit.engine.forward import autocast_context, check_inputs
from dave_vit.engine.gradient import Gradient
from dave_vit.engine.targets import Target, TargetLike, class_names
from dave_vit.errors import InputError, OptionError, OutputError
from dave_vit.methods.explanation import ExplainedBatch, Explanation, join_explanations
from dave_vit.methods.pass_size import Kept, Memory, PassForm, PassSize, clean_logits, memory_budget, parse_memory

Number = TypeVar("Number", int, int | None)
Inputs: TypeAlias = Tensor | str | Path | Image.Image
"""Preprocessed images ``[B, C, H, W]`` or clips ``[B, T, C, H, W]``; or one image, for models with ``preprocess``."""


@dataclass(frozen=True)
class MethodInfo:
    """Description of a method for tables and help texts.

    Attributes:
        summary: one sentence; the first line of the method's docstring by default.
        paper: where it was published.
        passes: forward and backward passes that a map costs, as a phrase such as "1 forward, 1 backward".
        resolution: whether it resolves pixels or patches; as other methods of its base class by default.
        class_specific: whether another target gives another map.
        unit: what its numbers are shares of: "logit" where they are parts of the class score, "own" where only their
            order means anything, "range" where they are drawn from the smallest to the largest, as published; maps of
            one unit can share a colour scale.
    """

    summary: str = ""
    paper: str = ""
    passes: str = "unknown"
    resolution: Literal["pixel", "patch"] | None = None
    class_specific: bool = True
    unit: Literal["logit", "own", "range"] = "own"


@dataclass_transform(eq_default=False, field_specifiers=(field,))
@declare_options
class Method(ABC):
    """Base of all methods: options that never change, and one step that explains a chunk of images.

    Annotated attributes of a subclass are its options, unless it has a constructor of its own.

    Args:
        model: any module that maps inputs ``[B, C, H, W]`` to logits ``[B, classes]``, or to anything else that a score
            function can read. It is never changed.
        chunk: most rows (images, or images times samples) in one forward pass; it changes speed, not the maps.
        memory: most memory of a pass, beside the model: "8GiB", bytes, or a share of what is free such as 0.5; half of
            a GPU's free memory by default, at most 16 GiB. It changes speed, not the maps.
        autocast: run the model under autocast, for example ``torch.bfloat16``.

    Example:
        >>> attribution = create_method("input_x_gradient", model).attribute(images, target=207)
    """

    info: ClassVar[MethodInfo]
    rules = PLAIN  # the derivatives
    model: nn.Module
    _: KW_ONLY
    chunk: Count | None = None
    memory: Memory | None = None
    autocast: torch.dtype | None = None
    _arguments: tuple[tuple[Any, ...], dict[str, Any]] = field(init=False)
    _budget_option: ClassVar[tuple[str, int] | None] = None  # sets the number of passes; passes beside these
    _why_no_clips: ClassVar[str | None] = None  # what the method does that needs one image, if it takes no clips
    _rows: ClassVar[Mapping[str, int]] = {"cuda": 288, "cpu": 20}  # of a pass, at most; more are not faster
    _resolution: ClassVar[Literal["pixel", "patch"]] = "pixel"
    _kept: ClassVar[Kept] = "graph"  # by a pass until its derivatives are taken

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InputError(f"the model is {self.model!r}; give a module, such as dave_vit.load_model({self.model!r})")
        if self.memory is not None:
            parse_memory(self.memory)
        check_annotations(self)

    def __init_subclass__(cls) -> None:
        declare_options(cls)
        info = vars(cls).get("info")
        if info is not None:
            summary = info.summary or (cls.__doc__ or "").partition("\n")[0]
            cls.info = replace(info, summary=summary, resolution=info.resolution or cls._resolution)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Remember the arguments, of which copies are made anew: what is recorded or compiled cannot be pickled."""
        method = super().__new__(cls)
        method._arguments = (args, options)
        return method

    def __reduce__(self) -> tuple[Any, ...]:
        args, options = self._arguments
        return partial(type(self), **options), args

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):  # what was drawn or compiled for the old value would be served on
            raise OptionError(f"{name} of a method cannot be changed; make another {type(self).__name__} with it")
        super().__setattr__(name, value)

    def attribute(self, inputs: Inputs, target: TargetLike = None) -> Tensor:
        """Compute signed attributions in the shape of the inputs.

        Args:
            inputs: preprocessed images ``[B, C, H, W]``, or clips ``[B, T, C, H, W]``; one image as a file or a PIL
                image, if the model has ``preprocess``, as those of ``load_model``.
            target: a class index or name, one an image, ``[B, K]`` of them, a ``Contrast``, a function of the model's
                output, as the model returns it, to one score an image, or None for the predicted class.

        Returns:
            ``[B, C, H, W]``; ``[B, K, C, H, W]`` for ``[B, K]`` targets.
        """
        return self.explain(inputs, target).attribution

    @torch.inference_mode(mode=False)  # where autograd could not be switched on
    def explain(self, inputs: Inputs, target: TargetLike = None) -> Explanation:
        """Explain a batch of any size; the explanation also holds what is known of its certainty."""
        images, normalised, pass_size = self._prepare(inputs, target)

        def step(start: int, stop: int) -> Explanation:
            return self._explain(images[start:stop], normalised.part(start, stop), pass_size)

        with autocast_context(images, None):  # an autocast of the caller would round what methods compute of the passes
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

    def _prepare(self, given: Inputs, target: TargetLike) -> tuple[Tensor, Target, PassSize]:
        """Return images that autograd accepts, the normalised target and the pass size of a call."""
        inputs = given if isinstance(given, Tensor) else self._preprocess(given)
        check_inputs(inputs)
        if inputs.ndim not in (4, 5):
            shape = tuple(inputs.shape)
            raise InputError(
                f"inputs have shape {shape}; give a batch of images [B, C, H, W], or of clips [B, T, C, H, W]"
            )
        if self._why_no_clips is not None:
            check_no_clips(inputs, type(self).__name__, self._why_no_clips)
        images = inputs.clone() if inputs.is_inference() else inputs.detach()
        normalised = Target.of(target, len(images), class_names(self.model)).to(images.device)
        return images, normalised, self._pass_size(images, normalised)

    def _pass_size(self, images: Tensor, target: Target) -> PassSize:
        """Return the rows of a pass: as many as the memory allows, up to a number beyond which more are not faster."""
        most = self.chunk or self._rows.get(images.device.type, self._rows["cpu"])
        model = None if images.device.type == "cpu" else self.model
        pass_size = PassSize(most, memory_budget(self.memory, images.device), model)
        rules = EFFECTIVE if self._kept == "constants" else self.rules
        form = PassForm(self.model, self._kept, rules, self.autocast, target.read, target.count)
        pass_size.rows = pass_size.limit_rows(most, form, images)
        return pass_size

    def _preprocess(self, image: Any) -> Tensor:
        """Return the input of an image that is given as a file or a PIL image, ``[1, C, H, W]``."""
        preprocess = getattr(self.model, "preprocess", None)
        if not isinstance(image, str | Path | Image.Image):
            raise InputError(f"inputs are of type {type(image).__name__}; give a float tensor [B, C, H, W]")
        if preprocess is None:
            raise InputError(
                "the input is a picture, and the model has no preprocess; give a preprocessed float tensor "
                "[B, C, H, W], or load the model with dave_vit.load_model"
            )
        return preprocess(image)  # type: ignore[no-any-return]

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
        unit = self.info.unit.replace("own", "")
        explanation = replace(explanation, against=against, subject=ExplainedBatch.of(images, self.model), unit=unit)
        return explanation if target.has_class_axis else explanation.select_class(0)

    def _resolve_target(self, images: Tensor, target: Target, pass_size: PassSize) -> Target:
        """Resolve the target on the clean images; takes no forward pass if it is resolved already."""
        if target.is_resolved:
            return target
        return target.resolve(self._logits(images, target, pass_size))

    def _logits(self, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        """Compute the logits of images ``[B, classes]``, or the values of a score."""
        return clean_logits(self.model, images, pass_size, target.read, self.autocast)

    def _gradient(self, images: Tensor, target: Target, rules: RuleSet) -> Gradient:
        """Compute the gradient under a rule set: one forward pass, and a backward pass per class."""
        return gradient(self.model, images, target, rules=rules, autocast=self.autocast)


def multiply_by_input(passed: Gradient, images: Tensor, target: Target) -> Explanation:
    """Return the explanation gradient times input."""
    return Explanation(passed.weight * images.unsqueeze(1), target.resolve(passed.logits).indices)


def check_no_clips(images: Tensor, name: str, why: str) -> None:
    """Raise InputError for clips ``[B, T, C, H, W]``, for methods that work on the places of one image."""
    if images.ndim != 4:
        raise InputError(
            f"{name} {why}, so it takes images [B, C, H, W], not clips or several images of a prompt, of shape "
            f"{tuple(images.shape)}; use dave or input_x_gradient, which explain these as well"
        )


def check_at_least_one(name: str, value: Number) -> Number:
    """Return the value of a counting option if it is at least 1, or None."""
    check_type(name, value, Count | None)
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
        check_option_names(name, options)
        raise


def check_option_names(method: str, options: Mapping[str, Any]) -> None:
    """Raise OptionError for an option that a method does not have, with the nearest one that it has."""
    import_module("dave_vit.methods.options").check_options(method, options)  # imported late: it reads this module
