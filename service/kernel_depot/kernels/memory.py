"""Memory that kernels need beside their tensors, as DLPack tensors: a device's, and pinned host memory.

It comes from the CUDA runtime itself (through ctypes), so that no array framework is needed. Allocations
belong to their `Memory`, and go with it. On the CPU both kinds are plain memory.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from kernel_depot.kernels.errors import KernelError

CPU: Final = 1
CUDA: Final = 2
"""Device types of DLPack (dlpack.h)."""

_DTYPES: Final = {
    "u8": (1, 8),
    "u16": (1, 16),
    "u32": (1, 32),
    "i32": (0, 32),
    "i64": (0, 64),
    "f16": (2, 16),
    "bf16": (4, 16),
    "f32": (2, 32),
    "e4m3": (10, 8),
    "e5m2": (12, 8),
}
"""(type code, bits) of DLPack."""

ALIGNMENT: Final = 256
"""Bytes; what cudaMalloc gives too."""

_CAPSULE: Final = b"dltensor"
_HOST_TO_DEVICE: Final = 1
_NOT_READY: Final = 600
_NO_TIMING: Final = 2
_DEFAULT_KIND: Final = 4
_MAJOR: Final = 75
_MINOR: Final = 76
_MULTIPROCESSORS: Final = 16
"""Numbers of cudaError, cudaMemcpyKind and cudaDeviceAttr (driver_types.h)."""


class CudaCallFailed(KernelError):
    """The CUDA runtime refused memory, a copy or an event."""

    slug = "cuda-call-failed"
    title = "The CUDA runtime failed"
    status = 500


class CudaRuntime:
    """The functions of libcudart that are needed here. Methods raise CudaCallFailed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def malloc(self, size: int) -> int:
        """Allocate `size` bytes on the current device."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value or 0

    def free(self, address: int) -> None:
        """Give device memory back."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def malloc_async(self, size: int, *, stream: int) -> int:
        """Order an allocation of `size` bytes on a stream of the current device."""
        address = ctypes.c_void_p()
        self._call("cudaMallocAsync", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_void_p(stream))
        return address.value or 0

    def free_async(self, address: int, *, stream: int) -> None:
        """Give memory back once a stream gets there."""
        self._call("cudaFreeAsync", ctypes.c_void_p(address), ctypes.c_void_p(stream))

    def malloc_host(self, size: int) -> int:
        """Allocate `size` bytes of pinned host memory, usable from every device."""
        address = ctypes.c_void_p()
        self._call("cudaHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(1))
        return address.value or 0

    def free_host(self, address: int) -> None:
        """Give pinned memory back."""
        self._call("cudaFreeHost", ctypes.c_void_p(address))

    def copy_to_device(self, target: int, source: int, size: int, *, stream: int) -> None:
        """Order a copy from pinned memory on a stream; return at once."""
        self._call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(size),
            ctypes.c_int(_HOST_TO_DEVICE),
            ctypes.c_void_p(stream),
        )

    def capability(self, device_id: int) -> tuple[int, int]:
        """Return a device's compute capability: major, minor."""
        numbers = []
        for attribute in (_MAJOR, _MINOR):
            number = ctypes.c_int()
            self._call(
                "cudaDeviceGetAttribute",
                ctypes.byref(number),
                ctypes.c_int(attribute),
                ctypes.c_int(device_id),
            )
            numbers.append(number.value)
        return numbers[0], numbers[1]

    def device_count(self) -> int:
        """Return how many devices this process sees."""
        count = ctypes.c_int()
        self._call("cudaGetDeviceCount", ctypes.byref(count))
        return count.value

    def multiprocessors(self, device_id: int) -> int:
        """Return a device's number of streaming multiprocessors."""
        number = ctypes.c_int()
        self._call(
            "cudaDeviceGetAttribute",
            ctypes.byref(number),
            ctypes.c_int(_MULTIPROCESSORS),
            ctypes.c_int(device_id),
        )
        return number.value

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy between host and device and wait for it; the runtime finds out which is where."""
        self._call(
            "cudaMemcpy",
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(size),
            ctypes.c_int(_DEFAULT_KIND),
        )

    def synchronize(self) -> None:
        """Wait for everything on the current device. Raises what any kernel before it did wrong."""
        self._call("cudaDeviceSynchronize")

    def event(self) -> int:
        """Create an event without timing."""
        event = ctypes.c_void_p()
        self._call("cudaEventCreateWithFlags", ctypes.byref(event), ctypes.c_uint(_NO_TIMING))
        return event.value or 0

    def record(self, event: int, *, stream: int) -> None:
        """Mark the place in a stream that the event waits for."""
        self._call("cudaEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def reached(self, event: int) -> bool:
        """Tell whether what was before the event's mark is done."""
        status = int(self._library.cudaEventQuery(ctypes.c_void_p(event)))
        if status == _NOT_READY:
            return False
        self._check("cudaEventQuery", status)
        return True

    def wait(self, event: int) -> None:
        """Block this thread until the event's mark is reached."""
        self._call("cudaEventSynchronize", ctypes.c_void_p(event))

    def stream_waits(self, stream: int, event: int) -> None:
        """Order a stream behind an event's mark; return at once."""
        self._call("cudaStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        self._call("cudaEventDestroy", ctypes.c_void_p(event))

    @contextmanager
    def on_device(self, device_id: int) -> Iterator[None]:
        """Make a device this thread's current one, and restore the former."""
        former = ctypes.c_int()
        self._call("cudaGetDevice", ctypes.byref(former))
        if former.value == device_id:
            yield
            return
        self._call("cudaSetDevice", ctypes.c_int(device_id))
        try:
            yield
        finally:
            self._call("cudaSetDevice", former)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, int(getattr(self._library, name)(*arguments)))

    def _check(self, name: str, status: int) -> None:
        if status != 0:
            text = self._library.cudaGetErrorString(ctypes.c_int(status))
            raise CudaCallFailed(
                f"{name} failed: {text.decode(errors='replace') if text else status}",
                expected="cudaSuccess",
                found=status,
            )


