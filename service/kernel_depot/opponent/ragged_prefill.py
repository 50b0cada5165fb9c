"""FlashInfer's ragged prefill in bf16, called for measurement.

One workspace a device, allocated once: float 256 MiB, int 64 MiB, pinned int 64 MiB. Calls of several threads
take turns; a call on another stream than the last is ordered behind it on the device. The host waits for
nothing, unless four plans are still under way to the device; each of these takes pinned memory of its own.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kernel_depot.kernels.attention import Attention, MaskMode, require_scale
from kernel_depot.kernels.batch_prefill import BatchPrefillPlan
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import Device, Event
from kernel_depot.kernels.plans import read_indptr
from kernel_depot.kernels.runtime import Runtime
from kernel_depot.kernels.streams import current_stream, stream_handle
from kernel_depot.kernels.tensors import (
    Tensor,
    read_tensor,
    require_contiguous,
    require_dtype,
    require_rank,
    require_same_device,
    require_shape,
)
from kernel_depot.kernels.workspaces import Workspace
from kernel_depot.opponent.gates import require_artifact, require_switch

FLOAT_BYTES: Final = 256 << 20
INT_BYTES: Final = 64 << 20
_MOST_PLANS: Final = 64


def ragged_prefill_bf16_hd128(
    q: Any,
    k: Any,
    v: Any,
    qo_indptr: object,
    kv_indptr: object,
    *,
    out: Any | None = None,
    causal: bool,
    sm_scale: float | None = None,
    stream: object = None,
    cache: Path | None = None,
) -> Any:
    """Attend each request's queries to its own keys, head dimension 128; return `out`.

    `q`, `out` bf16 [rows, num_qo_heads, 128]; `k`, `v` bf16 [kv_rows, num_kv_heads, 128], contiguous.
    `qo_indptr`, `kv_indptr` [batch + 1]: host integers, which are planned with and copied to the device for
    the kernel. `out` None allocates one, of torch. `sm_scale` None is 1/sqrt(128). With `causal` a request's
    last query sees its last key. Raise OpponentAbsent, OpponentOff, SwitchInvalid, InvalidArgument,
    ModuleMissing, NoCodeForGpu, KernelCallFailed.
    """
    return _call(128, q, k, v, qo_indptr, kv_indptr, out, causal, sm_scale, stream, cache)


def ragged_prefill_bf16_hd256(
    q: Any,
    k: Any,
    v: Any,
    qo_indptr: object,
    kv_indptr: object,
    *,
    out: Any | None = None,
    causal: bool,
    sm_scale: float | None = None,
    stream: object = None,
    cache: Path | None = None,
) -> Any:
    """Attend each request's queries to its own keys, head dimension 256; as `ragged_prefill_bf16_hd128`."""
    return _call(256, q, k, v, qo_indptr, kv_indptr, out, causal, sm_scale, stream, cache)


@dataclass
class _Ground:
    """What one device keeps between calls: the workspace, its last user, and plans by what they compute."""

    workspace: Workspace
    done: Event | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    plans: OrderedDict[tuple[int, Attention], BatchPrefillPlan] = field(default_factory=OrderedDict)
    stream: int | None = None
    planned: tuple[Any, ...] | None = None

    def plan_of(self, attention: Attention, runtime: Runtime) -> BatchPrefillPlan:
        key = (id(runtime), attention)
        plan = self.plans.get(key)
        if plan is None:
            plan = BatchPrefillPlan.ragged(
                attention, device=self.workspace.device, workspace=self.workspace, runtime=runtime
            )
            self.plans[key] = plan
            if len(self.plans) > _MOST_PLANS:
                self.plans.popitem(last=False)
        self.plans.move_to_end(key)
        return plan


_grounds: dict[Device, _Ground] = {}
_lock = threading.Lock()


def opened(cache: Path | None = None) -> Runtime:
    """Pass both gates and return the opponent's modules; the gates are asked at each call.

    Raise OpponentAbsent, OpponentOff, SwitchInvalid.
    """
    runtime = require_artifact(cache)
    require_switch()
    return runtime


def _call(
    head_dim: int,
    q: Any,
    k: Any,
    v: Any,
    qo_indptr: object,
    kv_indptr: object,
    out: Any | None,
    causal: bool,
    sm_scale: float | None,
    stream: object,
    cache: Path | None,
) -> Any:
    runtime = opened(cache)
    query, keys, values = (read_tensor(name, value) for name, value in (("q", q), ("k", k), ("v", v)))
    output = out if out is not None else _empty_like(q)
    attention = _attention(query, keys, values, read_tensor("out", output), head_dim, causal, sm_scale)
    qo, kv = read_indptr("qo_indptr", qo_indptr), read_indptr("kv_indptr", kv_indptr)
    for name, indptr, rows in (("qo_indptr", qo, query.shape[0]), ("kv_indptr", kv, keys.shape[0])):
        if int(indptr[-1]) != rows:
            raise InvalidArgument(name, expected=f"{rows} at its end, the rows", found=int(indptr[-1]))
    device = query.device
    if not device.is_cuda:
        raise InvalidArgument("q", expected="a tensor on a CUDA device", found=str(device))
    handle = current_stream(device) if stream is None else stream_handle(stream)
    ground = _ground(device)
    with ground.lock:
        if ground.done is not None and ground.stream is not None and ground.stream != handle:
            ground.done.hold(handle)
        plan = ground.plan_of(attention, runtime)
        lengths = (id(runtime), attention, handle, qo.tobytes(), kv.tobytes())
        try:
            if ground.planned != lengths:
                ground.planned = None
                plan.plan(qo, kv, stream=handle)
                ground.planned = lengths
            plan.run(q, k, v, output, stream=stream)
        finally:
            # A call that failed can have sent copies before: another stream must not overtake them.
            if ground.done is not None:
                ground.done.record(handle)
            ground.stream = handle
    return output


def _attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    head_dim: int,
    causal: bool,
    sm_scale: float | None,
) -> Attention:
    for tensor in (query, keys, values, output):
        require_rank(tensor, 3)
        require_dtype(tensor, "bf16")
        require_shape(tensor, (None, None, head_dim), why=f"rows, heads, {head_dim}")
        require_contiguous(tensor)
    require_shape(output, query.shape, why="the shape of q")
    require_shape(values, keys.shape, why="the shape of k")
    require_same_device([query, keys, values, output])
    if not isinstance(causal, bool):
        raise InvalidArgument("causal", expected="True or False", found=causal)
    if sm_scale is not None:
        require_scale("sm_scale", sm_scale)
    return Attention(
        num_qo_heads=query.shape[1],
        num_kv_heads=keys.shape[1],
        head_dim_qk=head_dim,
        head_dim_vo=head_dim,
        dtype_q="bf16",
        dtype_kv="bf16",
        dtype_o="bf16",
        mask=MaskMode.CAUSAL if causal else MaskMode.NONE,
        sm_scale=float(sm_scale) if sm_scale is not None else None,
    )


def _ground(device: Device) -> _Ground:
    with _lock:
        ground = _grounds.get(device)
        if ground is None:
            workspace = Workspace(
                device,
                float_bytes=FLOAT_BYTES,
                int_bytes=INT_BYTES,
            )
            ground = _Ground(workspace, Event(device) if device.is_cuda else None)
            _grounds[device] = ground
        return ground


def _empty_like(q: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        return torch.empty_like(q)
    raise InvalidArgument("out", expected="a tensor, where q is not torch's", found=None)
