"""Single prefill: the queries of one request against its keys.

Argument lists: flashinfer csrc/single_prefill_jit_binding.cu and single_prefill_sm90_jit_binding.cu, 0.6.3 to
0.7.4.
"""

from __future__ import annotations

from typing import Any, Final

from kernel_depot.kernels.arguments import NO_SCALES, Extras, Scales, single_prefill_tail
from kernel_depot.kernels.attention import (
    Attention,
    Backend,
    Layout,
    MaskMode,
    PosEncoding,
    choose_backend,
)
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.operands import (
    read_alibi,
    read_queries,
    read_ragged,
    read_scales,
    read_scratch,
    read_vector,
    require_device,
)
from kernel_depot.kernels.runtime import Runtime, default_runtime, device_sm
from kernel_depot.kernels.signatures import Sent, kinds
from kernel_depot.kernels.streams import current_stream, stream_handle
from kernel_depot.kernels.tensors import Tensor, read_tensor
from kernel_depot.kernels.uri import single_prefill_uri
from kernel_depot.kernels.workspaces import scratch

_T, _M, _I = Sent.TENSOR, Sent.MAYBE, Sent.INT
_HEAD: Final = (_T, _T, _T, _T, _T, _M, _I, _I, _I)


def single_prefill(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    *,
    mask: MaskMode = MaskMode.NONE,
    layout: Layout = Layout.NHD,
    pos_encoding: PosEncoding = PosEncoding.NONE,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sm_scale: float | None = None,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    f16_qk_reduction: bool = False,
    custom_mask: Any | None = None,
    alibi_slopes: Any | None = None,
    scales: Scales = NO_SCALES,
    lse: Any | None = None,
    workspace: Any | None = None,
    backend: Backend = Backend.FA2,
    stream: object = None,
    runtime: Runtime | None = None,
) -> None:
    """Attend into `out` [qo_len, num_qo_heads, head_dim_vo]; `lse` float32 [qo_len, num_qo_heads], base 2.

    `q` [qo_len, num_qo_heads, head_dim_qk]; `k`, `v` [kv_len, num_kv_heads, dim] (NHD) or [num_kv_heads,
    kv_len, dim] (HND). `custom_mask` is qo_len x kv_len bits, lowest first (plans.pack_mask). `workspace` is
    scratch of the device, uint8 of at least 32 MiB; without one, memory kept for this device and stream is
    used. The default
    backend is FlashAttention 2, the only one that upstream compiles ahead for single requests.
    Raise InvalidArgument, ModuleMissing, NoCodeForGpu, SignatureMismatch, KernelCallFailed.
    """
    runtime = runtime or default_runtime()
    query, keys, values, output = (
        read_tensor(name, value) for name, value in (("q", q), ("k", k), ("v", v), ("out", out))
    )
    attention = read_attention(
        query,
        keys,
        values,
        output,
        mask=mask,
        layout=layout,
        pos_encoding=pos_encoding,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        f16_qk_reduction=f16_qk_reduction,
    )
    rows = query.shape[0]
    tensors = read_queries(q, out, lse, attention, rows=rows, why="qo_len")
    tensors += read_ragged(k, v, attention, rows=None, why="kv_len")
    kv_len = keys.shape[0 if layout is Layout.NHD else 1]
    if mask is MaskMode.CAUSAL and rows > kv_len:
        raise InvalidArgument("q", expected=f"at most {kv_len} rows, the keys (causal)", found=rows)
    tensors += _read_extras(attention, custom_mask, alibi_slopes, bits=rows * kv_len)
    device = query.device
    tensors += read_scratch(workspace)
    chosen = choose_backend(attention, backend, sm=device_sm(device))
    if chosen is Backend.FA3 and layout is not Layout.NHD:
        raise InvalidArgument("layout", expected="NHD with fa3; fa2 takes both", found=layout.name)
    tensors += read_scales(attention, chosen, scales)
    require_device(tensors, device)
    extras = Extras(custom_mask=custom_mask, alibi_slopes=alibi_slopes)
    tail = single_prefill_tail(attention, chosen, runtime.release, extras=extras, scales=scales)
    module = runtime.module(single_prefill_uri(attention, chosen), device=device)
    plain = single_prefill_tail(attention, chosen, runtime.release, extras=Extras(), scales=NO_SCALES)
    function = module.function("run", _HEAD + kinds(plain))
    handle = current_stream(device) if stream is None else stream_handle(stream)
    room = workspace if workspace is not None else scratch(device, stream=handle)
    function.on(
        device,
        handle,
        (q, k, v, room, out, lse, int(mask), int(layout), window_left, *tail),
    )


def read_attention(
    query: Tensor, keys: Tensor, values: Tensor, output: Tensor, *, layout: Layout, **options: Any
) -> Attention:
    """Return the attention that tensors of these shapes mean. Raise InvalidArgument."""
    for tensor in (query, keys, values, output):
        if len(tensor.shape) != 3:
            raise InvalidArgument(tensor.name, expected="3 dimensions", found=list(tensor.shape))
    return Attention(
        num_qo_heads=query.shape[1],
        num_kv_heads=keys.shape[1 if layout is Layout.NHD else 0],
        head_dim_qk=query.shape[2],
        head_dim_vo=values.shape[2],
        dtype_q=query.dtype,
        dtype_kv=keys.dtype,
        dtype_o=output.dtype,
        layout=layout,
        **options,
    )


def _read_extras(attention: Attention, custom_mask: Any, alibi_slopes: Any, *, bits: int) -> list[Tensor]:
    if attention.mask is MaskMode.MULTI_ITEM:
        raise InvalidArgument(
            "mask", expected="NONE, CAUSAL or CUSTOM for a single request", found=attention.mask.name
        )
    tensors: list[Tensor] = []
    if (custom_mask is not None) != (attention.mask is MaskMode.CUSTOM):
        wanted = (
            "a uint8 tensor" if attention.mask is MaskMode.CUSTOM else f"nothing with {attention.mask.name}"
        )
        raise InvalidArgument("custom_mask", expected=wanted, found=type(custom_mask).__name__)
    if custom_mask is not None:
        why = "bytes of qo_len x kv_len bits"
        tensors.append(read_vector("custom_mask", custom_mask, "u8", length=(bits + 7) // 8, why=why))
    return tensors + read_alibi(alibi_slopes, attention)
