"""Forward hooks on the blocks of a model, for methods that read the tokens after every block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

Tap = Callable[[list[str], list[Tensor]], Tensor | None]
"""Function of the paths of a list of blocks and the tokens after its blocks so far; its result replaces the last."""


@contextmanager
def tap_blocks(model: nn.Module, batch: int, tap: Tap) -> Iterator[None]:
    """Call ``tap`` after each block that returns tokens, for passes in this thread; no hook is left afterwards.

    Args:
        model: has its blocks in lists of modules.
        batch: number of images in a pass.
        tap: may return tokens that replace those of the block.
    """
    with ExitStack() as stack:
        for paths, blocks in list_blocks(model):
            hook = _block_hook(paths, batch, tap)
            for block in blocks:
                stack.enter_context(block.register_forward_hook(hook))
        yield


def _block_hook(paths: list[str], batch: int, tap: Tap) -> Callable[[nn.Module, Any, Any], Any]:
    states: list[Tensor] = []
    thread = threading.get_ident()

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        tokens = output[0] if isinstance(output, tuple) else output
        if threading.get_ident() != thread or not _is_tokens(tokens, states, batch):
            return output
        states.append(tokens)
        replaced = tap(paths, states)
        following = tokens if replaced is None else replaced
        return (following, *output[1:]) if isinstance(output, tuple) else following

    return hook


def _is_tokens(value: Any, before: list[Tensor], batch: int) -> bool:
    """Return whether a block returned tokens ``[batch, N, D]`` of the same shape as the blocks before."""
    fits = isinstance(value, Tensor) and value.ndim == 3 and len(value) == batch
    return fits and all(value.shape == state.shape for state in before)


def list_blocks(model: nn.Module) -> Iterator[tuple[list[str], list[nn.Module]]]:
    """Yield lists of at least two modules of one class, with their paths; none inside of another."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        children = list(module.named_children())
        alike = len({type(child) for _, child in children}) == 1 and len(children) > 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike and not path.startswith(inside or ("\0",)):
            inside = (*inside, f"{path}.")
            yield [f"{path}.{name}" for name, _ in children], [child for _, child in children]
