"""Read weights from a safetensors file, or from a pickle that holds only tensors."""

import io
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from dave_vit.data.images import SUFFIXES
from dave_vit.errors import ModelError, first_line

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

    @property
    def class_names(self) -> list[str] | None:
        """The class names saved with the weights, or None."""
        text = self.metadata.get("class_names")
        try:
            return [str(name) for name in json.loads(text)] if text else None
        except (ValueError, TypeError) as error:
            raise ModelError(f"{self.path}: its class_names are not a JSON list; save the file again") from error

    def state_for(self, model: nn.Module) -> State:
        """Return the tensors without a prefix such as ``module.`` that all names have and none of the model's."""
        state, expected = self.state, set(model.state_dict())
        for prefix in _PREFIXES:
            if state and all(key.startswith(prefix) for key in state) and not expected.intersection(state):
                state = {key.removeprefix(prefix): value for key, value in state.items()}
        return state

    def fits(self, model: nn.Module) -> bool:
        """Return whether names and shapes are exactly those of a model."""
        own, state = model.state_dict(), self.state_for(model)
        return {key: value.shape for key, value in own.items()} == {key: value.shape for key, value in state.items()}

    def load_into(self, model: nn.Module) -> None:
        """Load the weights into a model; they must fit it exactly."""
        if not self.fits(model):
            raise self.mismatch_error(model)
        model.load_state_dict(self.state_for(model))

    def head_tensors(self, model: nn.Module, count: int) -> State:
        """Return the tensors of the head, which has ``count`` rows in this model."""
        own, state = model.state_dict(), self.state_for(model)
        rows = [key for key in own if own[key].shape[:1] == (count,)]
        return {key: state[key] for key in rows if key in state and state[key].ndim == own[key].ndim}

    def count_classes(self, model: nn.Module, count: int) -> int | None:
        """Return the number of classes of the head, for a model built with ``count`` classes; None without a head."""
        sizes = {len(tensor) for tensor in self.head_tensors(model, count).values()}
        return sizes.pop() if len(sizes) == 1 else None

    def mismatch_error(self, model: nn.Module) -> ModelError:
        """Return the error for weights of another model."""
        own, state = model.state_dict(), self.state_for(model)
        kinds = {
            "missing": sorted(own.keys() - state.keys()),
            "unknown": sorted(state.keys() - own.keys()),
            "of another shape": sorted(key for key in own.keys() & state.keys() if own[key].shape != state[key].shape),
        }
        parts = [f"{len(keys)} {what} such as {keys[0]!r}" for what, keys in kinds.items() if keys]
        problem = f"these weights are of another model ({'; '.join(parts)})"
        return ModelError(f"{self.path}: {problem}; name the one they belong to")


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
        if not any(word in str(error) for word in ("GLOBAL", "TorchScript", "Unsupported")):
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
    classes = loaded.count_classes(model, count) or count
    model = model if classes == count else build(num_classes=classes)
    loaded.load_into(model)
    return model, classes


_SECONDS = 3.0  # timeout of the first connection


@lru_cache
def _is_reachable(address: str) -> bool:
    """Return whether a server, or the proxy before it, can be reached; tested once."""
    proxies = (os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    parts = urlparse(next(filter(None, proxies), address))
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
        with socket.create_connection((parts.hostname or "", port), timeout=_SECONDS):
            return True
    except OSError:
        return False


@contextmanager
def hub_access(
    what: str, address: str | None = None, *, fix: str = "give a local file with --weights FILE"
) -> Iterator[None]:
    """Allow downloads inside the context; raise errors in one line.

    Without a network only cached files are used, so nothing is retried for minutes.

    Args:
        what: the model, for the error message.
        address: where it is published; Hugging Face's hub by default.
        fix: advice that works without a download.
    """
    from huggingface_hub import constants, errors

    host = address or constants.ENDPOINT
    reachable = not (constants.HF_HUB_OFFLINE and address is None) and _is_reachable(host)
    try:
        # torch announces downloads on standard output, where results go
        with redirect_stdout(sys.stderr) if reachable else _offline():
            yield
    except (OSError, errors.EntryNotFoundError) as error:  # OSError: also as transformers wraps network errors
        raise ModelError(f"{what} {_reason(error, reachable=reachable)} {fix}") from error


@contextmanager
def _offline() -> Iterator[None]:
    """Make the hub's client use its cache only, and other downloads give up soon."""
    from huggingface_hub import constants

    before, timeout = constants.HF_HUB_OFFLINE, socket.getdefaulttimeout()
    constants.HF_HUB_OFFLINE = True
    socket.setdefaulttimeout(_SECONDS)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # reports of downloads that fail
            yield
    finally:
        constants.HF_HUB_OFFLINE = before
        socket.setdefaulttimeout(timeout)


def _reason(error: Exception, *, reachable: bool) -> str:
    from huggingface_hub import errors

    text = str(error).lower()
    absent = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError)
    is_absent = isinstance(error, absent)  # their texts speak of gated models too
    if isinstance(error, errors.GatedRepoError) or (not is_absent and "gated" in text):
        return "is gated: accept its licence on the hub and run `hf auth login`, or"
    if isinstance(error, errors.LocalEntryNotFoundError) or (not is_absent and not reachable):
        return "is not on this machine and the model hub cannot be reached;"
    if is_absent or "not a valid model identifier" in text or "404" in text:
        return "does not exist on the hub, or is private; check its name, or"
    return f"cannot be loaded ({first_line(error)[:200]});"
