"""Gated delta rule prefill on Hopper, of the module `gdn_prefill_sm90`.

Argument lists: flashinfer csrc/gdn_prefill_launcher.cu, 0.6.3 to 0.6.13; the module is gone from 0.6.14 on.
"""

from __future__ import annotations

from typing import Any, Final

from kernel_depot.kernels.attention import require_finite
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import Device, Memory, cuda_runtime
from kernel_depot.kernels.operands import read_vector
from kernel_depot.kernels.runtime import Runtime, default_runtime, device_sm
from kernel_depot.kernels.signatures import Sent, kinds
from kernel_depot.kernels.streams import current_stream, stream_handle
from kernel_depot.kernels.tensors import (
    Tensor,
    read_optional,
    read_tensor,
    require_contiguous,
    require_dtype,
    require_filled,
    require_rank,
    require_same_device,
    require_same_dtype,
    require_shape,
)
from kernel_depot.kernels.uri import GDN_PREFILL

WORKSPACE_BYTES_PER_SM: Final = 128
"""Bytes for each streaming multiprocessor (flashinfer/gdn_prefill.py)."""

_T, _M, _F = Sent.TENSOR, Sent.MAYBE, Sent.FLOAT
_SENDS: Final = (_T, _T, _T, _T, _T, _T, _M, _M, _M, _F, _T)
_workspaces: dict[tuple[Device, int], Memory] = {}


def gdn_prefill(
    out: Any,
    out_state: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    *,
    state: Any | None = None,
    alpha: Any | None = None,
    beta: Any | None = None,
    scale: float = 0.0,
    workspace: Any | None = None,
    stream: object = None,
    runtime: Runtime | None = None,
) -> None:
    """Run the gated delta rule over packed sequences, from `state` or zero, into `out` and `out_state`.

    `q` [tokens, q_heads, dim], `k` [tokens, k_heads, dim], `v` [tokens, v_heads, dim], f16 or bf16,
    contiguous; with H = max(q_heads, v_heads): `out` [tokens, H, dim], `state` and `out_state` float32
    [sequences, H, dim, dim] (values before keys), `alpha` and `beta` float32 [tokens, H], 1 where None;
    `cu_seqlens` int64 [sequences + 1]; `scale` 0.0 is 1/sqrt(dim); `workspace` uint8, 128 bytes for each
    multiprocessor.
    Heads: q_heads a multiple of k_heads = v_heads, or v_heads a multiple of q_heads = k_heads.
    Raise InvalidArgument, ModuleMissing, NoCodeForGpu, SignatureMismatch, KernelCallFailed.
    """
    runtime = runtime or default_runtime()
    require_finite("scale", scale)
    if runtime.release >= (0, 6, 14):
        raise InvalidArgument(
            "runtime",
            expected="modules of flashinfer-python before 0.6.14, which compiles gdn prefill ahead",
            found=".".join(map(str, runtime.release)),
        )
    query, keys, values, output = (
        read_tensor(name, value) for name, value in (("q", q), ("k", k), ("v", v), ("out", out))
    )
    heads = _read_heads(query, keys, values, output)
    tokens, dim = query.shape[0], query.shape[2]
    lengths = read_vector("cu_seqlens", cu_seqlens, "i64", length=None, why="sequences + 1")
    sequences = lengths.shape[0] - 1
    if sequences < 1:
        raise InvalidArgument(
            "cu_seqlens", expected="at least two numbers: one sequence", found=lengths.shape[0]
        )
    states = [read_tensor("out_state", out_state), read_optional("state", state)]
    gates = [read_optional("alpha", alpha), read_optional("beta", beta)]
    for shape, tensors, why in (
        ((sequences, heads, dim, dim), states, "sequences, heads, dim, dim"),
        ((tokens, heads), gates, "tokens, heads"),
    ):
        for tensor in tensors:
            if tensor is not None:
                require_dtype(tensor, "f32")
                require_shape(tensor, shape, why=why)
                require_contiguous(tensor)
    room = None if workspace is None else read_vector("workspace", workspace, "u8", length=None, why="bytes")
    device = require_same_device([query, keys, values, output, lengths, *states, *gates, room])
    handle = current_stream(device) if stream is None else stream_handle(stream)
    need = _workspace_bytes(device)
    if room is not None and room.shape[0] < need:
        raise InvalidArgument("workspace", expected=f"at least {need} bytes", found=room.shape[0])
    extra: tuple[Any, ...] = (None, None, 0) if runtime.release >= (0, 6, 10) else ()
    function = runtime.module(GDN_PREFILL, device=device).function("gdn_prefill", _SENDS + kinds(extra))
    given = workspace if workspace is not None else _workspace(device, handle, need)
    arguments = (out, out_state, q, k, v, cu_seqlens, state, alpha, beta, float(scale), given, *extra)
    function.on(device, handle, arguments)


def _read_heads(query: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> int:
    """Return the number of heads of output and state. Raise InvalidArgument."""
    for tensor in (query, keys, values, output):
        require_rank(tensor, 3)
        require_filled(tensor)
        require_contiguous(tensor)
    require_dtype(query, "f16", "bf16")
    require_same_dtype(query, keys, values, output)
    tokens, q_heads, dim = query.shape
    k_heads, v_heads = keys.shape[1], values.shape[1]
    if q_heads >= v_heads and (k_heads != v_heads or q_heads % k_heads):
        raise InvalidArgument(
            "k", expected=f"{v_heads} heads, those of v, which divide {q_heads} of q", found=k_heads
        )
    if v_heads > q_heads and (k_heads != q_heads or v_heads % q_heads):
        raise InvalidArgument(
            "k", expected=f"{q_heads} heads, those of q, which divide {v_heads} of v", found=k_heads
        )
    heads = max(q_heads, v_heads)
    require_shape(keys, (tokens, k_heads, dim), why="tokens, k_heads, dim of q")
    require_shape(values, (tokens, v_heads, dim), why="tokens, v_heads, dim of q")
    require_shape(output, (tokens, heads, dim), why="tokens, the larger of q_heads and v_heads, dim")
    return heads


def _workspace_bytes(device: Device) -> int:
    if device_sm(device) is None:
        return WORKSPACE_BYTES_PER_SM
    return WORKSPACE_BYTES_PER_SM * cuda_runtime().multiprocessors(device.id)


def _workspace(device: Device, stream: int, size: int) -> Any:
    memory = _workspaces.get((device, stream))
    if memory is None:
        memory = _workspaces.setdefault((device, stream), Memory(size, device))
    return memory.tensor("u8", (size,))
