"""Fast substitutes for plain rules and passes: the same maps within rounding, in less time and memory.

Each module registers its substitutes when it is imported; ``substitute_rules`` is the one place where they are looked
up. ``DAVE_FAST=0`` in the environment switches all of them off: rules, recorded models, compiled passes, kernels.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

from dave_vit.engine.calls import Call, Rule, RuleSet


def is_enabled() -> bool:
    """Return whether fast substitutes are used: always, unless ``DAVE_FAST`` is "0" in the environment."""
    return os.environ.get("DAVE_FAST", "1") != "0"


class PassKind(Enum):
    """How a forward pass is run, which decides what a substitute may assume."""

    EAGER = "the model's own code, which may write over a tensor later"
    RECORDED = "recorded calls, none of which writes in place"
    TRACED = "recorded calls that are traced for a compiler, which fuses cheap functions and recomputes them"


_SUBSTITUTES: dict[Any, list[tuple[Callable[..., Any], tuple[PassKind, ...]]]] = {}


def register_substitute(
    *plain: Any, passes: tuple[PassKind, ...] = tuple(PassKind)
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a fast form of plain rules.

    ``rule(plain, call, *args, **kwargs)`` computes what ``plain(call, *args, **kwargs)`` does, or returns
    NotImplemented where it does not serve these arguments.

    Args:
        plain: rules as functions, classes of rules, or canonical names of torch functions.
        passes: the kinds of pass that it serves.
    """

    def add(rule: Callable[..., Any]) -> Callable[..., Any]:
        for key in plain:
            _SUBSTITUTES.setdefault(key, []).append((rule, passes))
        return rule

    return add


def substitute_rules(rules: RuleSet, kind: PassKind = PassKind.EAGER) -> RuleSet:
    """Return a rule set in which rules have their fast substitutes for one kind of pass."""
    if not is_enabled():
        return rules
    return replace(rules, rules={name: _substitute(name, rule, kind) for name, rule in rules.rules.items()})


def _substitute(name: Any, rule: Rule, kind: PassKind) -> Rule:
    key = rule if isinstance(rule, FunctionType) else type(rule)
    substitutes = [one for part in (name, key) for one, passes in _SUBSTITUTES.get(part, ()) if kind in passes]
    return partial(_run_first, substitutes, rule) if substitutes else rule


def _run_first(substitutes: list[Callable[..., Any]], plain: Rule, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Run the first substitute that serves a call, or else the plain rule."""
    for substitute in substitutes:
        result = substitute(plain, call, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return plain(call, *args, **kwargs)
