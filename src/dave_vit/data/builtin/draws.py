"""Random integers and fixed-point angles that are the same on every machine.

numpy keeps the streams of its generators for a release, not for ever, and the last bit of ``sin`` belongs to the
platform's mathematics library. Reproducible images need both, so both are integers here.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

TURN = 1024  # steps of a full turn
ONE = 1 << 14  # the fixed-point one of SIN and COS
_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(z: Any) -> Any:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) to an integer or an array of 64-bit words."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


class Draws:
    """A stream of random integers (SplitMix64) that its key alone determines.

    Args:
        key: integers that name the stream, such as (seed, index); different keys give unrelated streams.
    """

    def __init__(self, *key: int) -> None:
        self._state = 0
        for part in key:
            self._state = _mix((self._state + _GAMMA + (part & _WORD)) & _WORD)

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """Return the next ``count`` 64-bit words, as that many single draws would give."""
        steps = np.arange(1, count + 1, dtype=np.uint64)
        z = np.uint64(self._state) + steps * np.uint64(_GAMMA)  # arrays wrap around, as the algorithm requires
        self._state = (self._state + count * _GAMMA) & _WORD
        return np.asarray(_mix(z))

    def bytes(self, count: int) -> npt.NDArray[np.uint8]:
        """Return the next ``count`` bytes, little end first."""
        return self.words(-(-count // 8)).astype("<u8").view(np.uint8)[:count]

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from ``low`` to ``high``, both included."""
        self._state = (self._state + _GAMMA) & _WORD
        return low + int((_mix(self._state) * (high - low + 1)) >> 64)

    def even(self, low: int, high: int) -> int:
        """Draw an even integer from ``low`` to ``high``, both even and included."""
        return 2 * self.integer(low // 2, high // 2)

    def choice(self, items: Sequence[T]) -> T:
        """Draw one of the items."""
        return items[self.integer(0, len(items) - 1)]


# The same on every machine: no value is nearer than 0.0003 to where rounding changes, far above the error of ``sin``.
_SINES = np.rint(ONE * np.sin(2 * np.pi * np.arange(TURN) / TURN)).astype(np.int64)


def sin(step: int) -> int:
    """Return ONE times the sine of ``step`` / TURN of a turn."""
    return int(_SINES[step % TURN])


def cos(step: int) -> int:
    """Return ONE times the cosine of ``step`` / TURN of a turn."""
    return sin(step + TURN // 4)
