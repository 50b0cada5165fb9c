"""Batch MLA: DeepSeek's latent attention on a paged cache of compressed keys and rotary parts.

Argument lists: flashinfer csrc/batch_mla_binding.cu and batch_mla_sm90_binding.cu, 0.6.3 to 0.7.4. From 0.7
on the planner leaves the copy of its plan to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kernel_depot.kernels.arguments import mla_run_tail
from kernel_depot.kernels.attention import (
    HALVES,
    Backend,
    MaskMode,
    require_positive,
    require_scale,
)
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import Device
from kernel_depot.kernels.operands import read_lse, read_page_numbers, require_device
from kernel_depot.kernels.plans import host_integers, read_indptr, require_causal, require_length
from kernel_depot.kernels.runtime import CALL_ERRORS, Runtime, default_runtime, device_sm
from kernel_depot.kernels.signatures import Sent, kinds
from kernel_depot.kernels.streams import current_stream, stream_handle
from kernel_depot.kernels.tensors import (
    alike,
    read_tensor,
    require_contiguous,
    require_dense_rows,
    require_dtype,
    require_shape,
)
from kernel_depot.kernels.uri import batch_mla_uri
from kernel_depot.kernels.workspaces import Workspace, plan_void

HEAD_DIM_CKV: Final = 512
HEAD_DIM_KPE: Final = 64
"""The head dimensions that upstream compiles (flashinfer/aot.py)."""

_T, _M, _I, _B, _A = Sent.TENSOR, Sent.MAYBE, Sent.INT, Sent.BOOL, Sent.INTS
_PLAN: Final = (_T, _T, _T, _T, _T, _T, _I, _I, _B)
_RUN_HEAD: Final = (_T, _T, _A, _T, _T, _T, _T, _T, _T, _M, _I, _I, _I)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a run needs of its plan; `tail` comes after a plain run's output."""

    generation: int
    rows: int
    page_size: int
    page_count: int
    head: tuple[Any, ...]
    indices: Any
    tail: tuple[Any, ...]


