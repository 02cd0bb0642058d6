"""The size of forward passes: what a row takes is measured, and rows are processed in chunks that fit into a budget."""

import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit.engine import Interception, RuleSet
from dave_vit.engine.autograd_graph import SavedMemory, offload_saved
from dave_vit.engine.fast import substitute_rules
from dave_vit.engine.forward import Read, compute_logits, count_passes, forward, isolate_pass, prepare_model
from dave_vit.engine.observation import observe
from dave_vit.engine.targets import Target, class_logits
from dave_vit.errors import DaveError, OptionError, is_out_of_memory

T = TypeVar("T")
Memory = str | int | float
"""Bytes, a text such as "8GiB", or a share of what is free such as 0.5."""
Kept = Literal["nothing", "graph", "constants", "attention"]
"""What a pass keeps until its derivatives are taken, beside the tensors that autograd saves."""

MEMORY_VARIABLE = "DAVE_MEMORY"
"""Name in the environment of the limit of methods that have none of their own."""
_DEFAULT_SHARE = 0.5  # of a GPU's free memory: the rest is for results, workspaces and other programs
_DEFAULT_MOST = 16 * 2**30  # bytes on a GPU: passes of more rows are hardly faster
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MARGIN = 1.2  # allocators round sizes up and leave gaps
_TRANSIENT = 4  # tensors as the largest one, beside those that are saved: gradients on their way
_FORWARD = 8  # tensors as the largest one, in a pass without derivatives
_COPIES = 8  # of an image: views, noise, weights, samples


def parse_memory(memory: Memory) -> int | float:
    """Return bytes as a whole number, or a share of what is free as a number of at most 1."""
    match = re.fullmatch(r"([\d.]+)\s*([kmgt]i?)?b?", str(memory).strip().lower())
    try:
        amount = float(match[1]) * _UNITS[match[2] or ""] if match else 0.0
    except ValueError:
        amount = 0.0
    if amount <= 0 or isinstance(memory, bool):
        raise OptionError(f"memory is {memory!r}; give a size such as '8GiB', or a share of what is free such as 0.5")
    return amount if amount <= 1 else int(amount)


def memory_budget(memory: Memory | None, device: torch.device) -> int | None:
    """Return the bytes that a pass may take; None for no limit, as on the CPU by default.

    Args:
        memory: the limit; that of ``DAVE_MEMORY`` in the environment by default, else half of a GPU's free memory, up
            to 16 GiB.
        device: where the pass runs.
    """
    memory = memory or os.environ.get(MEMORY_VARIABLE)
    if memory is None:
        return min(_DEFAULT_MOST, int(_DEFAULT_SHARE * free_memory(device))) if device.type == "cuda" else None
    amount = parse_memory(memory)
    return amount if isinstance(amount, int) else int(amount * free_memory(device))


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still take on a device, with what torch holds there unused."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        share = torch.cuda.get_per_process_memory_fraction(device)
        return max(0, min(free + reserved - allocated, int(share * total) - allocated))
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # of macOS
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)


class RowMemory(NamedTuple):
    """Bytes of a pass: whatever the number of rows, and of each row."""

    fixed: int
    row: int


@dataclass(frozen=True)
class PassForm:
    """What a pass runs, of which the memory is measured on one image.

    Attributes:
        model: maps inputs to logits.
        kept: what is kept until the derivatives are taken.
        rules: the derivatives.
        autocast: type of the pass.
        read: what is read from the output.
        classes: derivatives that are taken of one pass.
    """

    model: nn.Module
    kept: Kept
    rules: RuleSet
    autocast: torch.dtype | None
    read: Read
    classes: int = 1

    def measure(self, image: Tensor) -> RowMemory | None:
        """Return the bytes of a pass of images as this one ``[1, C, H, W]``, measured once for a model of this size.

        None where the pass fails: the pass of the map says why.
        """
        known = _KNOWN.setdefault(self.model, {})
        form = (self.kept, self.classes, self.rules.identity, image.shape, image.dtype, image.device, self.autocast)
        key = (sum(parameter.nbytes for parameter in self.model.parameters()), *form)
        if key not in known:
            try:
                known[key] = self._run(image)
            except DaveError:
                return None
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return RowMemory(0, sys.maxsize)  # it may fit the next time
        return known[key]

    def _run(self, image: Tensor) -> RowMemory:
        with count_passes(), (saved := SavedMemory(self.model)):  # it is no pass of a map
            if self.kept == "attention":
                with observe(self.model, image, rules=self.rules, autocast=self.autocast, read=self.read):
                    constants = 0
            else:
                mode = Interception(substitute_rules(self.rules), self.model, record_constants=self.kept == "constants")
                with isolate_pass(image):
                    forward(prepare_model(self.model), image, mode, self.autocast, self.read)
                constants = sum(one.value.untyped_storage().nbytes() for one in mode.take_constants())
        graph = saved.peak + _TRANSIENT * saved.largest + constants
        row = _FORWARD * saved.largest if self.kept == "nothing" else graph
        return RowMemory(saved.fixed, int(_MARGIN * row) + _COPIES * self.classes * image.nbytes)


