"""Single decode: one query token against its request's keys.

Argument list: flashinfer csrc/single_decode_jit_binding.cu, the same from 0.6.3 to 0.7.4.
"""

from __future__ import annotations

from typing import Any, Final

from kernel_depot.kernels.attention import Attention, Layout, PosEncoding
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.operands import read_alibi, read_lse, read_ragged, read_scratch, require_device
from kernel_depot.kernels.runtime import Runtime, default_runtime
from kernel_depot.kernels.signatures import Sent
from kernel_depot.kernels.streams import current_stream, stream_handle
from kernel_depot.kernels.tensors import read_tensor, require_contiguous, require_rank, require_shape
from kernel_depot.kernels.uri import Release, single_decode_uri
from kernel_depot.kernels.workspaces import scratch

_T, _M, _I, _F = Sent.TENSOR, Sent.MAYBE, Sent.INT, Sent.FLOAT
_SENDS: Final = (_T, _T, _T, _T, _T, _M, _I, _I, _M, _F, _F, _F, _F)


def single_decode(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    *,
    layout: Layout = Layout.NHD,
    pos_encoding: PosEncoding = PosEncoding.NONE,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sm_scale: float | None = None,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    alibi_slopes: Any | None = None,
    lse: Any | None = None,
    workspace: Any | None = None,
    stream: object = None,
    runtime: Runtime | None = None,
) -> None:
    """Attend into `out` [num_qo_heads, head_dim]; `lse` float32 [num_qo_heads], base 2.

    `q` [num_qo_heads, head_dim]; `k`, `v` contiguous [kv_len, num_kv_heads, head_dim] (NHD) or [num_kv_heads,
    kv_len, head_dim] (HND). `workspace` is scratch of the device, uint8 of
    at least 32 MiB; without one, memory kept for this device and stream is used.
    Raise InvalidArgument, ModuleMissing, NoCodeForGpu, SignatureMismatch, KernelCallFailed.
    """
    runtime = runtime or default_runtime()
    query, keys, values, output = (
        read_tensor(name, value) for name, value in (("q", q), ("k", k), ("v", v), ("out", out))
    )
    require_rank(query, 2)
    require_rank(keys, 3)
    require_shape(output, query.shape, why="the shape of q")
    attention = Attention(
        num_qo_heads=query.shape[0],
        num_kv_heads=keys.shape[1 if layout is Layout.NHD else 0],
        head_dim_qk=query.shape[1],
        head_dim_vo=query.shape[1],
        dtype_q=query.dtype,
        dtype_kv=keys.dtype,
        dtype_o=output.dtype,
        layout=layout,
        pos_encoding=pos_encoding,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
    )
    require_group_size(attention, runtime.release, instead="single_prefill")
    read_ragged(k, v, attention, rows=None, why="kv_len")
    for tensor in (query, keys, values, output):
        require_contiguous(tensor)
    tensors = [query, keys, values, output, *read_lse(lse, (attention.num_qo_heads,))]
    tensors += read_alibi(alibi_slopes, attention)
    tensors += read_scratch(workspace)
    device = query.device
    require_device(tensors, device)
    function = runtime.module(single_decode_uri(attention), device=device).function("run", _SENDS)
    handle = current_stream(device) if stream is None else stream_handle(stream)
    room = workspace if workspace is not None else scratch(device, stream=handle)
    function.on(
        device,
        handle,
        (
            q,
            k,
            v,
            room,
            out,
            lse,
            int(layout),
            window_left,
            alibi_slopes,
            attention.logits_soft_cap,
            attention.scale,
            attention.rope_rcp_scale,
            attention.rope_rcp_theta,
        ),
    )


def group_sizes(release: Release) -> tuple[int, ...]:
    """Return the query heads to a key head that decode kernels are compiled for (flashinfer utils.cuh)."""
    sizes: tuple[int, ...] = (1, 2, 3, 4, 8)
    if release >= (0, 6, 18):
        sizes += (6,)
    if release >= (0, 7, 4):
        sizes += (16,)
    return sizes


def require_group_size(attention: Attention, release: Release, *, instead: str) -> None:
    """Refuse head counts that decode kernels are not compiled for. Raise InvalidArgument."""
    sizes = group_sizes(release)
    if attention.group_size not in sizes:
        raise InvalidArgument(
            "num_qo_heads",
            expected=f"{', '.join(str(size) for size in sorted(sizes))} times num_kv_heads",
            found=f"{attention.num_qo_heads} = {attention.group_size} x {attention.num_kv_heads}",
            remedy=f"use {instead}, which computes the same for any group size",
        )
