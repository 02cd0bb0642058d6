"""All methods as classes with captum's signatures; any other name is that of captum itself.

Example:
    >>> from dave_vit.integrations.captum import DAVE, IntegratedGradients
    >>> attributions = DAVE(model).attribute(inputs, target=281)
"""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from inspect import Parameter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dave_vit.engine.targets import Target, class_names
from dave_vit.errors import InputError, OptionError, TargetError
from dave_vit.integrations import class_finder, list_classes
from dave_vit.methods import METHODS, Method, create_method
from dave_vit.methods.options import declared_options

# Arguments after the inputs in the order of captum's class of the same name, which begins with others than the default.
_DEFAULT_ORDER = "target baselines additional_forward_args"
_NO_BASELINES = "target additional_forward_args"
_SURROGATE = "baselines target additional_forward_args feature_mask n_samples perturbations_per_eval"
_ORDERS = {
    "integrated_gradients": "baselines target additional_forward_args n_steps method internal_batch_size "
    "return_convergence_delta",
    "occlusion": "sliding_window_shapes strides baselines target additional_forward_args perturbations_per_eval",
    **dict.fromkeys(("lime", "kernel_shap"), _SURROGATE),
    "saliency": "target abs additional_forward_args",
    **dict.fromkeys(("input_x_gradient", "guided_backprop", "deconvolution"), _NO_BASELINES),
}
_NAMES = {
    "n_steps": "steps",
    "n_samples": "samples",
    "abs": "absolute",
    "internal_batch_size": "chunk",
    "perturbations_per_eval": "chunk",
    "sliding_window_shapes": "window",
    "strides": "stride",
}
# Arguments of captum that say nothing more where they have these values.
_DEFAULTS = {"method": "gausslegendre", "return_input_shape": True}


class Attribution:
    """Base of the generated classes.

    Args:
        forward_func: a module, or a function, from inputs ``[B, ...]`` to logits ``[B, classes]``.
        options: of the method, such as ``samples``; the arguments of ``attribute`` replace them for one call.
    """

    method_name: ClassVar[str]
    multiplies_by_inputs = True  # attributions are parts of the score, as captum's NoiseTunnel asks

    def __init__(self, forward_func: Callable[..., Any], **options: Any) -> None:
        if not options.pop("multiply_by_inputs", True):
            raise OptionError("multiply_by_inputs=False is not supported; use saliency with abs=False")
        self.forward_func, self._options = forward_func, options
        self._model = forward_func if isinstance(forward_func, nn.Module) else _Reshaped(forward_func, None)
        self._method = create_method(self.method_name, self._model, **options)

    def has_convergence_delta(self) -> bool:
        """Return whether ``attribute`` takes ``return_convergence_delta``."""
        return hasattr(self._method, "completeness_gap")

    def _attribute(self, inputs: Any, arguments: dict[str, Any]) -> Any:
        """Compute attributions in the shape of the inputs; with a delta ``[B]`` if asked for."""
        values = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs
        if not isinstance(values, Tensor) or arguments.pop("additional_forward_args", None) is not None:
            raise InputError("give one tensor as the inputs; dave_vit.with_inputs holds the other arguments of a model")
        target, has_delta = arguments.pop("target", None), arguments.pop("return_convergence_delta", False)
        if has_delta and not self.has_convergence_delta():
            raise OptionError(f"{type(self).__name__} has no convergence delta; leave return_convergence_delta out")
        if isinstance(target, tuple):
            raise TargetError("target is a tuple; give a function of the model's output to one number per image")
        parts = self._split(values, target, arguments)
        results = [method.attribute(images, each) for method, images, each in parts]
        attribution = torch.cat(results).reshape(values.shape)
        shaped = (attribution,) if isinstance(inputs, tuple) else attribution
        if not has_delta:
            return shaped
        gaps = [part[0].completeness_gap(part[1], one, part[2]) for part, one in zip(parts, results, strict=True)]
        return shaped, torch.cat(gaps).to(values.dtype)

    def _split(self, values: Tensor, target: Any, arguments: dict[str, Any]) -> list[tuple[Any, Tensor, Target]]:
        """Return methods with the images ``[b, C, H, W]`` and targets that each explains: one for each baseline."""
        images = values.reshape(*values.shape, *[1] * (4 - values.ndim))
        resolved = Target.of(target, len(images), class_names(self._model)).to(images.device)
        baselines = arguments.pop("baselines", None)
        given = {name: _plain(name, value) for name, value in arguments.items() if _says(name, value)}
        options = {_NAMES.get(name, name): value for name, value in given.items()}
        model = self._model if images.ndim == values.ndim else _Reshaped(self.forward_func, values.shape[1:])
        each = baselines[0] if isinstance(baselines, tuple) else baselines
        if not isinstance(each, Tensor) or each.ndim < values.ndim or len(each) == 1:
            return [(self._create(model, each, options, images), images, resolved)]
        return [
            (self._create(model, baseline, options, image), image, resolved.part(number, number + 1))
            for number, (image, baseline) in enumerate(zip(images.split(1), each.split(1), strict=True))
        ]

    def _create(self, model: nn.Module, baseline: Any, options: dict[str, Any], images: Tensor) -> Method:
        """Return the method with a baseline; methods without one take zeros, which change nothing."""
        if "baseline" in declared_options(self.method_name):
            if isinstance(baseline, Tensor):
                baseline = baseline.reshape(images.shape[1:]) if baseline.numel() > 1 else float(baseline)
            options = options if baseline is None else {**options, "baseline": baseline}
        elif baseline is not None and bool(torch.as_tensor(baseline).count_nonzero()):
            raise OptionError(f"{type(self).__name__} has no baseline; leave baselines out")
        if not options and model is self._model:
            return self._method
        return create_method(self.method_name, model, **{**self._options, **options})


