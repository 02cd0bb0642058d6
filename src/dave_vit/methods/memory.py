"""Rows of a pass by memory: what one image takes is measured, and compared with a budget."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.fast import substitute_rules
from dave_vit.engine.forward import Read, count_passes, forward, isolate_pass, prepare_model
from dave_vit.engine.interception import Interception
from dave_vit.engine.observation import observe
from dave_vit.engine.saved_memory import SavedMemory
from dave_vit.errors import DaveError, OptionError, is_out_of_memory

Memory = str | int | float
"""Bytes, a text such as "8GiB", or a share of what is free such as 0.5."""
Kept = Literal["nothing", "graph", "constants", "attention"]
"""What a pass keeps until its derivatives are taken, beside the tensors that autograd saves."""

MEMORY_VARIABLE = "DAVE_MEMORY"
"""Name in the environment of the limit of methods that have none of their own."""
_DEFAULT_SHARE = 0.5  # of a GPU's free memory: the rest is for results, workspaces and other programs
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
        memory: the limit; that of ``DAVE_MEMORY`` in the environment by default, else half of a GPU's free memory.
        device: where the pass runs.
    """
    memory = memory or os.environ.get(MEMORY_VARIABLE) or (_DEFAULT_SHARE if device.type == "cuda" else None)
    if memory is None:
        return None
    amount = parse_memory(memory)
    return amount if isinstance(amount, int) else int(amount * free_memory(device))


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still take on a device, with what torch holds there unused."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)  # since torch 2.9
        return max(0, min(free + reserved - allocated, int(share * total) - allocated))
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # of macOS
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)


@dataclass(frozen=True)
class RowMemory:
    """Bytes of a pass.

    Attributes:
        fixed: whatever the number of rows.
        row: of each row.
    """

    fixed: int
    row: int

    def rows_within(self, budget: int) -> int:
        """Return how many rows fit into a budget, at least one."""
        return max(1, (budget - self.fixed) // self.row)


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
        with count_passes(), SavedMemory(self.model) as saved:  # it is no pass of a map
            if self.kept == "attention":
                with observe(self.model, image, rules=self.rules, autocast=self.autocast, read=self.read):
                    constants = 0
            else:
                mode = Interception(substitute_rules(self.rules), self.model, record_constants=self.kept == "constants")
                with isolate_pass(image):
                    forward(prepare_model(self.model), image, mode, self.autocast, self.read)
                constants = sum(one.leaf.nbytes for one in mode.constants or ())  # of their derivatives
        graph = saved.peak + _TRANSIENT * saved.largest + constants
        row = _FORWARD * saved.largest if self.kept == "nothing" else graph
        return RowMemory(saved.fixed, int(_MARGIN * row) + _COPIES * self.classes * image.nbytes)


_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], RowMemory]] = WeakKeyDictionary()
