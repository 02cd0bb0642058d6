"""Rule sets: immutable tables from torch functions to changed derivatives."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dave_vit.engine.interception import Interception

_SPELLINGS = {
    "add": "__add__ __radd__",
    "sub": "__sub__ subtract",
    "rsub": "__rsub__",
    "mul": "__mul__ __rmul__ multiply",
    "div": "__truediv__ __div__ divide true_divide",
    "rdiv": "__rtruediv__ __rdiv__",
    "matmul": "__matmul__",
    "rmatmul": "__rmatmul__",
    "pow": "__pow__",
    "rpow": "__rpow__",
    "neg": "__neg__ negative",
    "abs": "__abs__ absolute",
    "cat": "concat concatenate",
    "sigmoid": "special_expit",
    "softmax": "special_softmax",
    "erf": "special_erf",
}
_ALIASES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_INPLACE_DUNDERS = {f"__i{name}__": name for name in "add sub mul div pow".split()} | {"__itruediv__": "div"}


@dataclass(frozen=True, slots=True)
class FunctionName:
    """What a torch function is, whatever its spelling.

    Attributes:
        name: canonical name; ``torch.add``, ``Tensor.add_`` and ``+=`` are all "add".
        inplace: whether this spelling writes its result into its first argument.
    """

    name: str
    inplace: bool = False


_NAMES: dict[Any, FunctionName] = {}


def function_name(func: Any) -> FunctionName:
    """The canonical name of a torch function, property or operator."""
    known = _NAMES.get(func)
    if known is None:
        known = _NAMES[func] = _canonical(func)
    return known


def _canonical(func: Any) -> FunctionName:
    raw = getattr(func, "__name__", None) or str(func)
    if raw in ("__get__", "__set__", "__delete__"):  # a property: torch.Tensor.shape.__get__
        return FunctionName(f"{raw}{func.__self__.__name__}")
    module = getattr(func, "__module__", None)
    if module is not None and not _is_torchs(module):
        return FunctionName(f"{module}.{raw}")  # somebody else's function of that name is not torch's
    if raw in _INPLACE_DUNDERS:
        return FunctionName(_INPLACE_DUNDERS[raw], inplace=True)
    if raw.endswith("_") and not raw.endswith("__"):
        base = raw[:-1]
        return FunctionName(_ALIASES.get(base, base), inplace=True)
    return FunctionName(_ALIASES.get(raw, raw))


def _is_torchs(module: str) -> bool:
    operators = re.match(r"torch\._?ops\.(\w+)", module)  # torch.ops holds the operators of every library
    return operators[1] == "aten" if operators else module.partition(".")[0] == "torch"


@dataclass(frozen=True, slots=True)
class Call:
    """One intercepted call, as a rule sees it."""

    mode: Interception
    func: Callable[..., Any]
    name: str


Rule = Callable[..., Any]
"""``rule(call, *args, **kwargs)``: the same forward value as ``call.func``, with another derivative."""


@dataclass(frozen=True)
class RuleSet:
    """An immutable table from canonical function names (or functions) to rules.

    Attributes:
        name: shown in error messages.
        rules: canonical torch name, or a function object of somebody else's, to its rule.
        strict: whether a function without a rule is refused where it meets a tensor that carries gradient;
            otherwise it keeps its ordinary derivative.
    """

    name: str
    rules: Mapping[Any, Rule] = field(default_factory=dict)
    strict: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", MappingProxyType(dict(self.rules)))

    def extend(self, name: str, rules: Mapping[Any, Rule]) -> RuleSet:
        """A new rule set in which ``rules`` are added or replaced."""
        return RuleSet(name, {**self.rules, **rules}, strict=self.strict)

    def lookup(self, func: Any, name: str) -> Rule | None:
        """The rule of a function: by identity first, then by canonical name."""
        rule = self.rules.get(func)
        return rule if rule is not None else self.rules.get(name)