_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], RowMemory]] = WeakKeyDictionary()


class PassSize:
    """The largest number of rows (images, or images times samples) in one forward pass of a call.

    One object is used for a whole call of a method, so that a size that was halved once stays so until its end.

    Args:
        rows: the most to begin with.
        budget: bytes that a pass may take; None for no limit.
        model: its passes may keep tensors in main memory if one row is too large; None if they are there anyway.
    """

    def __init__(self, rows: int, budget: int | None = None, model: nn.Module | None = None) -> None:
        self.rows, self.budget, self._model = rows, budget, model
        self.is_offloaded = False

    def limit_rows(self, rows: int, form: PassForm, images: Tensor) -> int:
        """Return how many rows, up to ``rows``, of a form of pass fit into the budget; images are its inputs."""
        memory = None if self.budget is None else form.measure(images[:1])
        if memory is None or self.budget is None:
            return rows
        if memory.fixed + memory.row > self.budget:
            self._offload()
        return min(rows, max(1, (self.budget - memory.fixed) // memory.row))

    def _offload(self) -> bool:
        """Keep saved tensors in main memory from here on, if that is another memory; returns whether it is."""
        if self._model is not None and not self.is_offloaded:
            self.is_offloaded = True
            message = "a pass of one image does not fit into the device's memory; main memory is used too, slower"
            warnings.warn(message, stacklevel=2)
        return self.is_offloaded

    def run_chunks(self, compute: Callable[[int, int], T], count: int) -> list[T]:
        """Call ``compute(start, stop)`` for all of ``count`` rows, chunk by chunk; calls may be nested."""
        parts: list[T] = []
        start = 0
        while start < count:
            stop, was_offloaded = min(start + self.rows, count), self.is_offloaded
            try:
                with offload_saved(self._model) if self._model and was_offloaded else nullcontext():
                    parts.append(compute(start, stop))
                start = stop
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or (self.rows == 1 and (was_offloaded or not self._offload())):
                    raise
            # Outside of the handler, so that the failed pass is freed first.
            torch.cuda.empty_cache()
            self.rows = max(1, min(self.rows, stop - start) // 2)
        return parts

    def run_rows(self, compute: Callable[[Tensor, Target], Tensor], rows: Tensor, target: Target) -> Tensor:
        """Compute a tensor for rows ``[n, b, ...]``, n for each image, chunk by chunk: ``[n, b, ...]``.

        Args:
            compute: of some rows and their targets.
            rows: inputs of the model.
            target: of the b images.
        """
        flat, repeated = rows.flatten(0, 1), target.repeat(len(rows))
        parts = self.run_chunks(lambda start, stop: compute(flat[start:stop], repeated.part(start, stop)), len(flat))
        return torch.cat(parts).unflatten(0, rows.shape[:2])  # type: ignore[no-any-return]

    def samples_per_pass(self, images: Tensor) -> int:
        """Return how many samples of each of these images fit into a pass."""
        return max(1, self.rows // len(images))


def even_chunk_size(count: int, most: int) -> int:
    """Return a chunk size of at most ``most`` with which the last chunk lacks as little as possible.

    Batches smaller than the one a graph was compiled for are padded, and padding is wasted work.

    Args:
        count: how many there are.
        most: as memory allows.
    """
    most = min(most, count)
    sizes = range(most // 2 + 1, most + 1)
    return min(reversed(sizes), key=lambda size: -(-count // size) * size)


def clean_logits(
    model: nn.Module, images: Tensor, size: PassSize, read: Read = class_logits, autocast: torch.dtype | None = None
) -> Tensor:
    """Compute the logits of the clean images ``[B, classes]``, or what ``read`` selects from the output."""
    parts = size.run_chunks(lambda start, stop: compute_logits(model, images[start:stop], read, autocast), len(images))
    return torch.cat(parts)
