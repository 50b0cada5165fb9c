"""Batch decode: one query token of each request against a paged cache.

Argument lists: flashinfer csrc/batch_decode_jit_binding.cu, the same from 0.6.3 to 0.7.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kernel_depot.kernels.attention import Attention, MaskMode
from kernel_depot.kernels.decode import require_group_size
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import CPU, Device, Memory
from kernel_depot.kernels.operands import (
    read_alibi,
    read_page_numbers,
    read_paged,
    read_queries,
    require_device,
)
from kernel_depot.kernels.plans import read_indptr, read_pages
from kernel_depot.kernels.runtime import CALL_ERRORS, Runtime, default_runtime
from kernel_depot.kernels.signatures import Sent
from kernel_depot.kernels.streams import current_stream, stream_handle
from kernel_depot.kernels.tensors import alike, require_contiguous
from kernel_depot.kernels.uri import batch_decode_uri
from kernel_depot.kernels.workspaces import Workspace, plan_void

_T, _M, _I, _B, _F, _A = Sent.TENSOR, Sent.MAYBE, Sent.INT, Sent.BOOL, Sent.FLOAT, Sent.INTS
_PLAN: Final = (_T, _T, _T, _T, _I, _I, _I, _I, _B, _I, _F, _I, _I, _T, _T)
_RUN: Final = (_T, _T, _A, _T, _T, _T, _T, _T, _T, _T, _M, _I, _I, _B, _M, _F, _F, _F, _F)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a run needs of its plan; `tails` (without and with PDL) come after a plain run's output."""

    generation: int
    batch_size: int
    page_size: int
    page_count: int
    head: tuple[Any, ...]
    indices: tuple[Any, ...]
    tails: tuple[tuple[Any, ...], tuple[Any, ...]]


