"""Appending keys and values to a paged cache, of the module `page`.

Argument lists: flashinfer csrc/flashinfer_page_binding.cu, the same from 0.6.3 to 0.7.4. Index tensors lie on
the device and are not read here: what they say is not checked, their dtype and length are.
"""

from __future__ import annotations

from typing import Any, Final

from kernel_depot.kernels.attention import Layout
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import Device
from kernel_depot.kernels.operands import read_vector
from kernel_depot.kernels.runtime import Runtime, default_runtime
from kernel_depot.kernels.signatures import Sent
from kernel_depot.kernels.streams import current_stream
from kernel_depot.kernels.tensors import (
    Tensor,
    read_tensor,
    require_dense_rows,
    require_dtype,
    require_rank,
    require_same_device,
    require_same_dtype,
    require_shape,
)
from kernel_depot.kernels.uri import PAGE

HEAD_DIM_CKV: Final = 512
HEAD_DIM_KPE: Final = 64
"""The only dimensions of the latent cache that the kernel is compiled for (csrc/page.cu)."""

_T, _I = Sent.TENSOR, Sent.INT
_DTYPES: Final = ("f16", "bf16", "e4m3", "e5m2")


def append_paged_kv_cache(
    key: Any,
    value: Any,
    batch_indices: Any,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    *,
    layout: Layout = Layout.NHD,
    stream: object = None,
    runtime: Runtime | None = None,
) -> None:
    """Write each token's key and value into the page and slot that its request and position name.

    `key`, `value` [tokens, heads, dim]; `batch_indices`, `positions` int32 [tokens]; the cache [pages,
    page_size, heads, dim] (NHD) or [pages, heads, page_size, dim] (HND), keys and values with the same
    strides; `kv_indices` int32, `kv_indptr` int32 [batch + 1], `kv_last_page_len` int32 [batch].
    Raise InvalidArgument, ModuleMissing, NoCodeForGpu, SignatureMismatch, KernelCallFailed.
    """
    runtime = runtime or default_runtime()
    keys, values = read_tensor("key", key), read_tensor("value", value)
    require_rank(keys, 3)
    require_shape(values, keys.shape, why="the shape of key")
    tokens, heads, dim = keys.shape
    caches = [read_tensor("k_cache", k_cache), read_tensor("v_cache", v_cache)]
    inner = (None, heads) if layout is Layout.NHD else (heads, None)
    for cache in caches:
        require_shape(cache, (None, *inner, dim), why=f"{layout.name}: pages, and heads and dim of key")
    if caches[0].shape != caches[1].shape or caches[0].strides != caches[1].strides:
        raise InvalidArgument(
            "v_cache",
            expected=f"shape {caches[0].shape} and strides {caches[0].strides} of k_cache",
            found=f"{caches[1].shape} and {caches[1].strides}",
        )
    tensors = [keys, values, *caches]
    device = _check(tensors, tokens, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    function = runtime.module(PAGE, device=device).function(
        "append_paged_kv_cache", (_T, _T, _T, _T, _T, _T, _T, _T, _T, _I)
    )
    function.on(
        device,
        current_stream(device) if stream is None else stream,
        (
            key,
            value,
            batch_indices,
            positions,
            k_cache,
            v_cache,
            kv_indices,
            kv_indptr,
            kv_last_page_len,
            int(layout),
        ),
    )


def append_paged_mla_kv_cache(
    ckv: Any,
    kpe: Any,
    batch_indices: Any,
    positions: Any,
    ckv_cache: Any,
    kpe_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    *,
    stream: object = None,
    runtime: Runtime | None = None,
) -> None:
    """Write each token's compressed key [512] and rotary part [64] into its page and slot.

    `ckv` [tokens, 512], `kpe` [tokens, 64], `ckv_cache` [pages, page_size, 512], `kpe_cache` [pages,
    page_size, 64]; indices as `append_paged_kv_cache`. Raise as it does.
    """
    runtime = runtime or default_runtime()
    parts = [read_tensor("ckv", ckv), read_tensor("kpe", kpe)]
    require_rank(parts[0], 2)
    tokens = parts[0].shape[0]
    caches = [read_tensor("ckv_cache", ckv_cache), read_tensor("kpe_cache", kpe_cache)]
    require_rank(caches[0], 3)
    pages, page_size = caches[0].shape[:2]
    for part, cache, dim in zip(parts, caches, (HEAD_DIM_CKV, HEAD_DIM_KPE), strict=True):
        require_shape(part, (tokens, dim), why="tokens, head dimension")
        require_shape(cache, (pages, page_size, dim), why="pages, page_size, head dimension")
    tensors = [*parts, *caches]
    device = _check(tensors, tokens, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    function = runtime.module(PAGE, device=device).function("append_paged_mla_kv_cache", (_T,) * 9)
    function.on(
        device,
        current_stream(device) if stream is None else stream,
        (ckv, kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len),
    )


def _check(
    tensors: list[Tensor],
    tokens: int,
    batch_indices: Any,
    positions: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
) -> Device:
    require_dtype(tensors[0], *_DTYPES)
    require_same_dtype(*tensors)
    for tensor in tensors:
        require_dense_rows(tensor)
    last = read_vector("kv_last_page_len", kv_last_page_len, "i32", length=None, why="batch")
    batch_size = last.shape[0]
    if batch_size < 1:
        raise InvalidArgument("kv_last_page_len", expected="at least one request", found=0)
    indices = [
        read_vector("batch_indices", batch_indices, "i32", length=tokens, why="tokens"),
        read_vector("positions", positions, "i32", length=tokens, why="tokens"),
        read_vector("kv_indices", kv_indices, "i32", length=None, why="page numbers"),
        read_vector("kv_indptr", kv_indptr, "i32", length=batch_size + 1, why="batch + 1"),
        last,
    ]
    return require_same_device([*tensors, *indices])