@functools.cache
def cuda_runtime() -> CudaRuntime:
    """Load libcudart, or find the copy that is loaded. Raise CudaCallFailed when there is none."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib("cudart").abs_path
        return CudaRuntime(ctypes.CDLL(path))
    except (DynamicLibNotFoundError, OSError, RuntimeError) as error:
        raise CudaCallFailed(
            "libcudart was not found",
            found=str(error),
            remedy="install the CUDA runtime (nvidia-cuda-runtime), or start where torch has loaded it",
        ) from error


@dataclass(frozen=True)
class Device:
    """A place for tensors, in DLPack's numbers."""

    type: int
    id: int = 0

    @property
    def is_cuda(self) -> bool:
        """Tell whether it is a CUDA device."""
        return self.type == CUDA

    def __str__(self) -> str:
        return {CPU: "cpu", CUDA: f"cuda:{self.id}"}.get(
            self.type, f"device type {self.type}, number {self.id}"
        )


class Memory:
    """Owned bytes: of a CUDA device, pinned on the host, or the CPU's. Tensors over it must not outlive it.

    Raise CudaCallFailed when the device has none left.
    """

    def __init__(self, size: int, device: Device, *, pinned: bool = False) -> None:
        self.size = size
        self.device = Device(CPU) if pinned else device
        if device.is_cuda:
            cuda = cuda_runtime()
            with cuda.on_device(device.id):
                self.address = cuda.malloc_host(size) if pinned else cuda.malloc(size)
            weakref.finalize(self, _release, cuda, self.address, device.id, pinned).atexit = False
        else:
            import numpy as np

            self._room = np.zeros(size + ALIGNMENT, dtype=np.uint8)
            self.address = self._room.ctypes.data + -self._room.ctypes.data % ALIGNMENT

    def tensor(self, dtype: str, shape: Sequence[int], *, offset: int = 0) -> Any:
        """Return a row-major tensor of these bytes, from `offset` on, as apache-tvm-ffi passes it."""
        import tvm_ffi

        return tvm_ffi.from_dlpack(_View(self.address + offset, self.device, dtype, shape))

    def write(self, data: bytes | memoryview, *, offset: int = 0) -> None:
        """Copy bytes into it; for a device's memory, wait until they are there."""
        if not self.device.is_cuda:
            ctypes.memmove(self.address + offset, bytes(data), len(data))
            return
        source = (ctypes.c_char * len(data)).from_buffer_copy(data)
        with cuda_runtime().on_device(self.device.id):
            cuda_runtime().copy(self.address + offset, ctypes.addressof(source), len(data))

    def read(self, size: int, *, offset: int = 0) -> bytes:
        """Copy bytes out of it; from a device's memory, after what the default stream does before."""
        if not self.device.is_cuda:
            return ctypes.string_at(self.address + offset, size)
        target = ctypes.create_string_buffer(size)
        with cuda_runtime().on_device(self.device.id):
            cuda_runtime().copy(ctypes.addressof(target), self.address + offset, size)
        return target.raw


