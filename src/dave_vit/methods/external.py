"""Attributions of captum and class activation maps of pytorch-grad-cam as methods: captum:NAME and grad_cam:NAME."""

import inspect
import io
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache, partial
from inspect import Parameter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit._internal.registry import suggest_names
from dave_vit.engine.fingerprint import check_modes
from dave_vit.engine.forward import HoldDraws, autocast_context, evaluation_mode
from dave_vit.engine.observation import observe
from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError, OutputError, UnknownName, UnsupportedOperator, import_optional
from dave_vit.methods.base import METHODS, Method, MethodInfo, create_method
from dave_vit.methods.cams import features, find_feature_layer
from dave_vit.methods.constants import per_channel, upsample
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import Recorded, record_outputs

_CAPTUM_OWN = {"self", "inputs", "target", "additional_forward_args", "return_convergence_delta"}


class ExternalMethod(Method):
    """Base of methods that another library computes.

    Attributes:
        seed: of torch's and numpy's random numbers while the library runs; they are as before afterwards.
        options: of the library's class; layers are modules, or their paths in the model.
    """

    seed: int
    options: dict[str, Any]
    _name: ClassVar[str]
    _kind: ClassVar[Any]
    _rows = {"cuda": 32, "cpu": 8}  # noqa: RUF012 - the libraries multiply them by their own steps

    def __reduce__(self) -> tuple[Any, ...]:
        args, options = self._arguments
        return partial(create_method, self._name, **options), args

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        target = self._resolve_target(images, target, pass_size)
        check_modes(self.model)
        with _library_context(self.seed), evaluation_mode(self.model), torch.enable_grad():
            parts = [self._attribute(images, each) for each in target.split_classes()]
        return Explanation(torch.stack(parts, 1).detach().to(images), target.indices)

    @abstractmethod
    def _attribute(self, images: Tensor, target: Target) -> Tensor:
        """Compute attributions in the shape of the images for a resolved target with K = 1."""

    def _resolve(self, name: str, value: Any) -> Any:
        """Return an option as the library takes it: modules instead of paths, tuples instead of lists."""
        if name == "layer":
            return self._find_layer(value)
        if name == "target_layers":
            return [self._find_layer(one) for one in (value if isinstance(value, list | tuple) else [value])]
        return tuple(value) if isinstance(value, list) else value

    def _find_layer(self, layer: Any) -> nn.Module:
        if isinstance(layer, nn.Module):
            return layer
        modules = dict(self.model.named_modules())
        found: nn.Module | None = modules.get(str(layer), modules.get(f"model.{layer}"))
        if found is None:
            raise OptionError(f"the model has no layer {layer!r}{suggest_names(str(layer), list(modules))}")
        return found


class CaptumMethod(ExternalMethod):
    """An attribution of captum."""

    def _attribute(self, images: Tensor, target: Target) -> Tensor:
        """Compute the images together for a class; one by one for contrasts and scores, which captum does not know."""
        if target.score is None and not target.has_contrast:
            return self._call(images, _ScoreModel(self.model, Target(), self.autocast), target.class_indices[:, 0])
        targets = [target.part(number, number + 1) for number in range(len(images))]
        models = [_ScoreModel(self.model, each, self.autocast) for each in targets]
        return torch.cat([self._call(image, model, 0) for image, model in zip(images.split(1), models, strict=True)])

    def _call(self, images: Tensor, model: nn.Module, target: Any) -> Tensor:
        names = inspect.signature(self._kind.__init__).parameters
        attribution = self._kind(model, **{key: value for key, value in self.options.items() if key in names})
        options = {name: value for name, value in self.options.items() if name not in names}
        results = attribution.attribute(images.clone().requires_grad_(), target=target, **options)
        result: Tensor = results[0] if isinstance(results, tuple) else results
        if result.shape == images.shape:
            return result
        if result.ndim != 4 or images.ndim != 4:
            raise OptionError(f"{self._name} returns shape {tuple(result.shape)}, which has no place in the image")
        return per_channel(upsample(result.sum(1, keepdim=True), images.shape[-2:]), images.shape[1])[:, 0]


class GradCamMethod(ExternalMethod):
    """A class activation map of pytorch-grad-cam, by default of the last block that has features of places."""

    _why_no_clips = "scores the places of one image"

    def _attribute(self, images: Tensor, target: Target) -> Tensor:
        options = dict(self.options)
        smoothing = {name: options.pop(name) for name in ("aug_smooth", "eigen_smooth") if name in options}
        if "target_layers" not in options:
            layer, reshape = _find_features(self.model, images, target)
            options = {"target_layers": [layer], "reshape_transform": reshape} | options
        model = _ScoreModel(self.model, target if target.score else Target(), self.autocast)
        targets = [partial(_row_score, target.part(number, number + 1)) for number in range(len(images))]
        with self._kind(model=model, **options) as cam:
            maps = cam(input_tensor=images.clone(), targets=targets, **smoothing)
        return per_channel(torch.as_tensor(maps).to(images).unsqueeze(1), images.shape[1])[:, 0]


