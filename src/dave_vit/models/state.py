"""Read weights from a safetensors file, or from a pickle that holds only tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.data.images import SUFFIXES
from dave_vit.errors import ModelError

State = dict[str, Tensor]
RANDOM = "random"
"""Instead of a file: keep the random initial weights."""

_CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model", "teacher", "module", "net")
_DEPTH = 8  # of such containers; pickles can contain themselves
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")


@dataclass(frozen=True)
class Weights:
    """Contents of a file of weights.

    Attributes:
        state: parameter names to tensors.
        metadata: text of the file (safetensors only).
        path: of the file.
    """

    state: State
    metadata: dict[str, str] = field(default_factory=dict)
    path: Path = Path()


def read_weights(path: str | Path) -> Weights:
    """Read a state dict and its metadata; no code of the file is executed."""
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"{path}: no such file; give a .safetensors or .pth file of weights")
    if path.suffix.lower() in SUFFIXES:
        raise ModelError(f"{path}: a picture, not a file of weights; give a .safetensors or .pth file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpicklers raise any exception on strange bytes
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
    """Return the parameters inside a checkpoint of any training program."""
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
    """Strip a prefix such as ``module.`` where all names have it and none matches the model."""
    for prefix in _PREFIXES:
        if state and all(key.startswith(prefix) for key in state) and not expected.intersection(state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def head_tensors(weights: Weights, model: nn.Module, count: int) -> State:
    """Return the tensors of the weights' head, which has ``count`` rows in this model; their names without prefixes."""
    own = model.state_dict()
    state = strip_prefixes(weights.state, set(own))
    heads = [key for key in own if own[key].shape[:1] == (count,) and key in state and state[key].ndim == own[key].ndim]
    return {key: state[key] for key in heads}


def count_classes(weights: Weights, model: nn.Module, count: int) -> int | None:
    """Return the number of classes of the weights' head, for a model built with ``count`` classes; None without one."""
    sizes = {len(tensor) for tensor in head_tensors(weights, model, count).values()}
    return sizes.pop() if len(sizes) == 1 else None


def build_with_weights(build: Callable[..., nn.Module], weights: str, count: int) -> tuple[nn.Module, int]:
    """Build a model with the weights of a file or with random ones; also return its number of classes.

    Args:
        build: builds the model; takes ``num_classes``.
        weights: a local file, or "random".
        count: default number of classes; the head takes as many as the file has.
    """
    model = build()
    if weights == RANDOM:
        return model, count
    loaded = read_weights(weights)
    classes = count_classes(loaded, model, count) or count
    model = model if classes == count else build(num_classes=classes)
    load_state(model, loaded)
    return model, classes


def saved_class_names(weights: Weights) -> list[str] | None:
    """Return the class names saved with the weights, or None."""
    text = weights.metadata.get("class_names")
    try:
        return [str(name) for name in json.loads(text)] if text else None
    except (ValueError, TypeError) as error:
        raise ModelError(f"{weights.path}: its class_names are no JSON list; save the file again") from error


def load_state(model: nn.Module, weights: Weights) -> None:
    """Load weights into a model; they must fit it exactly."""
    own = model.state_dict()
    state = strip_prefixes(weights.state, set(own))
    if own.keys() != state.keys() or any(own[key].shape != state[key].shape for key in own):
        raise mismatch_error(weights.path, own, state)
    model.load_state_dict(state)


def mismatch_error(path: Path, own: State, state: State) -> ModelError:
    """Return the error for weights of another model."""
    wrong = sorted(key for key in own.keys() & state.keys() if own[key].shape != state[key].shape)
    kinds = {
        "missing": sorted(own.keys() - state.keys()),
        "unknown": sorted(state.keys() - own.keys()),
        "of another shape": wrong,
    }
    parts = [f"{len(keys)} {what} such as {keys[0]!r}" for what, keys in kinds.items() if keys]
    return ModelError(f"{path}: these weights are of another model ({'; '.join(parts)}); name the one they belong to")
