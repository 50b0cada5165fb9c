"""What a call must know of a tensor, whosever it is: anything that speaks DLPack.

No array framework is imported; torch's tensors are read by torch's own attributes when they arrive.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import Device

_CODES: Final = {
    (0, 8): "i8",
    (0, 16): "i16",
    (0, 32): "i32",
    (0, 64): "i64",
    (1, 8): "u8",
    (1, 16): "u16",
    (1, 32): "u32",
    (1, 64): "u64",
    (2, 16): "f16",
    (2, 32): "f32",
    (2, 64): "f64",
    (4, 16): "bf16",
    (6, 8): "bool",
    (10, 8): "e4m3",
    (12, 8): "e5m2",
}
"""DLPack's (type code, bits) and the names that FlashInfer's URIs use (flashinfer/jit/utils.py)."""

_TORCH_NAMES: Final = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "bool",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's facts, and the object that is sent. `strides` count elements."""

    name: str
    value: Any
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: Device

    @property
    def is_contiguous(self) -> bool:
        """Tell whether it is row-major without gaps."""
        wanted = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != wanted:
                return False
            wanted *= length
        return True

    @property
    def form(self) -> str:
        """Dtype and shape for messages."""
        return f"{self.dtype} {list(self.shape)}"


def read_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor's facts. Raise InvalidArgument for what does not speak DLPack, or an unknown dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _read_torch(name, value)
    return _read_any(name, value)


def read_optional(name: str, value: Any | None) -> Tensor | None:
    """Return a tensor's facts, or None for None. Raise InvalidArgument."""
    return None if value is None else read_tensor(name, value)


def is_on(value: Any, device: Device) -> bool:
    """Tell whether a value is a tensor that lies on a device."""
    ask = getattr(value, "__dlpack_device__", None)
    return ask is not None and tuple(int(part) for part in ask()) == (device.type, device.id)


def owned(value: Any) -> Any:
    """Return a tensor as apache-tvm-ffi's own, which takes no framework's stream with it."""
    import tvm_ffi

    return value if isinstance(value, tvm_ffi.Tensor) else tvm_ffi.from_dlpack(_plain(value))


def fingerprint(*values: Any) -> tuple[Any, ...] | None:
    """Return all that checks depend on, hashable and cheap, when every tensor is torch's; else None."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    kind = torch.Tensor
    parts: list[Any] = []
    for value in values:
        if type(value) is not kind:
            return None
        parts += (value.shape, value.dtype, value.stride(), value.get_device())
    return tuple(parts)


def alike(*values: Any) -> Callable[..., bool] | None:
    """Return a test for torch tensors of just these dtypes, shapes, strides and devices; else None.

    It may turn down tensors that are alike, never the reverse: whoever asks looks closely after a no.
    Torch's guards, where it has them, look at all tensors in one call (torch/csrc/dynamo/guards.cpp).
    """
    known = fingerprint(*values)
    if known is None:
        return None
    torch = sys.modules["torch"]
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make = getattr(guards, "TensorGuards", None)
    if make is not None and len({id(value) for value in values}) == len(values):
        sizes = [list(value.shape) for value in values]
        strides = [list(value.stride()) for value in values]
        try:
            test: Callable[..., bool] = make(
                *values, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
            ).check
            if test(*values):
                return test
        except (TypeError, AttributeError, RuntimeError):
            pass  # a torch whose guards are made otherwise
    return lambda *others: fingerprint(*others) == known


def require_dtype(tensor: Tensor, *dtypes: str) -> None:
    """Raise InvalidArgument unless the tensor has one of the dtypes."""
    if tensor.dtype not in dtypes:
        raise InvalidArgument(tensor.name, expected=" or ".join(dtypes), found=tensor.dtype)


def require_rank(tensor: Tensor, *ranks: int) -> None:
    """Raise InvalidArgument unless the tensor has one of the numbers of dimensions."""
    if len(tensor.shape) not in ranks:
        wanted = " or ".join(str(rank) for rank in ranks)
        raise InvalidArgument(tensor.name, expected=f"{wanted} dimensions", found=list(tensor.shape))


def require_filled(tensor: Tensor) -> None:
    """Raise InvalidArgument when a dimension is zero."""
    if 0 in tensor.shape:
        raise InvalidArgument(tensor.name, expected="no empty dimension", found=list(tensor.shape))


def require_shape(tensor: Tensor, shape: Sequence[int | None], *, why: str) -> None:
    """Raise InvalidArgument unless the shape is this one; None stands for any length."""
    fits = len(shape) == len(tensor.shape) and all(
        wanted is None or wanted == length for wanted, length in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise InvalidArgument(tensor.name, expected=f"[{wanted}] ({why})", found=list(tensor.shape))


def require_contiguous(tensor: Tensor) -> None:
    """Raise InvalidArgument unless the tensor is row-major without gaps."""
    if not tensor.is_contiguous:
        raise InvalidArgument(
            tensor.name,
            expected="a contiguous tensor",
            found=f"strides {list(tensor.strides)} for shape {list(tensor.shape)}",
        )


def require_dense_rows(tensor: Tensor) -> None:
    """Raise InvalidArgument unless the last dimension's elements lie side by side."""
    if tensor.shape[-1] != 1 and tensor.strides[-1] != 1:
        raise InvalidArgument(
            tensor.name, expected="a last dimension of stride 1", found=list(tensor.strides)
        )


