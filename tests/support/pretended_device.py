"""A pretended device beside main memory: it holds some tensors and all that is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy}
WAITING_OPERATIONS = {"_local_scalar_dense", "equal", "nonzero", "bincount", "unique"}


class PretendedDevice(TorchFunctionMode):
    """Tells which tensors would be on a device: what goes through ``.cpu()`` or ``.to("cpu")`` is not.

    Args:
        tensors: those on the device at first, such as images and parameters.
        float64: whether the device has this type; Apple's GPUs do not.

    Attributes:
        waits: how often the host would have waited for the device, to read a value of it.
    """

    def __init__(self, *tensors: torch.Tensor, float64: bool = True) -> None:
        super().__init__()
        self.float64, self.waits = float64, 0
        self._places: dict[int, bool] = {}
        self._held: list[torch.UntypedStorage] = []  # so that no other tensor gets the address
        for tensor in tensors:
            self.place(tensor, device=True)

    def place(self, tensor: torch.Tensor, *, device: bool) -> None:
        storage = tensor.untyped_storage()
        self._places[storage.data_ptr()] = device
        self._held.append(storage)
        if device and not self.float64:
            assert tensor.dtype is not torch.float64, "float64 on a device that has none"

    def holds(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and self._places.get(tensor.untyped_storage().data_ptr(), False)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        where = kwargs.get("device", args[1] if func is torch.Tensor.to else None)
        is_read = func in WAITS or (func is torch.Tensor.to and where == "cpu")
        self.waits += is_read and self.holds(args[0])
        if is_read:
            copy = torch.from_numpy(args[0].detach().numpy().copy())  # out of sight of the operations
            self.place(copy, device=False)
            return func(copy, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and isinstance(where, torch.device):
            self.place(result, device=True)
        return result


class _Operations(TorchDispatchMode):
    """Places the results of operations on tensors of the device there too."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(map(self.device.holds, given)):
            self.device.waits += func.name().removeprefix("aten::").partition(".")[0] in WAITING_OPERATIONS
            wide = [one for one in given if one.dtype is torch.float64 and one.ndim and not self.device.float64]
            assert not wide, f"{func.name()} on the device is given float64"
            for one in tree_leaves(result):
                if isinstance(one, torch.Tensor):
                    self.device.place(one, device=True)
        return result


@contextmanager
def pretend_device(*tensors: torch.Tensor, float64: bool = True) -> Iterator[PretendedDevice]:
    """Pretend inside of the context that these tensors are on a device."""
    device = PretendedDevice(*tensors, float64=float64)
    with _Operations(device), device:
        yield device
