"""A callback of transformers' Trainer that explains the same images during training.

Example:
    >>> callback = TransformersExplanationCallback(images, target=labels, every=500, folder="maps")
    >>> Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
"""

from typing import Any

from dave_vit.errors import import_optional
from dave_vit.integrations.training import ExplanationCallback, callback_finder


class _TransformersExplanationCallback(ExplanationCallback):
    """Explains images at the start and every so many steps; the arguments are those of `log_maps`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if state.is_world_process_zero:
            self._log(model=model, step=state.global_step, writers=self.writers)

    on_step_end = on_train_begin


__getattr__ = callback_finder(_TransformersExplanationCallback, lambda: import_optional("transformers").TrainerCallback)
