"""An ``explain_func`` for Quantus.

Example:
    >>> metric(model=model, x_batch=x, y_batch=y, explain_func=explain_func, explain_func_kwargs={"samples": 20})
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from dave_vit.methods import create_method


def explain_func(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    method: str = "dave",
    device: str | torch.device | None = None,
    **options: Any,
) -> np.ndarray[Any, Any]:
    """Return signed maps ``[B, 1, H, W]``, as Quantus asks for.

    Args:
        model: maps inputs to logits.
        inputs: preprocessed images ``[B, C, H, W]``, an array or a tensor.
        targets: a class for each image, or None for the predicted ones.
        method: name of the method.
        device: where the inputs are explained; that of the model by default.
        options: of the method, as ``explain_func_kwargs``.
    """
    parameter = next(model.parameters())
    images = torch.as_tensor(inputs, dtype=parameter.dtype, device=device or parameter.device)
    classes = None if targets is None else torch.as_tensor(targets).reshape(-1).long()
    return create_method(method, model, **options).explain(images, classes).map.unsqueeze(1).numpy(force=True)
