"""The one interception layer: ordinary autograd in which a rule set changes some derivatives.

While the context is active every torch function of the model passes through it, and every tensor is in one of the
states that ``states`` describes. Where an operator is added to a carrier the sum is no longer linear in the input, so
it is an operator too: it may scale and mix carriers, but if it ends in the logits the model is refused. Hence no
silently wrong map.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dave_vit.engine.autograd_graph import check_saved_tensor_hooks, hidden_error, looking_only, saved_tensor_hooks
from dave_vit.engine.calls import Call, FunctionName, RuleSet, function_name
from dave_vit.engine.dataflow import Watch
from dave_vit.engine.function_names import (
    CONSTANT_RESULT,
    ESCAPES,
    FACTORIES,
    FIRST_ARGUMENT_ONLY,
    GRADIENTS,
    HOOKS,
    MIXING,
    SELECTIONS,
)
from dave_vit.engine.states import State, depends_on_input, is_known, is_operator, map_tensors, mark, state_of, tensors
from dave_vit.errors import UnsupportedOperator


def _without_parameters(tensor: Tensor) -> Tensor:
    # The input enters as a non-leaf, so a leaf that wants gradient is a parameter: here it is a constant.
    return mark(tensor.detach(), state_of(tensor)) if tensor.requires_grad and tensor.is_leaf else tensor


class Placed:
    """A call that is made in the place of a module's; its frame on the call stack says the module's path."""

    module: str = ""


class ModulePaths:
    """The paths of a model's modules, found on the call stack; costs nothing until one is asked for."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self._paths: dict[int, str] | None = None

    def here(self) -> str:
        """The path of the innermost module on the call stack, or nothing."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            path = owner.module if isinstance(owner, Placed) else self._of(owner)
            if path is not None:
                return path
            frame = frame.f_back
        return ""

    def _of(self, owner: Any) -> str | None:
        if not isinstance(owner, nn.Module):
            return None
        if self._paths is None:
            modules = self.model.named_modules() if self.model is not None else ()
            self._paths = {id(module): name or type(module).__name__ for name, module in modules}
        return self._paths.get(id(owner))


class Interception(TorchFunctionMode):
    """Context in which a rule set is in force.

    Args:
        rules: the rule set.
        model: used to name the module in which an unsupported function was met.
        record_constants: collect every additive constant that meets a carrier (see ``record_constant``).
        traced: the calls are written down for a compiler, which would rather compute a thing again than keep it.
    """

    def __init__(
        self,
        rules: RuleSet,
        model: nn.Module | None = None,
        *,
        record_constants: bool = False,
        traced: bool = False,
    ) -> None:
        super().__init__()
        self.rules = rules
        self.model = model
        self.constants: list[tuple[str, str, Tensor]] | None = [] if record_constants else None
        self.traced = traced
        self.writes = True  # whether calls may write in place; those of a tape do not
        self.losses: list[str] = []
        self.functions: dict[str, int] = {}  # how often each met a carrier
        self.watch: Watch | None = None  # follows the input below the interception, in a model's first pass
        self.stream: torch.dtype | None = None  # the type in which sums are kept, where autocast would widen them
        self._closed = False  # whether the input is known, so that no other tensor may want gradient
        self._hooks = saved_tensor_hooks()
        self._paths = ModulePaths(model)

    def enter(self, inputs: Tensor) -> Tensor:
        """Declare the input: from here on no other tensor that wants gradient may come in."""
        self._closed = True
        self.stream = _stream(inputs.device.type)
        return mark(inputs, State.CARRIER)

    @contextmanager
    def watched(self, inputs: Tensor) -> Iterator[Watch]:
        """Follow the input below the interception as well; to be entered inside of it."""
        self.watch = Watch(inputs, self.location)
        with self.watch:
            yield self.watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Route one call: constants and operators run as they are, carriers meet a rule."""
        spelling, kwargs = function_name(func), kwargs or {}
        if self.watch is not None:
            self.watch.call(spelling.name, (args, kwargs))
        if spelling.name in CONSTANT_RESULT:
            return self._constant(func, spelling.name, args, kwargs)
        if spelling.name in HOOKS:
            return self._hook(func, spelling.name, args, kwargs)
        args = map_tensors(_without_parameters, args)
        kwargs = map_tensors(_without_parameters, kwargs) if kwargs else kwargs
        inputs = tensors(args[:1] if spelling.name in FIRST_ARGUMENT_ONLY else (args, kwargs) if kwargs else args)
        carriers = [tensor for tensor in inputs if tensor.requires_grad]
        if not carriers and not any(map(is_operator, inputs)):
            return func(*args, **kwargs)
        if self.rules.strict:
            self._check(spelling.name, carriers, args, kwargs)
        if not carriers:
            return self._unruled(func, spelling, args, kwargs)
        return self._ruled(func, spelling, args, kwargs)

    def _check(self, name: str, carriers: list[Tensor], args: Any, kwargs: Any) -> None:
        """Refuse what would take the input out of sight."""
        for carrier in carriers if self._closed else ():
            if not is_known(carrier):
                raise hidden_error(f"a tensor that wants gradient ({_origin(carrier)})", self.location())
        if name in ESCAPES and any(tensor.dtype is not torch.bool for tensor in tensors(args)):
            raise self.refusal(name, "it turns a value that depends on the input into a Python number or array")
        if name in GRADIENTS:
            raise self.refusal(name, "it asks for gradients inside of the model")
        if kwargs.get("out") is not None:
            raise self.refusal(f"{name}(out=...)", "it writes into a tensor that is given, use what it returns")

    def _constant(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Nothing of the first argument's values is in the result; other arguments may be what it is filled with."""
        if self.rules.strict and name in GRADIENTS and is_operator(args[0]):
            raise self.refusal(name, "it asks for gradients inside of the model")
        result = func(*args, **kwargs)
        if name in FACTORIES and any(map(depends_on_input, tensors((args[1:], kwargs)))):
            self._settle(result)
        return result

    def _hook(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if not self.rules.strict or args[0].is_leaf:
            return func(*args, **kwargs)
        if name != "register_hook":
            raise self.refusal(name, "a hook on gradients may change the map")
        return func(args[0], looking_only(args[1]))

    def _unruled(self, func: Any, spelling: FunctionName, args: Any, kwargs: Any) -> Any:
        writes = spelling.inplace or spelling.name == "__setitem__"
        if writes and self.rules.strict and not is_operator(args[0]) and _is_view(args[0]):
            raise self.refusal(spelling.name, "it writes a frozen operator into a view of a constant")
        if spelling.name == "__iter__":
            return iter(self._settle(args[0].unbind()))
        result = func(*args, **kwargs)
        self._settle(args[0] if writes else result)
        return result

    def _ruled(self, func: Any, spelling: FunctionName, args: Any, kwargs: Any) -> Any:
        if (hooks := saved_tensor_hooks()) is not self._hooks:
            check_saved_tensor_hooks(hooks)
        self.functions[spelling.name] = self.functions.get(spelling.name, 0) + 1
        if self.stream is not None and spelling.name in MIXING:
            args, kwargs = self._narrowed((args, kwargs))
        rule = self.rules.lookup(func, spelling.name)
        if rule is None:
            if self.rules.strict:
                raise self.refusal(spelling.name)
            return func(*args, **kwargs)
        if not (spelling.inplace or kwargs.get("inplace")):
            return self._settle(rule(Call(self, func, spelling.name), *args, **kwargs))
        call = Call(self, find_out_of_place(func) if spelling.inplace else func, spelling.name)
        kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
        # A derivative that looks at this argument again is given one that the write leaves alone.
        state, first = state_of(args[0]), args[0]
        if state is State.GATE or spelling.name in SELECTIONS - {"relu"}:
            first = mark(first.clone(), state)
        return self.store(args[0], rule(call, first, *args[1:], **kwargs))

    def _narrowed(self, given: Any) -> Any:
        """Arguments in the stream's type, where some are in it already."""
        if not any(tensor.dtype is self.stream for tensor in tensors(given)):
            return given

        def narrow(tensor: Tensor) -> Tensor:
            return mark(tensor.to(self.stream), state_of(tensor)) if tensor.dtype is torch.float32 else tensor

        return map_tensors(narrow, given)

    def _settle(self, result: Any) -> Any:
        # What depends on the input and carries no gradient is an operator from here on; what carries is known.
        if self.rules.strict:
            for tensor in tensors(result):
                mark(tensor, state_of(tensor) if tensor.requires_grad else State.OPERATOR)
        return result

    def store(self, target: Tensor, value: Tensor) -> Tensor:
        """Write a rule's result into the tensor that an in-place function was called on."""
        if not value.requires_grad and target._is_view():
            raise self.refusal("an in-place write of a frozen operator into a view")
        if not value.requires_grad:
            self.freeze(target)
        target.copy_(value)
        return self.update_state(target, state_of(value))

    def freeze(self, target: Tensor) -> None:
        """Make an operator of a carrier that is about to be written to."""
        target.detach_()
        if self.watch is not None:
            self.watch.freeze(target)

    def update_state(self, target: Tensor, state: State) -> Tensor:
        """Remember what a tensor is after something was written into it, and that what it is a view of now carries."""
        if target._base is not None and target.requires_grad:
            mark(target._base, State.CARRIER)
        return self._settle(mark(target, state))  # type: ignore[no-any-return]

    def run_frozen(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Run a function without gradient: its result can only be an operator from here on."""
        self.losses.append(f"{call.name}{self.location()}")
        return call.func(*map_tensors(Tensor.detach, args), **map_tensors(Tensor.detach, kwargs))

    def record_constant(self, value: Tensor, constant: Callable[[], Tensor], function: str = "") -> Tensor:
        """Record the additive constant inside ``value``, so that the conservation identity can be summed up.

        Args:
            value: what a rule is about to return.
            constant: returns what was added in it.
            function: the name of the function that added it, which tells where its channels lie.
        """
        if self.constants is None or not value.requires_grad:
            return value
        added = constant().detach()
        # Padding with -inf before a max-pool: such an entry is never selected, and inf - inf would spoil the value.
        added = added.masked_fill(~added.isfinite(), 0)
        if not added.any():
            return value
        leaf = added.expand_as(value).clone().requires_grad_()
        self.constants.append((self.current_module(), function, leaf))
        return value + (leaf - leaf.detach())  # adds zero, but with a derivative

    def location(self) -> str:
        """The innermost module of the model on the call stack, as a phrase."""
        path = self.current_module()
        return f" in module {path!r}" if path else ""

    def current_module(self) -> str:
        """The path of the innermost module of the model on the call stack; costs nothing until it is asked for."""
        return self._paths.here()

    def refusal(self, name: str, why: str = "it has no rule and is not known to be linear") -> UnsupportedOperator:
        """The error for a function that this rule set cannot treat exactly."""
        return UnsupportedOperator(
            f"{name}{self.location()} is not supported by rule set {self.rules.name!r}: {why}; "
            "rewrite it with supported functions, detach what acts as an operator, or add a rule with RuleSet.extend"
        )


def _stream(device: str) -> torch.dtype | None:
    """bfloat16 where autocast works in it: its range is that of float32, so that residual streams fit into it."""
    narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16
    return torch.bfloat16 if narrow else None


def _is_view(target: Any) -> bool:
    return any(tensor._is_view() for tensor in tensors(target))


def _origin(carrier: Tensor) -> str:
    return carrier.grad_fn.name() if carrier.grad_fn is not None else "a leaf"


def find_out_of_place(func: Any) -> Any:
    """The function that returns what an in-place one writes."""
    name = function_name(func).name
    homes = (Tensor, torch.nn.functional, torch)
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)
