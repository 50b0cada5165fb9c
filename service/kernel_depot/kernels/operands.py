"""The tensors of an attention call against what was planned: shapes, dtypes, strides, devices.

What the kernels themselves do not check (flashinfer csrc/batch_prefill.cu, single_prefill.cu,
batch_decode.cu) would be read past its end or as another type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kernel_depot.kernels.arguments import Scales
from kernel_depot.kernels.attention import FP8, Attention, Backend, Layout, PosEncoding, require_finite
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import Device
from kernel_depot.kernels.plans import host_integers
from kernel_depot.kernels.tensors import (
    Tensor,
    read_optional,
    read_tensor,
    require_contiguous,
    require_dense_rows,
    require_dtype,
    require_same_device,
    require_shape,
)
from kernel_depot.kernels.workspaces import SCRATCH_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def read_queries(
    q: Any, out: Any, lse: Any | None, attention: Attention, *, rows: int, why: str
) -> list[Tensor]:
    """Return q, out and, when there is one, lse, checked. `rows` are query tokens. Raise InvalidArgument."""
    query, output = read_tensor("q", q), read_tensor("out", out)
    heads = attention.num_qo_heads
    require_dtype(query, attention.dtype_q)
    require_dtype(output, attention.dtype_o)
    require_shape(query, (rows, heads, attention.head_dim_qk), why=f"{why}, num_qo_heads, head_dim_qk")
    require_shape(output, (rows, heads, attention.head_dim_vo), why=f"{why}, num_qo_heads, head_dim_vo")
    require_dense_rows(query)
    require_contiguous(output)
    return [query, output, *read_lse(lse, (rows, heads))]


def read_lse(lse: Any | None, shape: Sequence[int]) -> list[Tensor]:
    """Return the tensor for the logarithm of the softmax's sum, checked; nothing when there is none."""
    tensor = read_optional("lse", lse)
    if tensor is None:
        return []
    require_dtype(tensor, "f32")
    require_shape(tensor, shape, why="query tokens, num_qo_heads")
    require_contiguous(tensor)
    return [tensor]


def read_ragged(k: Any, v: Any, attention: Attention, *, rows: int | None, why: str) -> list[Tensor]:
    """Return keys and values [tokens, heads, dim] (NHD) or [heads, tokens, dim] (HND), checked.

    `rows` None stands for any number of tokens, the same for both. Raise InvalidArgument.
    """
    keys, values = read_tensor("k", k), read_tensor("v", v)
    heads = attention.num_kv_heads
    for tensor, dim in ((keys, attention.head_dim_qk), (values, attention.head_dim_vo)):
        require_dtype(tensor, attention.dtype_kv)
        shape = (rows, heads, dim) if attention.layout is Layout.NHD else (heads, rows, dim)
        require_shape(tensor, shape, why=f"{attention.layout.name}: {why}, num_kv_heads, head dimension")
        require_dense_rows(tensor)
    if keys.shape[:2] != values.shape[:2]:
        raise InvalidArgument(
            "v", expected=f"as many tokens as k {list(keys.shape)}", found=list(values.shape)
        )
    return [keys, values]


def read_paged(
    k_cache: Any, v_cache: Any, attention: Attention, *, page_size: int, pages: int
) -> list[Tensor]:
    """Check a paged cache: [pages, page_size, heads, dim] (NHD) or [pages, heads, page_size, dim] (HND).

    Keys and values have the same strides where their dimensions are the same, as the kernels take it.
    `pages` is one more than the highest page number that is known, or 0. Raise InvalidArgument.
    """
    keys, values = read_tensor("k_cache", k_cache), read_tensor("v_cache", v_cache)
    heads = attention.num_kv_heads
    for tensor, dim in ((keys, attention.head_dim_qk), (values, attention.head_dim_vo)):
        require_dtype(tensor, attention.dtype_kv)
        inner = (page_size, heads) if attention.layout is Layout.NHD else (heads, page_size)
        require_shape(
            tensor, (None, *inner, dim), why=f"{attention.layout.name}: pages, {inner[0]}, {inner[1]}, {dim}"
        )
        require_dense_rows(tensor)
        if tensor.shape[0] < pages:
            raise InvalidArgument(
                tensor.name, expected=f"at least {pages} pages, as kv_indices name", found=tensor.shape[0]
            )
    if keys.strides != values.strides:
        raise InvalidArgument(
            "v_cache", expected=f"the strides of k_cache {keys.strides}", found=values.strides
        )
    return [keys, values]


