"""Weights from a file: safetensors, or a pickle that holds tensors and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.errors import ModelError

State = dict[str, Tensor]
RANDOM = "random"
"""In place of a file: leave the weights as they were initialised."""

_CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model", "teacher", "module", "net")
_DEPTH = 8  # of such containers; pickles can contain themselves
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")


@dataclass(frozen=True)
class Weights:
    """What a file of weights holds.

    Attributes:
        state: parameter names to tensors.
        metadata: text that the file carries beside them (safetensors only).
        path: where it came from.
    """

    state: State
    metadata: dict[str, str] = field(default_factory=dict)
    path: Path = Path()


def read_weights(path: str | Path) -> Weights:
    """A state dict and its metadata; nothing in the file is executed."""
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"{path}: no such file; give a .safetensors or .pth file of weights")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpicklers meet strange bytes with any exception
        if "GLOBAL" not in str(error) and "TorchScript" not in str(error) and "Unsupported" not in str(error):
            raise ModelError(f"{path}: not a file of weights; give a .safetensors or .pth file") from error
        raise ModelError(
            f"{path}: refused, since it holds more than tensors and loading it could run code; save the state dict "
            "alone: torch.save(model.state_dict(), FILE)"
        ) from error
    return Weights(_state_of(content, path), path=path)


def _read_safetensors(path: Path) -> Weights:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return Weights({key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}, path)  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a safetensors file, or a damaged one; download or save it again") from error


def _state_of(content: Any, path: Path) -> State:
    """The parameters inside a checkpoint, without the wrappings of the program that trained it."""
    for _ in range(_DEPTH):
        if not isinstance(content, dict) or _is_state(content):
            break
        content = next((content[key] for key in _CONTAINERS if isinstance(content.get(key), dict)), None)
    if not isinstance(content, dict) or not _is_state(content):
        raise ModelError(f"{path}: holds no state dict; save one with torch.save(model.state_dict(), FILE)")
    return dict(content)


def _is_state(content: dict[Any, Any]) -> bool:
    return bool(content) and all(isinstance(value, Tensor) for value in content.values())


def strip_prefixes(state: State, expected: set[str]) -> State:
    """The state dict without a prefix such as ``module.``, where that makes its names those of the model."""
    for prefix in PREFIXES:
        if state and all(key.startswith(prefix) for key in state) and not expected.intersection(state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def count_classes(weights: Weights, model: nn.Module, count: int) -> int:
    """How many classes the head of these weights has, for a model built with ``count`` classes."""
    own = model.state_dict()
    state = strip_prefixes(weights.state, set(own))
    heads = [key for key in own if own[key].shape[:1] == (count,) and key in state and state[key].ndim == own[key].ndim]
    sizes = {int(state[key].shape[0]) for key in heads}
    return sizes.pop() if len(sizes) == 1 else count


def build_with_weights(build: Callable[..., nn.Module], weights: str, count: int) -> tuple[nn.Module, int]:
    """A model with the weights of a file, or with random ones, and the number of its classes.

    Args:
        build: makes the model; takes ``num_classes``.
        weights: a local file, or "random".
        count: how many classes it has where nothing is said; the head takes as many as the file has.
    """
    model = build()
    if weights == RANDOM:
        return model, count
    given = read_weights(weights)
    wanted = count_classes(given, model, count)
    model = model if wanted == count else build(num_classes=wanted)
    load_state(model, given)
    return model, wanted


def saved_class_names(weights: Weights) -> list[str] | None:
    """Class names that were saved beside the weights."""
    text = weights.metadata.get("class_names")
    try:
        return [str(name) for name in json.loads(text)] if text else None
    except (ValueError, TypeError) as error:
        raise ModelError(f"{weights.path}: its class_names are no JSON list; save the file again") from error


def load_state(model: nn.Module, weights: Weights) -> None:
    """Fill a model with weights that must fit it exactly."""
    own = model.state_dict()
    state = strip_prefixes(weights.state, set(own))
    if own.keys() != state.keys() or any(own[key].shape != state[key].shape for key in own):
        raise mismatch_error(weights.path, own, state)
    model.load_state_dict(state)


def mismatch_error(path: Path, own: State, state: State) -> ModelError:
    """The error for weights of another model."""
    wrong = sorted(key for key in own.keys() & state.keys() if own[key].shape != state[key].shape)
    kinds = {
        "missing": sorted(own.keys() - state.keys()),
        "unknown": sorted(state.keys() - own.keys()),
        "of another shape": wrong,
    }
    parts = [f"{len(keys)} {what} such as {keys[0]!r}" for what, keys in kinds.items() if keys]
    return ModelError(f"{path}: these weights are of another model ({'; '.join(parts)}); name the one they belong to")
