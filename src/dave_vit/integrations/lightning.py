"""A callback of Lightning that explains the same images during training.

Example:
    >>> callback = LightningExplanationCallback(images, target=labels, every=500)
    >>> Trainer(callbacks=[callback]).fit(module, loader)
"""

from importlib.util import find_spec
from typing import Any

from dave_vit.errors import import_optional
from dave_vit.integrations.training import ExplanationCallback, callback_finder


class _LightningExplanationCallback(ExplanationCallback):
    """Explains images at the start and every so many steps; the arguments are those of `log_maps`.

    The maps go to the trainer's loggers as well, where these are of TensorBoard or Weights & Biases. The module's
    ``forward`` maps inputs to logits.
    """

    def on_train_start(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        if trainer.is_global_zero:
            experiments = [logger.experiment for logger in trainer.loggers]
            known = [one for one in experiments if hasattr(one, "add_image") or "wandb" in type(one).__module__]
            self._log(model=pl_module, step=trainer.global_step, writers=[*self.writers, *known])

    on_train_batch_end = on_train_start


def _find_base() -> Any:
    library = "pytorch_lightning" if find_spec("lightning") is None and find_spec("pytorch_lightning") else "lightning"
    return import_optional("lightning.pytorch" if library == "lightning" else library).Callback


__getattr__ = callback_finder(_LightningExplanationCallback, _find_base)
