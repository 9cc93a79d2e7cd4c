"""Memory of a GPU that two processes share by handles of CUDA's driver, which do not depend on the
versions of torch in these processes. It has not run on a GPU yet.

Both ends import this file. It needs only Python's standard library until memory is used, and torch
from then on.
"""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Handle = ctypes.c_ubyte * 64
_LAZY_PEER_ACCESS = 1  # the only flag of cuIpcOpenMemHandle


class _HandleByValue(ctypes.Structure):
    _fields_ = [("reserved", Handle)]


class CudaMemory:
    """The memory of one GPU, by its number in this process. A test gives another `driver`, and
    another function that makes a tensor of bytes from an address."""

    def __init__(
        self, gpu: int, driver: Any = None, tensor_at: Callable[[int, int], Any] | None = None
    ):
        self.gpu, self.device = gpu, ctypes.c_int()
        self.driver = driver or ctypes.CDLL("libcuda.so.1")
        self.tensor_at = tensor_at or self._tensor_at
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self.device), gpu)
        # The context that torch uses, in a thread that may not have called torch yet.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self._call("cuCtxSetCurrent", context)

    def uuid(self) -> str:
        """Return the name of the GPU, which is the same in all processes."""
        name = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid", ctypes.byref(name), self.device)
        return bytes(name).hex()

    def allocate(self, size: int) -> tuple[Any, str]:
        """Return new memory of this GPU as a tensor of bytes, and its handle. It is never freed."""
        address, handle = ctypes.c_uint64(), _HandleByValue()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return self.tensor_at(address.value, size), bytes(handle.reserved).hex()

    def open(self, handle: str, size: int) -> Any:
        """Return memory of another process as a tensor of bytes. A handle is opened once."""
        address, value = ctypes.c_uint64(), _HandleByValue(Handle(*bytes.fromhex(handle)))
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), value, flags)
        return self.tensor_at(address.value, size)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self.driver, name)(*arguments):
            raise OSError(f"{name} of CUDA's driver has failed with status {status}")

    def _tensor_at(self, address: int, size: int) -> Any:
        import torch

        about = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        view = SimpleNamespace(__cuda_array_interface__=about)
        return torch.as_tensor(view, device=f"cuda:{self.gpu}")
