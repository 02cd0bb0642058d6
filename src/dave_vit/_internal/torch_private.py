"""Private names of torch, all in one place."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as _modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["BatchNorm", "Dropout", "tree_leaves"]


class DispatchMode(TorchDispatchMode):
    """A mode that sees kernels, without torch's guard against compilers, which imports them all: a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # passes that are looked into are never compiled: see ``force_eager``


def global_hooks() -> list[dict[int, Callable[..., Any]]]:
    """Return the tables of hooks that all modules have, on forward and on backward passes."""
    forward = [_modules._global_forward_hooks, _modules._global_forward_pre_hooks]
    return [*forward, _modules._global_backward_hooks, _modules._global_backward_pre_hooks]


def saved_tensor_hooks() -> Any:
    """Return the innermost pair of hooks on tensors that autograd saves, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]


def is_dispatch_traced() -> bool:
    """Return whether a dispatch mode, such as a tracer, is active."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_transformed(tensor: Tensor) -> bool:
    """Return whether a tensor is wrapped by a torch.func transform."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def memory_id(tensor: Tensor) -> int:
    """Return a number that tensors share if they share memory; 0 for one without memory of its own."""
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return _storage_id(tensor)


def _storage_id(tensor: Tensor) -> int:
    try:
        storage: Any = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # wrappers and sparse tensors
        return 0
    return int(storage._cdata)


def choose_attention_kernel(*tensors: Tensor, is_causal: bool, scale: float | None) -> int:
    """Return which kernel ``scaled_dot_product_attention`` takes, as a value of ``SDPBackend``."""
    choose: Any = torch._fused_sdp_choice
    return int(choose(*tensors, None, 0.0, is_causal, scale=scale))


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Context in which a CUDA graph is captured whose products have workspaces of their own.

    torch keeps one for each stream, and all graphs are captured on the same: two that run at once would write into each
    other's, and wait for ever.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def force_eager() -> AbstractContextManager[Any]:
    """Return a context in which ``module.compile()`` and ``torch.compile(part)`` run the original code."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def trace_graph(function: Callable[..., Any], inputs: list[Tensor]) -> torch.fx.GraphModule:
    """Return the graph of torch's own operators that a function calls for these tensors."""
    # One mode for the shapes of all tensors: make_fx by itself makes one for each, and walks through the call stack.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        return make_fx(function)(*inputs)


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Compile a graph of torch's own operators as a whole: ``torch.compile`` would only split it up."""
    from torch import _inductor  # takes seconds to import

    # A residual stream is stored wherever a term is added to it, rather than summed again by all that read it.
    return _inductor.compile(graph, [*inputs], options={"realize_reads_threshold": 1})  # type: ignore[no-any-return]
