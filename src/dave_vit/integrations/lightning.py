"""A callback of Lightning that explains the same images during training.

Example:
    >>> callback = ExplanationCallback(images, target=labels, every=500)
    >>> Trainer(callbacks=[callback]).fit(module, loader)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from dave_vit.errors import import_optional
from dave_vit.integrations.training import log_maps


@cache
def _build() -> type:
    library = "pytorch_lightning" if find_spec("lightning") is None and find_spec("pytorch_lightning") else "lightning"
    base: Any = import_optional("lightning.pytorch" if library == "lightning" else library).Callback

    class ExplanationCallback(base):  # type: ignore[misc]
        """Explains images at the start and every so many steps; the arguments are those of `log_maps`.

        The maps go to the trainer's loggers as well, where these are of TensorBoard or Weights & Biases. The module's
        ``forward`` maps inputs to logits.
        """

        def __init__(self, inputs: Tensor, *, every: int = 100, writers: Sequence[Any] = (), **options: Any) -> None:
            self.writers = writers
            self._log = partial(log_maps, inputs=inputs, every=every, **options)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._explain(trainer, pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
            self._explain(trainer, pl_module)

        def _explain(self, trainer: Any, module: Any) -> None:
            if trainer.is_global_zero:
                experiments = [logger.experiment for logger in trainer.loggers]
                known = [one for one in experiments if hasattr(one, "add_image") or "wandb" in type(one).__module__]
                self._log(model=module, step=trainer.global_step, writers=[*self.writers, *known])

    return ExplanationCallback


def __getattr__(name: str) -> Any:
    if name != "ExplanationCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _build()
