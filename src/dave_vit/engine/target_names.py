"""Find classes by their names."""

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from dave_vit.errors import TargetError

_SHOWN = 6  # candidates in an error message


def find_class(target: str, names: Sequence[str]) -> int:
    """Return the index of a class.

    Args:
        target: an index, a name, one of the synonyms that commas separate in a name, or a part that only one has.
        names: class names in the order of the logits.

    Raises:
        TargetError: none or several fit; the message lists them, or the nearest.
    """
    if re.fullmatch(r"-?\d+", target):
        if not 0 <= int(target) < len(names):
            raise TargetError(f"target {int(target)}; the model has classes 0 to {len(names) - 1}")
        return int(target)
    text = target.strip().casefold()
    lowered = [name.casefold() for name in names]
    synonyms = [[part.strip() for part in name.split(",")] for name in lowered]
    tests: tuple[Callable[[int], bool], ...] = (
        lambda index: lowered[index] == text,
        lambda index: text in synonyms[index],
        lambda index: re.search(rf"\b{re.escape(text)}\b", lowered[index]) is not None,
        lambda index: text in lowered[index],
    )
    for fits in tests:  # the strictest reading that anything fits
        fitting = [index for index in range(len(names)) if text and fits(index)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise TargetError(
                f"target {target!r} fits {len(fitting)} classes: {_format_classes(fitting, names)}; give an index",
                [(index, names[index]) for index in fitting],
            )
    close = _nearest(text, lowered)
    hint = f"the model has {len(names)}: {_format_classes([0, 1], names)}; ..."
    if close:
        hint = f"did you mean {_format_classes(close, names)}?"
    raise TargetError(f"no class is called {target!r}; {hint}", [(index, names[index]) for index in close])


def _nearest(text: str, names: Sequence[str]) -> list[int]:
    """Return up to three classes whose name, or a word of it, is spelt much like the text."""

    def likeness(name: str) -> float:
        return max(SequenceMatcher(None, text, part).ratio() for part in (name, *re.findall(r"\w+", name)))

    likest = sorted(((likeness(name), index) for index, name in enumerate(names)), key=lambda pair: -pair[0])
    return [index for ratio, index in likest[:3] if ratio > 0.7]


def _format_classes(indices: Sequence[int], names: Sequence[str]) -> str:
    shown = [f"{index} {names[index]}" for index in indices[:_SHOWN] if index < len(names)]
    return "; ".join(shown) + ("; ..." if len(indices) > _SHOWN else "")
