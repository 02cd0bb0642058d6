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

from dave_vit.errors import CheckpointingError, UnsupportedOperator
from dave_vit.intercept.calls import Call, FunctionName, RuleSet, function_name
from dave_vit.intercept.names import CONSTANT_RESULT, ESCAPES, FIRST_ARGUMENT_ONLY, SELECTIONS
from dave_vit.intercept.states import State, is_operator, map_tensors, mark, state_of, tensors
from dave_vit.intercept.surrogate import Surrogate


def _without_parameters(tensor: Tensor) -> Tensor:
    # The input enters as a non-leaf, so a leaf that wants gradient is a parameter: here it is a constant.
    return tensor.detach() if tensor.requires_grad and tensor.is_leaf else tensor


class Interception(TorchFunctionMode):
    """Context in which a rule set is in force.

    Args:
        rules: the rule set.
        model: used to name the module in which an unsupported function was met.
        record_constants: collect every additive constant that meets a carrier (see ``with_constant``).
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
        self.losses: list[str] = []
        self.functions: dict[str, int] = {}  # how often each met a carrier
        self._hooks = _saved_tensor_hooks()
        self._paths: dict[int, str] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Route one call: constants and operators run as they are, carriers meet a rule."""
        spelling, kwargs = function_name(func), kwargs or {}
        if spelling.name in CONSTANT_RESULT:
            return func(*args, **kwargs)
        args, kwargs = map_tensors(_without_parameters, args), map_tensors(_without_parameters, kwargs)
        inputs = args[:1] if spelling.name in FIRST_ARGUMENT_ONLY else (args, kwargs)
        carrying = any(t.requires_grad for t in tensors(inputs))
        if not carrying and not any(is_operator(t) for t in tensors(inputs)):
            return func(*args, **kwargs)
        if spelling.name in ESCAPES:
            self._escape(spelling.name, args)
        if not carrying:
            return self._unruled(func, spelling, args, kwargs)
        return self._ruled(func, spelling, args, kwargs)

    def _unruled(self, func: Any, spelling: FunctionName, args: Any, kwargs: Any) -> Any:
        writes = spelling.inplace or spelling.name == "__setitem__"
        if writes and self.rules.strict and args[0]._is_view() and not is_operator(args[0]):
            raise self.unsupported(spelling.name, "it writes a frozen operator into a view of a constant")
        result = func(*args, **kwargs)
        return self._settle(args[0] if writes else result, result)

    def _ruled(self, func: Any, spelling: FunctionName, args: Any, kwargs: Any) -> Any:
        if _saved_tensor_hooks() is not self._hooks:
            raise checkpointing_error()
        self.functions[spelling.name] = self.functions.get(spelling.name, 0) + 1
        rule = self.rules.lookup(func, spelling.name)
        if rule is None:
            if self.rules.strict:
                raise self.unsupported(spelling.name)
            return func(*args, **kwargs)
        call = Call(self, func, spelling.name)
        if spelling.inplace or kwargs.get("inplace"):
            if spelling.inplace:
                call = Call(self, _out_of_place(func), spelling.name)
            kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
            # A derivative that looks at this argument again is given one that the write leaves alone.
            state, first = state_of(args[0]), args[0]
            if state is State.GATE or spelling.name in SELECTIONS - {"relu"}:
                first = mark(first.clone(), state)
            return self.store(args[0], rule(call, first, *args[1:], **kwargs))
        result = rule(call, *args, **kwargs)
        return self._settle(result, result)

    def _settle(self, changed: Any, result: Any) -> Any:
        # What depends on the input and carries no gradient is an operator from here on.
        if self.rules.strict:
            mark([tensor for tensor in tensors(changed) if not tensor.requires_grad], State.OPERATOR)
        return result

    def store(self, target: Tensor, value: Tensor) -> Tensor:
        """Write a rule's result into the tensor that an in-place function was called on."""
        if not value.requires_grad and target._is_view():
            raise self.unsupported("an in-place write of a frozen operator into a view")
        if not value.requires_grad:
            target.detach_()
        target.copy_(value)
        return self._settle(mark(target, state_of(value)), target)  # type: ignore[no-any-return]

    def operator(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Run a function without gradient: its result can only be an operator from here on."""
        self.losses.append(f"{call.name}{self.where()}")
        return call.func(*map_tensors(Tensor.detach, args), **map_tensors(Tensor.detach, kwargs))

    def with_constant(self, value: Tensor, constant: Callable[[], Tensor], function: str = "") -> Tensor:
        """Record the additive constant inside ``value``, so that the conservation identity can be summed up.

        Args:
            value: what a rule is about to return.
            constant: returns what was added in it.
            function: the name of the function that added it, which tells where its channels lie.
        """
        if self.constants is None or not value.requires_grad:
            return value
        leaf = constant().detach().expand_as(value).clone()
        # Padding with -inf before a max-pool: such an entry is never selected, and inf - inf would spoil the value.
        leaf = leaf.masked_fill_(~leaf.isfinite(), 0).requires_grad_()
        if not leaf.any():
            return value
        self.constants.append((self.module(), function, leaf))
        return value + (leaf - leaf.detach())  # adds zero, but with a derivative

    def _escape(self, name: str, args: Any) -> None:
        if any(t.is_floating_point() for t in tensors(args)):
            raise self.unsupported(name, "it turns a value that depends on the input into a Python number or array")

    def where(self) -> str:
        """The innermost module of the model on the call stack, as a phrase."""
        path = self.module()
        return f" in module {path!r}" if path else ""

    def module(self) -> str:
        """The path of the innermost module of the model on the call stack; costs nothing until it is asked for."""
        if self._paths is None:
            modules = self.model.named_modules() if self.model is not None else ()
            self._paths = {id(module): name or type(module).__name__ for name, module in modules}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = self._paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return path
            frame = frame.f_back
        return ""

    def unsupported(self, name: str, why: str = "it has no rule and is not known to be linear") -> UnsupportedOperator:
        """The error for a function that this rule set cannot treat exactly."""
        return UnsupportedOperator(
            f"{name}{self.where()} is not supported by rule set {self.rules.name!r}: {why}; "
            "rewrite it with supported functions, detach what acts as an operator, or add a rule with RuleSet.extend"
        )


def _saved_tensor_hooks() -> Any:
    # Gradient checkpointing installs hooks on saved tensors; new ones inside the model give it away.
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def checkpointing_error() -> CheckpointingError:
    """The error for models that recompute their forward pass during the backward pass."""
    return CheckpointingError(
        "the model uses gradient checkpointing, which runs the forward pass again outside of the interception; "
        "switch it off, for example model.set_grad_checkpointing(False) or model.gradient_checkpointing_disable()"
    )


def _out_of_place(func: Any) -> Any:
    name = function_name(func).name
    return getattr(Tensor, name, None) or getattr(torch.nn.functional, name, None) or getattr(torch, name)


def check_graph(output: Tensor) -> None:
    """Refuse a graph that holds somebody else's autograd function: its derivative was never intercepted."""
    todo, visited = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        todo.extend(parent for parent, _ in node.next_functions)
        forward = getattr(node, "_forward_cls", None)
        if forward is None or forward is Surrogate:
            continue
        if "Checkpoint" in forward.__name__:
            raise checkpointing_error()
        raise UnsupportedOperator(
            f"the custom autograd function {forward.__module__}.{forward.__qualname__} is not supported: its "
            "derivative cannot be intercepted; use plain torch functions in its place"
        )


@contextmanager
def autograd_enabled() -> Iterator[None]:
    """Gradients on, whatever the caller's grad mode or inference mode is."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield
