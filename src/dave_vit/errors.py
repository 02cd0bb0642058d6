"""All errors that a user can fix. A message is one line: what was given, what was expected, how to fix it."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any
from unicodedata import category


class DaveError(Exception):
    """Base of all errors that a user can fix; the command line prints the message and exits with 2."""


class UnsupportedOperator(DaveError):
    """A function of the model is neither ruled nor known to be linear, so no exact map exists."""


class TrainingModeError(DaveError):
    """The model would behave at random or change its buffers: it must be in evaluation mode."""


class CheckpointingError(DaveError):
    """Gradient checkpointing runs the forward pass again outside of the interception."""


class OutputError(DaveError):
    """The model's output is not a two-dimensional batch of logits that depends on the input."""


class TargetError(DaveError):
    """The target is not a class of the model, or does not fit the batch.

    Args:
        message: the line.
        candidates: index and name of classes that may have been meant.
    """

    def __init__(self, message: str, candidates: Iterable[tuple[int, str]] = ()) -> None:
        super().__init__(message)
        self.candidates = tuple(candidates)


class InputError(DaveError):
    """The input tensor cannot be explained: wrong type, wrong shape, or not finite."""


class OptionError(DaveError):
    """An option is out of its range or contradicts another one."""


class UnknownName(DaveError):
    """A name is not registered; the message suggests the nearest ones."""


class MissingExtra(DaveError):
    """An optional dependency is not installed; the message carries the command that installs it."""


class ModelError(DaveError):
    """A model or its weights cannot be loaded."""


class ImageError(DaveError):
    """A file is not an image that can be read."""


class DataError(DaveError):
    """A data set is missing, incomplete or malformed."""


class OutOfMemory(DaveError):
    """A device has too little memory for one image, or for the model itself."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception of torch, on any device, or of Python means that memory does not suffice."""
    # CUDA's libraries fail to allocate, or to begin at all, where nothing is left for them.
    known = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed", "create(handle)")
    # Torch's own by its name: torch is slow to import.
    is_own_type = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_own_type or any(part in str(error).lower() for part in known)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type where there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def escape_unprintable(text: str) -> str:
    """Escape control characters, and bytes of file names that are not UTF-8, so that a text can be printed."""
    return "".join(ascii(letter)[1:-1] if _is_unprintable(letter) else letter for letter in text)


def _is_unprintable(letter: str) -> bool:
    return category(letter) in ("Cc", "Cs") and letter not in "\n\t"


def import_optional(module: str, package: str = "", *, extra: str = "") -> Any:
    """Import a module of an optional package, or raise MissingExtra with the command that installs it or its extra."""
    name = package or module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        what = f"'dave-vit[{extra}]'" if extra else name
        raise MissingExtra(f"{name} is not installed; run: pip install {what}") from error


def training_error(what: str) -> TrainingModeError:
    """Return the error for layers that are random, or learn, in training mode."""
    return TrainingModeError(f"the model is in training mode and {what} is active; call model.eval() first")


def quantization_error() -> ModelError:
    """Return the error for layers of bitsandbytes."""
    return ModelError(
        "layers of bitsandbytes round what they are given, or multiply in functions without a derivative; load the "
        "model in bfloat16 (model.dequantize()), or with int8 or int4 weights of torchao"
    )


def offload_error() -> ModelError:
    """Return the error for a model whose parameters accelerate loads for each call and drops after it."""
    return ModelError(
        "parameters of the model are offloaded, but its backward pass needs all of them; load it onto its devices as "
        'a whole (device_map="auto" where they have room), in bfloat16 or with int8 weights (torchao)'
    )