class BatchMlaPlan:
    """One batch MLA on one device: `plan` for the lengths, then `run` for each layer.

    `sm_scale` has no default: DeepSeek scales by 1/sqrt(qk_nope_head_dim + rope_head_dim) of the model before
    its weights were absorbed (1/sqrt(192)), which the kernel's head dimensions do not tell. `mask` is NONE or
    CAUSAL. Its workspace holds one plan at a time; not for two threads at once. Raises ModuleMissing,
    NoCodeForGpu, InvalidArgument and SignatureMismatch when made.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        dtype: str,
        sm_scale: float,
        device: Device,
        mask: MaskMode = MaskMode.NONE,
        backend: Backend = Backend.AUTO,
        workspace: Workspace | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        runtime = runtime or default_runtime()
        require_positive("num_heads", num_heads)
        require_scale("sm_scale", sm_scale)
        if dtype not in HALVES:
            raise InvalidArgument("dtype", expected="f16 or bf16", found=dtype)
        if mask not in (MaskMode.NONE, MaskMode.CAUSAL):
            raise InvalidArgument("mask", expected="NONE or CAUSAL", found=mask.name)
        sm = device_sm(device)
        hopper = sm is not None and (sm.major, sm.minor) == (9, 0)
        if backend is Backend.FA3 and not hopper:
            raise InvalidArgument(
                "backend", expected="fa2 on any GPU but sm90", found=str(sm or "no known GPU")
            )
        self.backend = Backend.FA3 if hopper and backend is not Backend.FA2 else Backend.FA2
        self.num_heads = num_heads
        self.dtype = dtype
        self.sm_scale = float(sm_scale)
        self.mask = mask
        self.device = device
        self.workspace = workspace if workspace is not None else Workspace(device)
        if self.workspace.device != device:
            raise InvalidArgument("workspace", expected=str(device), found=str(self.workspace.device))
        self.uri = batch_mla_uri(
            dtype_q=dtype,
            dtype_kv=dtype,
            dtype_o=dtype,
            head_dim_ckv=HEAD_DIM_CKV,
            head_dim_kpe=HEAD_DIM_KPE,
            backend=self.backend,
            release=runtime.release,
        )
        self._release = runtime.release
        self.module = runtime.module(self.uri, device=device)
        self._plan = self.module.function("plan", _PLAN)
        tail = kinds(mla_run_tail(self._release, sm_scale=1.0, lse_base_e=False))
        self._run = self.module.function("run", _RUN_HEAD + tail)
        self._planned: _Planned | None = None
        self._alike: Callable[..., bool] | None = None

    def plan(
        self,
        qo_indptr: object,
        kv_indptr: object,
        kv_indices: object,
        kv_lengths: object,
        *,
        page_size: int,
        stream: object = None,
    ) -> None:
        """Plan for these lengths; copies go on `stream`, by default the caller's current one.

        Host integers: `qo_indptr` [batch + 1] counts query tokens, `kv_indptr` [batch + 1] pages,
        `kv_indices` page numbers, `kv_lengths` [batch] key tokens. Nothing is waited for.
        Raise InvalidArgument, KernelCallFailed, CudaCallFailed.
        """
        require_positive("page_size", page_size)
        qo = read_indptr("qo_indptr", qo_indptr)
        batch_size = qo.size - 1
        kv = read_indptr("kv_indptr", kv_indptr)
        require_length("kv_indptr", kv, batch_size + 1, why="one more than requests in qo_indptr")
        lengths = host_integers("kv_lengths", kv_lengths)
        require_length("kv_lengths", lengths, batch_size, why="one a request")
        pages = kv[1:] - kv[:-1]
        wrong = ((lengths < 0) | (lengths > pages.astype("int64") * page_size)).nonzero()[0]
        if wrong.size:
            at = int(wrong[0])
            raise InvalidArgument(
                "kv_lengths",
                expected=f"0 to {int(pages[at]) * page_size}, what {int(pages[at])} pages hold",
                found=f"{int(lengths[at])}, at {at}",
            )
        if self.mask is MaskMode.CAUSAL:
            require_causal(qo, lengths)
        numbers = read_page_numbers(kv_indices, count=int(kv[-1]))
        handle = current_stream(self.device) if stream is None else stream_handle(stream)
        self._planned = self._alike = None
        with self.workspace.planning(stream=handle) as staging:
            placed = staging.index_arrays([numbers])
            answer = self._plan.on(
                self.device,
                handle,
                (
                    self.workspace.float_buffer,
                    self.workspace.int_buffer,
                    staging.pinned_buffer,
                    qo,
                    kv,
                    lengths,
                    self.num_heads,
                    HEAD_DIM_CKV,
                    self.mask is MaskMode.CAUSAL,
                ),
            )
            if self._release >= (0, 7):
                answer, staged = answer
                staging.copy_plan(int(staged))
        self._planned = _Planned(
            self.workspace.generation,
            int(qo[-1]),
            page_size,
            int(numbers.max()) + 1 if numbers.size else 0,
            (self.workspace.float_buffer, self.workspace.int_buffer, answer),
            placed[0],
            self._run_tail(None, page_size, False),
        )

    def run(
        self,
        q_nope: Any,
        q_pe: Any,
        ckv_cache: Any,
        kpe_cache: Any,
        out: Any,
        *,
        lse: Any | None = None,
        lse_base_e: bool = False,
        stream: object = None,
    ) -> None:
        """Attend into `out` [rows, num_heads, 512], on `stream`, by default the current one.

        `q_nope` [rows, num_heads, 512], `q_pe` [rows, num_heads, 64], `ckv_cache` [pages, page_size, 512],
        `kpe_cache` [pages, page_size, 64], `lse` float32 [rows, num_heads], base 2 or e.
        Raise InvalidArgument, KernelCallFailed.
        """
        planned = self._planned
        if planned is None or planned.generation != self.workspace.generation:
            raise plan_void(planned)
        plain = lse is None and stream is None and not lse_base_e
        sent = (q_nope, q_pe, ckv_cache, kpe_cache)
        if plain and self._alike is not None and self._alike(*sent, out):
            try:
                self._run.raw(*planned.head, *sent, planned.indices, out, *planned.tail)
            except CALL_ERRORS as error:
                raise self._run.failure(error) from error
            return
        self._check(q_nope, q_pe, ckv_cache, kpe_cache, out, lse, planned)
        self._alike = alike(*sent, out) if lse is None else self._alike
        self._run.on(
            self.device,
            current_stream(self.device) if stream is None else stream,
            (*planned.head, *sent, planned.indices, out, *self._run_tail(lse, planned.page_size, lse_base_e)),
        )

    def _run_tail(self, lse: Any, page_size: int, lse_base_e: bool) -> tuple[Any, ...]:
        """Return what a run sends after its output."""
        return (
            lse,
            int(self.mask),
            self.num_heads,
            page_size,
            *mla_run_tail(self._release, sm_scale=self.sm_scale, lse_base_e=lse_base_e),
        )

    def _check(
        self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, out: Any, lse: Any, planned: _Planned
    ) -> None:
        rows, heads = planned.rows, self.num_heads
        tensors = []
        for name, value, dim in (("q_nope", q_nope, HEAD_DIM_CKV), ("q_pe", q_pe, HEAD_DIM_KPE)):
            tensor = read_tensor(name, value)
            require_shape(tensor, (rows, heads, dim), why="qo_indptr's end, num_heads, head dimension")
            require_dense_rows(tensor)
            tensors.append(tensor)
        for name, value, dim in (
            ("ckv_cache", ckv_cache, HEAD_DIM_CKV),
            ("kpe_cache", kpe_cache, HEAD_DIM_KPE),
        ):
            tensor = read_tensor(name, value)
            require_shape(tensor, (None, planned.page_size, dim), why="pages, page_size, head dimension")
            require_dense_rows(tensor)
            if tensor.shape[0] < planned.page_count:
                raise InvalidArgument(
                    name, expected=f"at least {planned.page_count} pages", found=tensor.shape[0]
                )
            tensors.append(tensor)
        output = read_tensor("out", out)
        require_shape(output, (rows, heads, HEAD_DIM_CKV), why="qo_indptr's end, num_heads, 512")
        require_contiguous(output)
        tensors.append(output)
        for tensor in tensors:
            require_dtype(tensor, self.dtype)
        require_device([*tensors, *read_lse(lse, (rows, heads))], self.device)
