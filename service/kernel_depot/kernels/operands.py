"""The tensors of an attention call against what was planned: shapes, dtypes, strides, devices.

What the kernels themselves do not check (flashinfer csrc/batch_prefill.cu, single_prefill.cu,
batch_decode.cu) would be read past its end or as another type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kernel_depot.kernels.attention import Attention, Layout, PosEncoding
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


def require_device(tensors: Sequence[Tensor], device: Device) -> None:
    """Raise InvalidArgument unless all tensors are on the device."""
    found = require_same_device(tensors)
    if found != device:
        raise InvalidArgument(tensors[0].name, expected=f"{device}, where it was planned", found=str(found))