def require_aligned(tensor: Tensor, alignment: int) -> None:
    """Raise InvalidArgument unless the data starts at a multiple of `alignment` bytes."""
    address = int(tensor.value.data_ptr())
    if address % alignment:
        raise InvalidArgument(
            tensor.name, expected=f"an address divisible by {alignment}", found=f"{address:#x}"
        )


def require_same_device(tensors: Collection[Tensor | None]) -> Device:
    """Return the device of all. Raise InvalidArgument for the first that is elsewhere."""
    present = [tensor for tensor in tensors if tensor is not None]
    first = present[0]
    for tensor in present[1:]:
        if tensor.device != first.device:
            raise InvalidArgument(
                tensor.name, expected=f"{first.device}, where {first.name} is", found=str(tensor.device)
            )
    return first.device


def require_same_dtype(first: Tensor, *others: Tensor) -> None:
    """Raise InvalidArgument for the first that has another dtype."""
    for tensor in others:
        if tensor.dtype != first.dtype:
            raise InvalidArgument(
                tensor.name, expected=f"{first.dtype}, the dtype of {first.name}", found=tensor.dtype
            )


def _read_torch(name: str, value: Any) -> Tensor:
    device = value.device
    kind = {"cuda": 2, "cpu": 1}.get(device.type)
    if kind is None:
        raise InvalidArgument(name, expected="a tensor on a CUDA device", found=str(device))
    return Tensor(
        name,
        value,
        _torch_dtype(value.dtype, name),
        tuple(value.shape),
        tuple(value.stride()),
        Device(kind, device.index or 0),
    )


@functools.cache
def _torch_dtype(dtype: Any, name: str) -> str:
    word = str(dtype).removeprefix("torch.")
    if word not in _TORCH_NAMES:
        raise InvalidArgument(name, expected="a dtype that kernels know", found=word)
    return _TORCH_NAMES[word]


def _read_any(name: str, value: Any) -> Tensor:
    try:
        tensor = owned(value)
    except (TypeError, AttributeError, ValueError, BufferError, RuntimeError) as error:
        raise InvalidArgument(
            name,
            expected="a tensor that speaks DLPack (torch, cupy, jax, ...)",
            found=f"{type(value).__name__}: {error}",
        ) from error
    try:
        dtype = tensor.dtype
    except ValueError as error:  # apache-tvm-ffi has no name for it either, as for complex numbers
        raise InvalidArgument(name, expected="a dtype that kernels know", found=str(error)) from error
    code = (int(dtype.type_code), int(dtype.bits))
    if code not in _CODES or dtype.lanes != 1:
        raise InvalidArgument(name, expected="a dtype that kernels know", found=str(dtype))
    device = Device(int(tensor.device.dlpack_device_type()), int(tensor.device.index))
    shape = tuple(int(length) for length in tensor.shape)
    strides = tuple(int(stride) for stride in tensor.strides)
    return Tensor(name, tensor, _CODES[code], shape, strides, device)


def _plain(value: Any) -> Any:
    """Torch lends no tensor that needs a gradient; a kernel's call is outside its graph anyway."""
    return value.detach() if getattr(value, "requires_grad", False) else value
