"""Memory for kernels that allocate in a call, where no array framework lends any.

apache-tvm-ffi asks an allocator of its environment (tvm/ffi/extra/c_env_api.h): torch installs one with its
tensors; without torch a kernel that allocates fails. This one takes CUDA memory in the order of the stream
the call is on, so it is never waited for, and plain memory on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from kernel_depot.kernels.memory import CPU, CUDA, Device, DlTensor, Memory, cuda_runtime

_VERSION: Final = (1, 2)
"""Of DLPack, whose major version readers compare."""

_lock = threading.Lock()
_live: dict[int, tuple[Any, ...]] = {}
"""What each tensor that was handed out lives in, by the address of its head. Changed without a lock: a
deleter may run at any moment, also inside of one."""

_kept: list[Any] = []
"""Callbacks that C code holds for the life of the process."""


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensorVersioned."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("context", ctypes.c_void_p),
    ("deleter", _Deleter),
    ("flags", ctypes.c_uint64),
    ("tensor", DlTensor),
]
_SetError = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_Allocate = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(DlTensor),
    ctypes.POINTER(ctypes.POINTER(_Managed)),
    ctypes.c_void_p,
    _SetError,
)


def live() -> int:
    """Return how many tensors are handed out."""
    return len(_live)


def ensure_allocator() -> None:
    """Install the allocator for all threads, unless one is there: torch's, another's, or this."""
    library = _library()
    with _lock:
        if library.TVMFFIEnvGetDLPackManagedTensorAllocator():
            return
        allocate = _Allocate(_allocate)
        if library.TVMFFIEnvSetDLPackManagedTensorAllocator(allocate, 1, None) == 0:
            _kept.append(allocate)


@functools.cache
def _library() -> Any:
    """Return the libtvm_ffi that apache-tvm-ffi has loaded; the same path is the same copy."""
    from tvm_ffi import libinfo

    library = ctypes.CDLL(libinfo.find_libtvm_ffi())
    library.TVMFFIEnvGetDLPackManagedTensorAllocator.restype = ctypes.c_void_p
    library.TVMFFIEnvSetDLPackManagedTensorAllocator.argtypes = [_Allocate, ctypes.c_int, ctypes.c_void_p]
    library.TVMFFIEnvGetStream.restype = ctypes.c_void_p
    library.TVMFFIEnvGetStream.argtypes = [ctypes.c_int32, ctypes.c_int32]
    return library


def _allocate(wanted: Any, out: Any, context: int | None, set_error: Callable[..., None]) -> int:
    """Called by C: only shape, dtype and device of `wanted` count. Return 0, or -1 with an error set."""
    try:
        out[0] = ctypes.pointer(_hand_out(wanted[0]))
    except Exception as error:
        # Nothing may pass from here into C, whatever it is.
        set_error(context, b"RuntimeError", str(error).encode())
        return -1
    return 0


def _hand_out(wanted: DlTensor) -> _Managed:
    rank = wanted.ndim
    shape = list((ctypes.c_int64 * rank).from_address(wanted.shape)) if rank else []
    device = Device(wanted.device.type, wanted.device.id)
    count = 1
    strides = [0] * rank
    for axis in range(rank - 1, -1, -1):
        strides[axis] = count
        count *= shape[axis]
    size = max(count * ((wanted.dtype.bits * wanted.dtype.lanes + 7) // 8), 1)
    address, give_back = _memory(device, size)
    numbers = (ctypes.c_int64 * (2 * rank))(*shape, *strides)
    start = ctypes.addressof(numbers)
    managed = _Managed()
    managed.major, managed.minor = _VERSION
    managed.deleter = _DELETER
    managed.tensor = DlTensor(address, wanted.device, rank, wanted.dtype, start, start + 8 * rank, 0)
    _live[ctypes.addressof(managed)] = (managed, numbers, give_back)
    return managed


def _memory(device: Device, size: int) -> tuple[int, Callable[[], object]]:
    """Return memory's address, and what gives it back."""
    if device.type == CPU:
        memory = Memory(size, device)
        return memory.address, functools.partial(id, memory)
    if device.type != CUDA:
        raise ValueError(f"there is no memory of {device}")
    cuda = cuda_runtime()
    stream = _library().TVMFFIEnvGetStream(device.type, device.id) or 0
    with cuda.on_device(device.id):
        address = cuda.malloc_async(size, stream=stream)

    def give_back() -> None:
        with cuda.on_device(device.id):
            cuda.free_async(address, stream=stream)

    return address, give_back


def _delete(managed: Any) -> None:
    kept = _live.pop(ctypes.addressof(managed[0]), None)
    if kept is not None:
        kept[2]()


_DELETER: Final = _Deleter(_delete)