class _ScoreModel(nn.Module):
    """A model that returns what is explained as a tensor: logits, or the score of one image, of copies of it."""

    def __init__(self, model: nn.Module, target: Target, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.target, self.autocast = model, target, autocast

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, classes]``, or scores ``[B, 1]``."""
        with autocast_context(inputs, self.autocast):
            output = self.target.read(self.model(inputs), len(inputs))
        is_of_classes = self.target.score is None and self.target.indices is None
        return output if is_of_classes else self.target.repeat(len(inputs)).scores(output)


def _row_score(target: Target, row: Tensor) -> Tensor:
    return target.scores(row.unsqueeze(0))[0, 0]


def _find_features(model: nn.Module, images: Tensor, target: Target) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return a layer with features of places, and how its output becomes ``[b, D, h, w]``.

    The features are those of ``gradcam``. In a Vision Transformer the first norm of the last block returns them: after
    the last block only the class token counts.
    """
    recorded = Recorded(model, record_outputs)
    try:
        with observe(recorded, images[:1], read=target.read) as observed:
            source, to_grid = features(observed, images[:1])
            return find_feature_layer(recorded.record, source, to_grid(source).shape[1])[0], to_grid
    except (OutputError, UnsupportedOperator) as error:
        raise OptionError(f"{error}; or give target_layers and reshape_transform") from error


@contextmanager
def _library_context(seed: int) -> Iterator[None]:
    """Draw random numbers from a seed, and restore NumPy's afterwards; warnings and progress bars are not shown."""
    state = np.random.get_state()
    with HoldDraws(seed), warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        np.random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(state)


@METHODS.register_library("captum")
@cache
def find_captum(name: str) -> type[Method]:
    """Return the method of a class in captum.attr."""
    attr = import_optional("captum.attr")
    usable = {one: kind for one in attr.__all__ if _is_usable(kind := getattr(attr, one), attr.Attribution)}
    kind = _find("captum", name, usable)
    own = [one for one in _parameters(kind.attribute) if one.name not in _CAPTUM_OWN]
    return _build(f"captum:{name}", kind, CaptumMethod, [*_parameters(kind.__init__)[2:], *own])


@METHODS.register_library("grad_cam")
@cache
def find_grad_cam(name: str) -> type[Method]:
    """Return the method of a class activation map in pytorch_grad_cam."""
    library = import_optional("pytorch_grad_cam", "grad-cam")
    base = import_optional("pytorch_grad_cam.base_cam", "grad-cam").BaseCAM
    usable = {one: kind for one, kind in vars(library).items() if inspect.isclass(kind) and issubclass(kind, base)}
    kind = _find("grad_cam", name, usable)
    own = [one.replace(default=None) for one in _parameters(kind.__init__)[2:]]
    smoothing = [Parameter(one, Parameter.KEYWORD_ONLY, default=False) for one in ("aug_smooth", "eigen_smooth")]
    return _build(f"grad_cam:{name}", kind, GradCamMethod, [*own, *smoothing])


def _is_usable(kind: Any, base: type) -> bool:
    """Return whether a class of captum explains one model and needs no other object than a layer."""
    if not inspect.isclass(kind) or not issubclass(kind, base) or not hasattr(kind, "attribute"):
        return False
    needed = {one.name for one in _parameters(kind.__init__)[1:] if one.default is Parameter.empty}
    return needed <= {"model", "forward_func", "layer"} and "inputs" in inspect.signature(kind.attribute).parameters


def _find(library: str, name: str, usable: dict[str, Any]) -> Any:
    if name not in usable:
        hint = suggest_names(name, list(usable)) or f"; known: {', '.join(usable)}"
        raise UnknownName(f"unknown method '{library}:{name}'{hint}")
    return usable[name]


def _parameters(function: Any) -> list[Parameter]:
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [one for one in inspect.signature(function).parameters.values() if one.kind not in kinds]


def _build(name: str, kind: Any, base: type[ExternalMethod], parameters: Sequence[Parameter]) -> type[Method]:
    """Return a class of methods whose options are these parameters, and those of all external methods."""

    def constructor(self: ExternalMethod, model: nn.Module, *, seed: int = 0, **options: Any) -> None:
        own = {one.name: options.pop(one.name) for one in parameters if one.name in options}
        missing = [one.name for one in parameters if one.default is Parameter.empty and one.name not in own]
        if missing:
            raise OptionError(f"{name} needs {missing[0]}; give it as an option, such as --set {missing[0]}=VALUE")
        Method.__init__(self, model, **options)
        self.seed, self.options = seed, {option: self._resolve(option, value) for option, value in own.items()}

    common = list(inspect.signature(constructor).parameters.values())
    own = [one.replace(kind=Parameter.KEYWORD_ONLY, annotation=Any) for one in parameters]
    vars(constructor)["__signature__"] = inspect.Signature([*common[:-1], *own, common[-1]])
    summary = f"{kind.__name__}, computed by {kind.__module__.partition('.')[0]}."
    members = {"__init__": constructor, "__doc__": summary, "__module__": __name__, "info": MethodInfo()}
    return type(kind.__name__, (base,), {**members, "_name": name, "_kind": kind})
