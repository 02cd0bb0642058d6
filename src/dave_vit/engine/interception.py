"""The one interception layer: ordinary autograd in which a rule set changes some derivatives.

While the context is active every torch function of the model passes through it, and every tensor is in one of the
states that ``states`` describes. Where an operator is added to a carrier the sum is no longer linear in the input, so
it is an operator too: it may scale and mix carriers, but if it ends in the logits the model is refused. Hence no
silently wrong map.
"""

import traceback
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from dave_vit._internal.torch_private import saved_tensor_hooks
from dave_vit.engine.autograd_graph import (
    check_saved_hooks,
    checkpointing_error,
    hidden_error,
    is_function_of,
    reject_gradient_changes,
)
from dave_vit.engine.calls import RANDOM_FUNCTIONS, Call, ModulePaths, RandomDraws, RuleSet, frames_of, place_tensors
from dave_vit.engine.operators import OPERATORS, UNKNOWN, FunctionName, Operator, OperatorKind, function_name
from dave_vit.engine.states import (
    State,
    is_known,
    is_operator,
    map_tensors,
    mark,
    mark_zero,
    source_of,
    state_of,
    tensors,
)
from dave_vit.errors import UnsupportedOperator

# What torch says where it cannot differentiate what a model does, and what is said of it here.
_TORCH_LIMITS = {
    "multiple views": "it writes in place into one of several views, such as a part of a split; clone the part first",
    "modified inplace": "it writes in place into a view that torch cannot follow; use what returns a new tensor",
    "derivative for": "torch has no derivative of it; use functions that have one",
    "not support backward": "torch has no derivative of it on this device; use scaled_dot_product_attention",
    "TorchScript": "it failed in a torch.jit module, where it cannot be intercepted; run the plain module",
}


class RecordedConstant(NamedTuple):
    """An additive constant, and the place in the graph where it was added: the derivative there is the constant's."""

    module: str
    function: str
    value: Tensor
    place: GradientEdge