class Event:
    """A place in a stream of a CUDA device that can be asked for or waited for. Raise CudaCallFailed."""

    def __init__(self, device: Device) -> None:
        self._cuda = cuda_runtime()
        self._device = device
        with self._cuda.on_device(device.id):
            self._event = self._cuda.event()
        weakref.finalize(self, self._cuda.destroy_event, self._event).atexit = False

    def record(self, stream: int) -> None:
        """Mark this place in a stream of the event's device."""
        with self._cuda.on_device(self._device.id):
            self._cuda.record(self._event, stream=stream)

    def hold(self, stream: int) -> None:
        """Order a stream behind the mark; return at once."""
        with self._cuda.on_device(self._device.id):
            self._cuda.stream_waits(stream, self._event)

    def reached(self) -> bool:
        """Tell whether what was before the mark is done; so it is before the first mark."""
        return self._cuda.reached(self._event)

    def wait(self) -> None:
        """Block this thread until what was before the mark is done."""
        self._cuda.wait(self._event)


def _release(cuda: CudaRuntime, address: int, device_id: int, pinned: bool) -> None:
    with cuda.on_device(device_id):
        if pinned:
            cuda.free_host(address)
        else:
            cuda.free(address)


class DlDevice(ctypes.Structure):
    """DLPack's DLDevice."""

    _fields_: ClassVar = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DlDtype(ctypes.Structure):
    """DLPack's DLDataType."""

    _fields_: ClassVar = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DlTensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device", DlDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DlDtype),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DlManagedTensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("tensor", DlTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    return libc


@dataclass(frozen=True)
class _View:
    """A DLPack producer. It hands over one block of libc's, freed by libc: no Python is called back."""

    address: int
    device: Device
    dtype: str
    shape: Sequence[int]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device.type, self.device.id

    def __dlpack__(self, **_: object) -> object:
        rank = len(self.shape)
        strides = [1] * rank
        for axis in range(rank - 2, -1, -1):
            strides[axis] = strides[axis + 1] * self.shape[axis + 1]
        head = ctypes.sizeof(_DlManagedTensor)
        numbers = ctypes.c_int64 * (2 * rank)
        block = _libc().malloc(head + ctypes.sizeof(numbers))
        numbers.from_address(block + head)[:] = [*self.shape, *strides]
        managed = _DlManagedTensor.from_address(block)
        code, bits = _DTYPES[self.dtype]
        managed.tensor = DlTensor(
            self.address,
            DlDevice(self.device.type, self.device.id),
            rank,
            DlDtype(code, bits, 1),
            block + head,
            block + head + 8 * rank,
            0,
        )
        managed.context = None
        managed.deleter = ctypes.cast(_libc().free, ctypes.c_void_p)
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype = ctypes.py_object
        capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        fresh: object = capsule(block, _CAPSULE, None)
        return fresh
