"""Which stream a call goes on: the one given, else the caller's current one.

apache-tvm-ffi takes torch's current stream by itself with every torch tensor. Everything else needs its
stream context, which is thread-local and restored on every path.
"""

from __future__ import annotations

import sys
from typing import Any

from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import Device


def stream_handle(stream: object) -> int:
    """Return the cudaStream_t of a stream: a number, or torch's or cupy's stream. Raise InvalidArgument."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for attribute in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(handle)
    raise InvalidArgument(
        "stream", expected="a cudaStream_t as a number, or a stream object", found=repr(stream)
    )


def current_stream(device: Device) -> int:
    """Return the stream that the caller works on: torch's or cupy's current one, else TVM-FFI's.

    A framework is asked only when it is loaded and has used the device.
    """
    if not device.is_cuda:
        return 0
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_stream(device.id).cuda_stream)
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        return int(cupy.cuda.get_current_stream(device.id).ptr)
    import tvm_ffi

    return int(tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", device.id)))


def on_stream(device: Device, stream: int) -> Any:
    """Return a context manager that makes `stream` the one kernels of this thread go on."""
    import tvm_ffi

    return tvm_ffi.use_raw_stream(tvm_ffi.device("cuda" if device.is_cuda else "cpu", device.id), stream)