class BatchDecodePlan:
    """One batch decode on one device: `plan` for the lengths, then `run` for each layer.

    Its workspace holds one plan at a time; not for two threads at once. With `cuda_graph` the plan's shape is
    fixed by the batch size, so that a captured `run` may be replayed after another `plan` of the same batch
    size. Raises ModuleMissing, NoCodeForGpu, InvalidArgument and SignatureMismatch when made.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        device: Device,
        workspace: Workspace | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        runtime = runtime or default_runtime()
        if attention.mask is not MaskMode.NONE:
            raise InvalidArgument(
                "mask", expected="NONE: a decode sees all its keys", found=attention.mask.name
            )
        if attention.head_dim_qk != attention.head_dim_vo:
            raise InvalidArgument("head_dim_vo", expected=attention.head_dim_qk, found=attention.head_dim_vo)
        require_group_size(attention, runtime.release, instead="BatchPrefillPlan.paged")
        self.attention = attention
        self.device = device
        self.workspace = workspace if workspace is not None else Workspace(device)
        if self.workspace.device != device:
            raise InvalidArgument("workspace", expected=str(device), found=str(self.workspace.device))
        self.uri = batch_decode_uri(attention)
        self.module = runtime.module(self.uri, device=device)
        self._plan = self.module.function("plan", _PLAN)
        self._run = self.module.function("run", _RUN)
        # The planner reads these two tensors' dtypes alone.
        nothing = Memory(1, Device(CPU))
        self._nothing = nothing
        self._empty_q = nothing.tensor(attention.dtype_q, (0,))
        self._empty_kv = nothing.tensor(attention.dtype_kv, (0,))
        self._planned: _Planned | None = None
        self._alike: Callable[..., bool] | None = None

    def plan(
        self,
        kv_indptr: object,
        kv_indices: object,
        last_page_len: object,
        *,
        page_size: int,
        cuda_graph: bool = False,
        stream: object = None,
    ) -> None:
        """Plan for these lengths; copies go on `stream`, by default the caller's current one.

        Host integers: `kv_indptr` [batch + 1] counts pages, `kv_indices` page numbers, `last_page_len`
        [batch] tokens on each request's last page. Nothing is waited for.
        Raise InvalidArgument, KernelCallFailed, CudaCallFailed.
        """
        batch_size = read_indptr("kv_indptr", kv_indptr).size - 1
        pages = read_pages(kv_indptr, last_page_len, page_size, batch_size=batch_size)
        numbers = read_page_numbers(kv_indices, count=pages.count)
        attention = self.attention
        handle = current_stream(self.device) if stream is None else stream_handle(stream)
        self._planned = self._alike = None
        with self.workspace.planning(stream=handle) as staging:
            # Page numbers last: a captured run finds the others in the same places after every plan.
            placed = staging.index_arrays([pages.indptr, pages.last_page_len, numbers])
            info = self._plan.on(
                self.device,
                handle,
                (
                    self.workspace.float_buffer,
                    self.workspace.int_buffer,
                    staging.pinned_buffer,
                    pages.indptr,
                    batch_size,
                    attention.num_qo_heads,
                    attention.num_kv_heads,
                    page_size,
                    cuda_graph,
                    attention.window_left,
                    attention.logits_soft_cap,
                    attention.head_dim_qk,
                    attention.head_dim_vo,
                    self._empty_q,
                    self._empty_kv,
                ),
            )
        indptr, last, indices = placed
        self._planned = _Planned(
            self.workspace.generation,
            batch_size,
            page_size,
            int(numbers.max()) + 1 if numbers.size else 0,
            (self.workspace.float_buffer, self.workspace.int_buffer, info),
            (indptr, indices, last),
            (self._run_tail(None, False, None), self._run_tail(None, True, None)),
        )

    def run(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        out: Any,
        *,
        lse: Any | None = None,
        alibi_slopes: Any | None = None,
        enable_pdl: bool = False,
        stream: object = None,
    ) -> None:
        """Attend into `out` [batch, num_qo_heads, head_dim], on `stream`, by default the current one.

        `q` as `out`; the cache [pages, page_size, num_kv_heads, head_dim] (NHD) or [pages, num_kv_heads,
        page_size, head_dim] (HND), keys and values with the same strides; `lse` float32 [batch,
        num_qo_heads], base 2. Raise InvalidArgument, KernelCallFailed.
        """
        planned = self._planned
        if planned is None or planned.generation != self.workspace.generation:
            raise plan_void(planned)
        plain = lse is None and alibi_slopes is None
        if plain and stream is None and self._alike is not None and self._alike(q, k_cache, v_cache, out):
            try:
                self._run.raw(
                    *planned.head, q, k_cache, v_cache, *planned.indices, out, *planned.tails[enable_pdl]
                )
            except CALL_ERRORS as error:
                raise self._run.failure(error) from error
            return
        self._check(q, k_cache, v_cache, out, lse, alibi_slopes, planned)
        self._alike = alike(q, k_cache, v_cache, out) if plain else self._alike
        tail = self._run_tail(lse, enable_pdl, alibi_slopes)
        self._run.on(
            self.device,
            current_stream(self.device) if stream is None else stream,
            (*planned.head, q, k_cache, v_cache, *planned.indices, out, *tail),
        )

    def _run_tail(self, lse: Any, enable_pdl: bool, alibi_slopes: Any) -> tuple[Any, ...]:
        """Return what a run sends after its output."""
        attention = self.attention
        return (
            lse,
            int(attention.layout),
            attention.window_left,
            enable_pdl,
            alibi_slopes,
            attention.logits_soft_cap,
            attention.scale,
            attention.rope_rcp_scale,
            attention.rope_rcp_theta,
        )

    def _check(
        self, q: Any, k_cache: Any, v_cache: Any, out: Any, lse: Any, alibi_slopes: Any, planned: _Planned
    ) -> None:
        attention = self.attention
        tensors = read_queries(q, out, lse, attention, rows=planned.batch_size, why="batch")
        require_contiguous(tensors[0])
        tensors += read_paged(
            k_cache, v_cache, attention, page_size=planned.page_size, pages=planned.page_count
        )
        tensors += read_alibi(alibi_slopes, attention)
        require_device(tensors, self.device)
