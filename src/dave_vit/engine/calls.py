"""Calls of torch functions: the rules that answer them, their arguments and draws, and the modules that make them."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dave_vit.engine.states import tensors

if TYPE_CHECKING:
    from dave_vit.engine.interception import Interception
    from dave_vit.engine.operators import Operator


@dataclass(frozen=True, slots=True)
class Call:
    """One intercepted call, as a rule gets it.

    Attributes:
        mode: the interception in force.
        func: the function itself.
        name: its canonical name.
    """

    mode: Interception
    func: Callable[..., Any]
    name: str

    @property
    def operator(self) -> Operator:
        """The function's entry in the table of operators."""
        return self.mode.find_operator(self.name)


Rule = Callable[..., Any]
"""``rule(call, *args, **kwargs)``: the same forward value as ``call.func``, with another derivative."""


@dataclass(frozen=True)
class RuleSet:
    """An immutable table from canonical function names (or functions) to rules.

    Attributes:
        name: shown in error messages.
        rules: canonical torch name, or a function object of another library, to its rule.
        strict: whether a function without a rule is refused where it meets a tensor that carries gradient;
            otherwise it keeps its ordinary derivative.
    """

    name: str
    rules: Mapping[Any, Rule] = field(default_factory=dict)
    strict: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", MappingProxyType(dict(self.rules)))

    @cached_property
    def identity(self) -> Hashable:
        """A key that is equal for rule sets with the same rules, whatever their names."""
        try:
            return self.strict, frozenset(self.rules.items())
        except TypeError:  # a rule that cannot be a key is like no other
            return object()

    @cached_property
    def pass_identity(self) -> Hashable:
        """A key that is equal for rule sets with the same forward pass: rules with a ``plain`` form count as that."""
        return self.extend("", {name: getattr(rule, "plain", rule) for name, rule in self.rules.items()}).identity

    def extend(self, name: str, rules: Mapping[Any, Rule]) -> RuleSet:
        """Return a new rule set in which ``rules`` are added or replaced."""
        return RuleSet(name, {**self.rules, **rules}, strict=self.strict)

    def lookup(self, func: Any, name: str) -> Rule | None:
        """Return the rule of a function: by identity first, then by canonical name."""
        return self.rules.get(func) or self.rules.get(name)


Pullback = Callable[..., "Tensor | tuple[Tensor | None, ...]"]


class Surrogate(torch.autograd.Function):
    """Function that returns ``compute()`` unchanged and sends gradients to the carriers through ``pullback``.

    The forward value is what the model's own kernel returns, bit for bit; only the derivative is replaced.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], Tensor], pullback: Pullback, saved: tuple[Tensor | None, ...], *carriers: Tensor
    ) -> Tensor:
        """Evaluate without recording."""
        ctx.pullback = pullback
        ctx.save_for_backward(*saved)  # and not a closure: autograd then notices a later in-place write
        value = compute()
        return value if value._base is None else value.clone()  # the model could not write into a view in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Apply the pullback; the first three arguments of forward carry nothing."""
        pulled = ctx.pullback(grads[0], *ctx.saved_tensors)
        return (None, None, None, *(pulled if isinstance(pulled, tuple) else (pulled,)))


def carry(
    compute: Callable[[], Tensor], pullback: Pullback, *carriers: Tensor, saved: tuple[Tensor | None, ...] = ()
) -> Tensor:
    """Return the value of ``compute()`` with a chosen derivative with respect to ``carriers``.

    Args:
        compute: returns the forward value, as a tensor of its own (no view of a carrier).
        pullback: ``pullback(grad, *saved)`` returns the gradient of the carrier, or a tuple of them.
        carriers: the tensors that carry gradient.
        saved: tensors that the pullback needs.
    """
    return Surrogate.apply(compute, pullback, saved, *carriers)  # type: ignore[no-any-return,no-untyped-call]


def place_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with tensors given by name moved to their position, as far as positions follow each other.

    ``torch.permute(input=x, dims=order)`` becomes ``torch.permute(x, dims=order)``.
    """
    if not any(map(tensors, kwargs.values())):
        return args, kwargs
    placed, named = list(args), dict(kwargs)
    for name in _required_parameters(func)[len(args) :]:
        if not tensors(named.get(name)):
            break
        placed.append(named.pop(name))
    return tuple(placed), named


@cache
def _required_parameters(func: Any) -> tuple[str, ...]:
    """Return the parameters of a function that have no default; torch keeps those of built-in functions in a table."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        template = torch.overrides.get_testing_overrides().get(func)
        signature = inspect.signature(template) if template else inspect.Signature()
    required = [name for name, one in signature.parameters.items() if one.default is inspect.Parameter.empty]
    return tuple("input" if name == "self" else name for name in required)


class ModuleCall:
    """A call that replaces a module's own; its frame on the call stack has the module's path."""

    module: str = ""


class ModulePaths:
    """Finds the paths of a model's modules on the call stack; costs nothing until one is needed."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model

    def innermost(self, error: BaseException | None = None) -> str:
        """Return the path of the innermost module on the call stack, or on that of an error; or ""."""
        for frame in (one for one, _ in traceback.walk_stack(sys._getframe(1))) if error is None else frames_of(error):
            owner = frame.f_locals.get("self")
            path = owner.module if isinstance(owner, ModuleCall) else self._paths.get(id(owner))
            if path is not None:
                return path
        return ""

    @cached_property
    def _paths(self) -> dict[int, str]:
        modules = self.model.named_modules() if self.model is not None else ()
        return {id(module): name or type(module).__name__ for name, module in modules}


def frames_of(error: BaseException) -> list[FrameType]:
    """Return the frames in which an error was raised, the innermost first."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]


RANDOM_FUNCTIONS = frozenset(
    """rand randn randint randperm normal bernoulli multinomial poisson binomial uniform exponential geometric cauchy
    log_normal random rand_like randn_like randint_like""".split()
)


class RandomDraws:
    """Generators of one pass, one for each device, so that every pass makes the same draws.

    The global generators are neither read nor moved, so that other threads keep their random numbers. Models whose
    output depends on the draws are refused by the soundness check.

    Args:
        seed: of each of them.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}  # empty where nothing was drawn

    def bind(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return a random function that draws from these generators, unless it is called with another one."""

        def draw(*args: Any, **kwargs: Any) -> Any:
            return func(*args, **{**kwargs, "generator": kwargs.get("generator") or self._generator(args, kwargs)})

        return draw

    def _generator(self, args: Any, kwargs: Any) -> torch.Generator:
        given = kwargs.get("device") or next((tensor.device for tensor in tensors((args, kwargs))), None)
        device = torch.empty(0, device=given).device  # with its index, and the default device where none is given
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self.generators[device]
