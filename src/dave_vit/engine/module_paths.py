"""The path of the module that runs, found on the call stack."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn


class ModuleCall:
    """A call that replaces a module's own; its frame on the call stack has the module's path."""

    module: str = ""


class ModulePaths:
    """Finds the paths of a model's modules on the call stack; costs nothing until one is needed."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self._paths: dict[int, str] | None = None

    def innermost(self, error: BaseException | None = None) -> str:
        """Return the path of the innermost module on the call stack, or on that of an error; or ""."""
        frames = _stack(sys._getframe(1)) if error is None else frames_of(error)
        for frame in frames:
            owner = frame.f_locals.get("self")
            path = owner.module if isinstance(owner, ModuleCall) else self._find(owner)
            if path is not None:
                return path
        return ""

    def _find(self, owner: Any) -> str | None:
        if not isinstance(owner, nn.Module):
            return None
        if self._paths is None:
            modules = self.model.named_modules() if self.model is not None else ()
            self._paths = {id(module): name or type(module).__name__ for name, module in modules}
        return self._paths.get(id(owner))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_of(error: BaseException) -> list[FrameType]:
    """Return the frames in which an error was raised, the innermost first."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