def read_vector(name: str, value: Any, *dtypes: str, length: int | None, why: str) -> Tensor:
    """Return a contiguous one-dimensional tensor, checked. Raise InvalidArgument."""
    tensor = read_tensor(name, value)
    require_dtype(tensor, *dtypes)
    require_shape(tensor, (length,), why=why)
    require_contiguous(tensor)
    return tensor


def read_alibi(value: Any | None, attention: Attention) -> list[Tensor]:
    """Return the ALiBi slopes, checked; nothing where the position encoding is another.

    Raise InvalidArgument when they are missing or too many.
    """
    alibi = attention.pos_encoding is PosEncoding.ALIBI
    if (value is not None) != alibi:
        wanted = "a float32 tensor [num_qo_heads]" if alibi else f"nothing with {attention.pos_encoding.name}"
        raise InvalidArgument("alibi_slopes", expected=wanted, found=type(value).__name__)
    if value is None:
        return []
    return [read_vector("alibi_slopes", value, "f32", length=attention.num_qo_heads, why="num_qo_heads")]


def read_page_numbers(values: object, *, count: int) -> NDArray[np.int32]:
    """Return the first `count` page numbers, host integers. Raise InvalidArgument for fewer, or below 0."""
    numbers = host_integers("kv_indices", values)
    if numbers.size < count or (numbers.size and int(numbers.min()) < 0):
        raise InvalidArgument(
            "kv_indices",
            expected=f"{count} page numbers of at least 0",
            found=f"{numbers.size}, the lowest {int(numbers.min()) if numbers.size else 'none'}",
        )
    return numbers[:count]


def read_scratch(value: Any | None) -> list[Tensor]:
    """Return the caller's scratch of a single request, checked; nothing when there is none.

    Kernels are not told its size, and use up to what FlashInfer gives them. Raise InvalidArgument.
    """
    if value is None:
        return []
    tensor = read_vector("workspace", value, "u8", length=None, why="bytes")
    if tensor.shape[0] < SCRATCH_BYTES:
        raise InvalidArgument(
            "workspace", expected=f"at least {SCRATCH_BYTES} bytes", found=f"{tensor.shape[0]} bytes"
        )
    return [tensor]


def read_scales(attention: Attention, backend: Backend, scales: Scales) -> list[Tensor]:
    """Check the factors of FP8 tensors; return those that are tensors, float32 with one number a head.

    FlashAttention 3 takes one for the values, and with FP8 queries also for these and for the keys. What a
    kernel does not take is refused. Raise InvalidArgument.
    """
    taken = () if backend is Backend.FA2 else ("v",) if attention.dtype_q not in FP8 else ("q", "k", "v")
    tensors = []
    for name in ("q", "k", "v"):
        value = getattr(scales, name)
        if value is None:
            continue
        if name not in taken:
            raise InvalidArgument(
                f"scales.{name}",
                expected=f"None with {backend} and {attention.dtype_q} queries",
                found=value,
                remedy="multiply sm_scale by the factors of queries and keys, the output by that of values",
            )
        if isinstance(value, int | float):
            require_finite(f"scales.{name}", value)
            continue
        heads = attention.num_qo_heads if name == "q" else attention.num_kv_heads
        tensors.append(read_vector(f"scales.{name}", value, "f32", length=heads, why="one a head"))
    return tensors


def require_device(tensors: Sequence[Tensor], device: Device) -> None:
    """Raise InvalidArgument unless all tensors are on the device."""
    found = require_same_device(tensors)
    if found != device:
        raise InvalidArgument(tensors[0].name, expected=f"{device}, where it was planned", found=str(found))
