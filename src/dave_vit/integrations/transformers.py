"""A callback of transformers' Trainer that explains the same images during training.

Example:
    >>> callback = ExplanationCallback(images, target=labels, every=500, folder="maps")
    >>> Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor

from dave_vit.errors import import_optional
from dave_vit.integrations.training import log_maps


@cache
def _build() -> type:
    base: Any = import_optional("transformers").TrainerCallback

    class ExplanationCallback(base):  # type: ignore[misc]
        """Explains images at the start and every so many steps; the arguments are those of `log_maps`."""

        def __init__(self, inputs: Tensor, *, every: int = 100, writers: Sequence[Any] = (), **options: Any) -> None:
            self.writers = writers
            self._log = partial(log_maps, inputs=inputs, every=every, **options)

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            self._explain(state, model)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            self._explain(state, model)

        def _explain(self, state: Any, model: Any) -> None:
            if state.is_world_process_zero:
                self._log(model=model, step=state.global_step, writers=self.writers)

    return ExplanationCallback


def __getattr__(name: str) -> Any:
    if name != "ExplanationCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _build()
