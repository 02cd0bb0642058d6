"""Calls of torch functions, the rules that answer them, and immutable tables of rules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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
        # A rule that cannot be a key is like no other.
        rules = ((name, rule if _is_hashable(rule) else object()) for name, rule in self.rules.items())
        return self.strict, frozenset(rules)

    def extend(self, name: str, rules: Mapping[Any, Rule]) -> RuleSet:
        """Return a new rule set in which ``rules`` are added or replaced."""
        return RuleSet(name, {**self.rules, **rules}, strict=self.strict)

    def lookup(self, func: Any, name: str) -> Rule | None:
        """Return the rule of a function: by identity first, then by canonical name."""
        return self.rules.get(func) or self.rules.get(name)


def _is_hashable(rule: Rule) -> bool:
    try:
        hash(rule)
    except TypeError:
        return False
    return True