class _Reshaped(nn.Module):
    """A function as a module; it takes images, and gives the function what it expects."""

    def __init__(self, function: Callable[..., Any], shape: torch.Size | None) -> None:
        super().__init__()
        self.function, self.shape = function, shape

    def forward(self, images: Tensor) -> Any:
        """Return the function's output."""
        return self.function(images if self.shape is None else images.reshape(-1, *self.shape))


def _says(name: str, value: Any) -> bool:
    return value is not None and name != "show_progress" and value != _DEFAULTS.get(name)


def _plain(name: str, value: Any) -> Any:
    """Return the side of a window that captum writes as (channels, height, width)."""
    if name not in ("sliding_window_shapes", "strides") or isinstance(value, int):
        return value
    if len(set(value[-2:])) > 1:
        raise OptionError(f"{name} is {value}; give a square, such as (3, 16, 16)")
    return int(value[-1])


@cache
def _build(method: str) -> type[Attribution]:
    order = _ORDERS.get(method, _DEFAULT_ORDER).split()

    def implementation(self: Attribution, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """Compute attributions in the shape of the inputs, as captum's class does; see the class for the options."""
        if len(arguments) > len(order):
            raise TypeError(f"attribute takes {len(order)} arguments after the inputs; name the others")
        return self._attribute(inputs, {**dict(zip(order, arguments, strict=False)), **named})

    start = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "inputs")]
    others = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in order]
    options = Parameter("options", Parameter.VAR_KEYWORD)
    vars(implementation)["__signature__"] = inspect.Signature([*start, *others, options])

    @wraps(implementation)  # captum's NoiseTunnel calls what is wrapped
    def attribute(self: Attribution, inputs: Any, *arguments: Any, **named: Any) -> Any:
        return implementation(self, inputs, *arguments, **named)

    kind = METHODS[method]
    members = {"attribute": attribute, "method_name": method, "__module__": __name__, "__doc__": kind.__doc__}
    return type(kind.__name__, (Attribution,), members)


__getattr__ = class_finder(__name__, _build, "captum.attr", "captum")
__dir__ = list_classes