class Interception(TorchFunctionMode):
    """Context in which a rule set is in force.

    Args:
        rules: the rule set.
        model: used to name the module in which an unsupported function was called.
        record_constants: collect every additive constant that meets a carrier (see ``record_constant``).
    """

    def __init__(
        self,
        rules: RuleSet,
        model: nn.Module | None = None,
        *,
        record_constants: bool = False,
    ) -> None:
        super().__init__()
        self.rules = rules
        self.model = model
        self.constants: list[RecordedConstant] | None = [] if record_constants else None
        self.losses: list[str] = []
        self.functions: dict[str, int] = {}  # how often each was called with a carrier
        self.draws = RandomDraws()
        self._closed = False  # whether the input is known, so that no other tensor may require gradient
        self._hooks = saved_tensor_hooks()
        self._paths = ModulePaths(model)
        self._function = ""  # called last with a carrier

    def __exit__(self, *error: Any) -> None:
        """Leave the context; what torch cannot differentiate is refused in one line."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[1] is not None:
            self.constants = None
        limits = _TORCH_LIMITS.items() if isinstance(error[1], RuntimeError) else ()
        reason = next((reason for phrase, reason in limits if phrase in str(error[1])), None)
        if reason is not None:
            in_rule = any(frame.f_code is Interception._run_rule.__code__ for frame in frames_of(error[1]))
            raise self.refusal(self._function if in_rule else "a function", reason, error=error[1]) from error[1]

    def enter(self, inputs: Tensor) -> Tensor:
        """Declare the input: from here on no other tensor that requires gradient may come in."""
        self._closed = True
        return mark(inputs, State.CARRIER)

    def find_operator(self, name: str) -> Operator:
        """Return the entry of a function in the table of operators."""
        return OPERATORS.get(name, UNKNOWN)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Route one call: constants and operators run as they are, carriers meet a rule."""
        spelling, (args, kwargs) = function_name(func), place_tensors(func, args, kwargs or {})
        operator = spelling.operator
        if spelling.name in RANDOM_FUNCTIONS:
            func = self.draws.bind(func)
        if operator.has_constant_result:
            return self._run_constant(func, spelling, args, kwargs)
        if operator.changes_gradients:
            return self._hook(func, spelling.name, args, kwargs)
        args = map_tensors(self._without_parameters, args)
        kwargs = map_tensors(self._without_parameters, kwargs) if kwargs else kwargs
        inputs = tensors(args[:1] if operator.uses_first_values_only else (args, kwargs) if kwargs else args)
        carriers = [tensor for tensor in inputs if tensor.requires_grad]
        if not carriers and not any(map(is_operator, inputs)):
            result = func(*args, **kwargs)
            return mark_zero(result) if spelling.makes_zero(args, kwargs) else result
        if self.rules.strict:
            self._check(spelling, carriers, args, kwargs)
        if not carriers:
            return self._run_operator(func, spelling, args, kwargs)
        return self._run_rule(func, spelling, args, kwargs)

    def _without_parameters(self, tensor: Tensor) -> Tensor:
        """Return a constant as one that autograd does not follow."""
        # The input enters as a non-leaf, so a leaf that requires gradient is a parameter: here it is a constant.
        if tensor.requires_grad and (tensor.is_leaf or self._is_made_of_parameters(tensor)):
            tensor = mark(tensor.detach(), state_of(tensor))
        return mark(tensor.clone(), state_of(tensor)) if tensor.is_inference() else tensor  # autograd could not save it

    def _is_made_of_parameters(self, tensor: Tensor) -> bool:
        """Return whether a tensor from before the pass is a function of parameters, such as biases that are cached."""
        is_new = not self._closed or not self.rules.strict or is_known(tensor)
        return not is_new and self.model is not None and is_function_of(tensor, self.model.parameters())

    def _check(self, spelling: FunctionName, carriers: list[Tensor], args: Any, kwargs: Any) -> None:
        """Refuse what would take the input out of sight."""
        for carrier in carriers if self._closed else ():
            if not is_known(carrier):
                origin = "a leaf" if carrier.grad_fn is None else carrier.grad_fn.name()
                raise hidden_error(f"a tensor that requires gradient ({origin})", self.location())
        name, operator = spelling.name, spelling.operator
        if operator.leaves_torch and any(tensor.dtype is not torch.bool for tensor in tensors(args)):
            raise self.refusal(name, "it turns a value that depends on the input into a Python number or array")
        if operator.takes_gradients:
            raise self.refusal(name, "it asks for gradients inside of the model")
        if kwargs.get("out") is not None:
            raise self.refusal(f"{name}(out=...)", "it writes into a tensor that is given, use what it returns")

    def _run_constant(self, func: Any, spelling: FunctionName, args: Any, kwargs: Any) -> Any:
        """Run a function whose result has no values of the first argument; others may be what it is filled with."""
        operator = spelling.operator
        if self.rules.strict and operator.takes_gradients and is_operator(args[0]):
            raise self.refusal(spelling.name, "it asks for gradients inside of the model")
        result = func(*args, **kwargs)
        if spelling.makes_zero(args, kwargs):
            return mark_zero(result)
        if operator.fills_result and any(state_of(one) is not State.CONSTANT for one in tensors((args[1:], kwargs))):
            self._update_states(result)
        return result

    def _hook(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if not self.rules.strict or args[0].is_leaf:
            return func(*args, **kwargs)
        if any(frame.f_globals.get("__name__") == "torch.utils.checkpoint" for frame, _ in traceback.walk_stack(None)):
            raise checkpointing_error()  # it reads grad_fn, up to torch 2.11
        if name != "register_hook":
            raise self.refusal(name, "a hook on gradients may change the map")
        return func(args[0], reject_gradient_changes(args[1]))

    def _run_operator(self, func: Any, spelling: FunctionName, args: Any, kwargs: Any) -> Any:
        """Run a function of operators and constants, without a carrier."""
        writes = spelling.inplace or spelling.name == "__setitem__"
        if writes and self.rules.strict and not is_operator(args[0]) and any(t._is_view() for t in tensors(args[0])):
            raise self.refusal(spelling.name, "it writes a frozen operator into a view of a constant")
        if spelling.name == "__iter__":
            return iter(self._update_states(args[0].unbind()))
        if spelling.makes_zero(args, kwargs) and not (writes and is_operator(args[0])):
            return args[0] if writes else mark_zero(torch.zeros_like(func(*args, **kwargs)))
        result = func(*args, **kwargs)
        self._update_states(args[0] if writes else result)
        return result

    def _run_rule(self, func: Any, spelling: FunctionName, args: Any, kwargs: Any) -> Any:
        """Run the rule of a function that is called with a carrier."""
        if (hooks := saved_tensor_hooks()) is not self._hooks:
            check_saved_hooks(hooks)
        self._function = spelling.name
        self.functions[spelling.name] = self.functions.get(spelling.name, 0) + 1
        rule = self.rules.lookup(func, spelling.name)
        if rule is None:
            if self.rules.strict:
                raise self.refusal(spelling.name)
            return func(*args, **kwargs)
        if not (spelling.inplace or kwargs.get("inplace")):
            return self._update_states(rule(Call(self, func, spelling.name), *args, **kwargs))
        if spelling.operator.kind is OperatorKind.MOVE:  # may change the shape: x.unsqueeze_(0)
            return self.update_state(func(*args, **kwargs), state_of(args[0]))
        call = Call(self, find_out_of_place(func) if spelling.inplace else func, spelling.name)
        kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
        # A derivative that reads this argument again gets a copy, which the write leaves alone.
        state, first = state_of(args[0]), args[0]
        if state is State.GATE or (call.operator.kind is OperatorKind.SELECTION and spelling.name != "relu"):
            first = mark(first.clone(), state)
        return self.store(args[0], rule(call, first, *args[1:], **kwargs))

    def _update_states(self, result: Any) -> Any:
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
        """Make a carrier that is about to be written to an operator."""
        target.detach_()

    def update_state(self, target: Tensor, state: State) -> Tensor:
        """Set the state of a tensor that was written to; the tensor it is a view of then carries too."""
        if target._base is not None and target.requires_grad:
            mark(target._base, State.CARRIER)
        return self._update_states(mark(target, state))  # type: ignore[no-any-return]

    def record_constant(self, value: Tensor, constant: Callable[[], Tensor | None], function: str = "") -> Tensor:
        """Record the additive constant inside ``value``, so that the conservation identity can be summed up.

        Args:
            value: what a rule is about to return.
            constant: returns what was added in it, or None.
            function: the name of the function that added it, which decides where its channels lie.
        """
        added = constant() if self.constants is not None and value.requires_grad else None
        if self.constants is None or added is None:
            return value
        # Padding with -inf before a max-pool: such an entry is never selected, and inf - inf would spoil the value.
        added = added.detach().nan_to_num(0, 0, 0)
        value = value.clone() if value._is_view() else value
        place = get_gradient_edge(value)  # which stays what it is when the model writes into the tensor later
        self.constants.append(RecordedConstant(self.current_module(), function, added.expand_as(value), place))
        return value

    def take_constants(self) -> list[RecordedConstant]:
        """Return the constants and forget them: a graph that is held by what it holds stays for ever."""
        constants, self.constants = self.constants or [], None
        return constants

    def location(self, error: BaseException | None = None) -> str:
        """Return the innermost module of the model on the call stack, or where an error arose, as a phrase; or ""."""
        path = self._paths.innermost(error)
        return f" in module {path!r}" if path else ""

    def current_module(self) -> str:
        """Return the path of the innermost module of the model on the call stack, or ""."""
        return self._paths.innermost()

    def find_parameter_name(self, weight: Tensor) -> str:
        """Return the name of the parameter that a weight is, or is a slice of; the path of the module if of none."""
        names, address = self._parameter_names, source_of(weight).data_ptr()
        place = bisect_right(names, address, key=itemgetter(0)) - 1
        is_inside = address > 0 and place >= 0 and address < names[place][1]  # 0 stands for no memory of its own
        return names[place][2] if is_inside else self.current_module()

    @cached_property
    def _parameter_names(self) -> list[tuple[int, int, str]]:
        """First and last address of each parameter, and its name."""
        named = () if self.model is None else self.model.named_parameters()
        return sorted((one.data_ptr(), one.data_ptr() + one.nbytes, name) for name, one in named)

    def refusal(
        self, name: str, why: str = "it has no rule and is not known to be linear", error: BaseException | None = None
    ) -> UnsupportedOperator:
        """Return the error for a function that this rule set cannot treat exactly, here or where an error arose."""
        return UnsupportedOperator(
            f"{name}{self.location(error)} is not supported by rule set {self.rules.name!r}: {why}; "
            "rewrite it with supported functions, detach what acts as an operator, or add a rule with RuleSet.extend"
        )


def find_out_of_place(func: Any) -> Any:
    """Return the function that returns what an in-place one writes."""
    name = function_name(func).name
    homes = (Tensor, torch.nn.functional, torch)
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)
