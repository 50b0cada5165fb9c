"""Batch prefill: many requests of different lengths in one launch, keys ragged or in a paged cache.

Argument lists: flashinfer csrc/batch_prefill_jit_binding.cu and batch_prefill_sm90_jit_binding.cu, 0.6.3 to
0.7.4. Index arrays are planned on the host; the kernel reads copies that `plan` brings to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel_depot.kernels.arguments import (
    NO_SCALES,
    Extras,
    Scales,
    batch_prefill_plan_tail,
    batch_prefill_tail,
)
from kernel_depot.kernels.attention import (
    Attention,
    Backend,
    Layout,
    MaskMode,
    PosEncoding,
    choose_backend,
    require_integer,
)
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import Device
from kernel_depot.kernels.operands import (
    read_page_numbers,
    read_paged,
    read_queries,
    read_ragged,
    read_scales,
    read_vector,
    require_device,
)
from kernel_depot.kernels.plans import (
    Pages,
    mask_indptr,
    read_indptr,
    read_pages,
    require_causal,
    require_length,
)
from kernel_depot.kernels.runtime import CALL_ERRORS, Function, Runtime, default_runtime, device_sm
from kernel_depot.kernels.signatures import Sent, kinds
from kernel_depot.kernels.streams import current_stream, stream_handle
from kernel_depot.kernels.tensors import Tensor, alike, is_on
from kernel_depot.kernels.uri import batch_prefill_uri
from kernel_depot.kernels.workspaces import Workspace, plan_void

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_T, _M, _I, _B, _F, _A = Sent.TENSOR, Sent.MAYBE, Sent.INT, Sent.BOOL, Sent.FLOAT, Sent.INTS
_PLAN_HEAD = (_T,) * 6 + (_I,) * 5
_RUN_HEAD = (_T, _T, _A, _T, _T, _T)
_RUN_MIDDLE = (_T, _M, _I, _I, _I, _B)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a run needs of its plan. `page_size` None means ragged keys; index arrays are on the device.

    `head`, `indices` and `tails` (without and with PDL) are what a plain run sends around its tensors.
    """

    generation: int
    rows: int
    kv_rows: int
    batch_size: int
    page_size: int | None
    page_count: int
    mask_bytes: int
    head: tuple[Any, ...]
    indices: tuple[Any, ...]
    tails: tuple[tuple[Any, ...], tuple[Any, ...]]


class BatchPrefillPlan:
    """One batch prefill on one device: `plan` for the lengths, then `run` for each layer.

    Its workspace holds one plan at a time; not for two threads at once. The module is looked up when made:
    raises ModuleMissing, NoCodeForGpu, InvalidArgument, and SignatureMismatch.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        paged: bool,
        device: Device,
        backend: Backend = Backend.AUTO,
        workspace: Workspace | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        runtime = runtime or default_runtime()
        self.attention = attention
        self.device = device
        if not paged and attention.mask is MaskMode.MULTI_ITEM:
            # flashinfer's attention/prefill.cuh and hopper/sparse_mainloop.cuh: ragged kernels read no items.
            raise InvalidArgument("mask", expected="MULTI_ITEM with a paged cache alone", found="ragged keys")
        if not paged and attention.layout is not Layout.NHD:
            if backend is Backend.FA3:
                raise InvalidArgument(
                    "layout", expected="NHD for ragged keys with fa3", found=attention.layout.name
                )
            backend = Backend.FA2  # the Hopper kernel takes ragged keys as NHD alone
        self.backend = choose_backend(attention, backend, sm=device_sm(device))
        self.workspace = workspace if workspace is not None else Workspace(device)
        if self.workspace.device != device:
            raise InvalidArgument("workspace", expected=str(device), found=str(self.workspace.device))
        self.uri = batch_prefill_uri(attention, self.backend, runtime.release)
        self._release = runtime.release
        self._paged = paged
        module = runtime.module(self.uri, device=device)
        self.module = module
        plan_tail = kinds(self._plan_tail(False, -1, False, 0))
        run_tail = kinds(
            batch_prefill_tail(attention, self.backend, self._release, extras=Extras(), scales=NO_SCALES)
        )
        self._plan: Function = module.function("plan", _PLAN_HEAD + plan_tail)
        indices = (_T,) * (4 if paged else 2)
        self._run: Function = module.function(
            "paged_run" if paged else "ragged_run", _RUN_HEAD + indices + _RUN_MIDDLE + run_tail
        )
        self._planned: _Planned | None = None
        self._alike: Callable[..., bool] | None = None

    @classmethod
    def ragged(cls, attention: Attention, *, device: Device, **options: Any) -> BatchPrefillPlan:
        """Return a plan for keys and values [tokens, heads, dim] (NHD) or [heads, tokens, dim] (HND).

        Requests lie one after another. HND is FlashAttention 2's alone.
        """
        return cls(attention, paged=False, device=device, **options)

    @classmethod
    def paged(cls, attention: Attention, *, device: Device, **options: Any) -> BatchPrefillPlan:
        """Return a plan for keys and values in a paged cache."""
        return cls(attention, paged=True, device=device, **options)

    def plan(
        self,
        qo_indptr: object,
        kv_indptr: object,
        *,
        kv_indices: object = None,
        last_page_len: object = None,
        page_size: int = 1,
        cuda_graph: bool = False,
        fixed_split_size: int = -1,
        disable_split_kv: bool = False,
        num_colocated_ctas: int = 0,
        stream: object = None,
    ) -> None:
        """Plan for these lengths; copies go on `stream`, by default the caller's current one.

        Host integers: `qo_indptr` [batch + 1] counts query tokens, `kv_indptr` [batch + 1] key tokens, or
        pages of a paged cache, which also needs `kv_indices` (page numbers: host integers, or an int32 tensor
        on the device, which must stay), `last_page_len` [batch] and `page_size`. Nothing is waited for.
        Raise InvalidArgument, KernelCallFailed, CudaCallFailed.
        """
        import numpy as np

        require_integer("fixed_split_size", fixed_split_size, at_least=-1)
        require_integer("num_colocated_ctas", num_colocated_ctas, at_least=0)
        qo = read_indptr("qo_indptr", qo_indptr)
        batch_size = qo.size - 1
        pages, kv, numbers, on_device = self._read_keys(
            kv_indptr, kv_indices, last_page_len, page_size, batch_size=batch_size
        )
        lengths = pages.lengths if pages is not None else np.diff(kv)
        if self.attention.mask is MaskMode.CAUSAL:
            require_causal(qo, lengths)
        masks = mask_indptr(np.diff(qo), lengths) if self.attention.mask is MaskMode.CUSTOM else None
        handle = current_stream(self.device) if stream is None else stream_handle(stream)
        arrays = [qo, kv]
        if pages is not None:
            arrays.append(pages.last_page_len)
            if numbers is not None:
                arrays.append(numbers)
        self._planned = self._alike = None
        with self.workspace.planning(stream=handle) as staging:
            placed = staging.index_arrays(arrays)
            info = self._plan.on(
                self.device,
                handle,
                (
                    self.workspace.float_buffer,
                    self.workspace.int_buffer,
                    staging.pinned_buffer,
                    qo,
                    kv,
                    lengths.astype(np.int32),
                    int(qo[-1]),
                    batch_size,
                    self.attention.num_qo_heads,
                    self.attention.num_kv_heads,
                    page_size if pages is not None else 1,
                    *self._plan_tail(cuda_graph, fixed_split_size, disable_split_kv, num_colocated_ctas),
                ),
            )
        indices = placed[:2]
        if pages is not None:
            indices += [on_device if numbers is None else placed[3], placed[2]]
        self._planned = _Planned(
            self.workspace.generation,
            int(qo[-1]),
            int(kv[-1]),
            batch_size,
            None if pages is None else pages.page_size,
            0 if numbers is None or not numbers.size else int(numbers.max()) + 1,
            0 if masks is None else int(masks[-1]),
            (self.workspace.float_buffer, self.workspace.int_buffer, info),
            tuple(indices),
            (
                self._run_tail(None, False, Extras(), NO_SCALES),
                self._run_tail(None, True, Extras(), NO_SCALES),
            ),
        )

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        *,
        lse: Any | None = None,
        extras: Extras | None = None,
        scales: Scales = NO_SCALES,
        enable_pdl: bool = False,
        stream: object = None,
    ) -> None:
        """Compute into `out`, on `stream`, by default the caller's current one: the plan's, or one after it.

        `q` [rows, num_qo_heads, head_dim_qk], `out` [rows, num_qo_heads, head_dim_vo], `lse` float32
        [rows, num_qo_heads], base 2. `k` and `v` ragged [kv_rows, num_kv_heads, dim] (NHD) or
        [num_kv_heads, kv_rows, dim] (HND), or the paged cache
        [pages, page_size, num_kv_heads, dim] (NHD) or [pages, num_kv_heads, page_size, dim] (HND).
        Raise InvalidArgument, KernelCallFailed.
        """
        planned = self._planned
        if planned is None or planned.generation != self.workspace.generation:
            raise plan_void(planned)
        plain = lse is None and extras is None and scales is NO_SCALES
        if plain and stream is None and self._alike is not None and self._alike(q, k, v, out):
            try:
                self._run.raw(*planned.head, q, k, v, *planned.indices, out, *planned.tails[enable_pdl])
            except CALL_ERRORS as error:
                raise self._run.failure(error) from error
            return
        given = extras if extras is not None else Extras()
        self._check(q, k, v, out, lse, given, scales, planned)
        self._alike = alike(q, k, v, out) if plain else self._alike
        tail = self._run_tail(lse, enable_pdl, given, scales)
        self._run.on(
            self.device,
            current_stream(self.device) if stream is None else stream,
            (*planned.head, q, k, v, *planned.indices, out, *tail),
        )

    def _plain_tail(self, enable_pdl: bool) -> tuple[Any, ...]:
        return self._run_tail(None, enable_pdl, Extras(), NO_SCALES)

    def _run_tail(self, lse: Any, enable_pdl: bool, extras: Extras, scales: Scales) -> tuple[Any, ...]:
        """Return what a run sends after its output."""
        attention = self.attention
        return (
            lse,
            int(attention.mask),
            int(attention.layout),
            attention.window_left,
            enable_pdl,
            *batch_prefill_tail(attention, self.backend, self._release, extras=extras, scales=scales),
        )

    def _plan_tail(
        self, cuda_graph: bool, fixed_split_size: int, disable_split_kv: bool, num_colocated_ctas: int
    ) -> tuple[Any, ...]:
        return batch_prefill_plan_tail(
            self.attention,
            self.backend,
            self._release,
            cuda_graph=cuda_graph,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            num_colocated_ctas=num_colocated_ctas,
        )

    def _read_keys(
        self, kv_indptr: object, kv_indices: object, last_page_len: object, page_size: int, *, batch_size: int
    ) -> tuple[Pages | None, NDArray[np.int32], NDArray[np.int32] | None, Any]:
        """Return the pages, the indptr, and the page numbers: on the host, or as a tensor on the device."""
        if not self._paged:
            for name, value in (("kv_indices", kv_indices), ("last_page_len", last_page_len)):
                if value is not None:
                    raise InvalidArgument(
                        name, expected="nothing for ragged keys", found=type(value).__name__
                    )
            kv = read_indptr("kv_indptr", kv_indptr)
            require_length("kv_indptr", kv, batch_size + 1, why="one more than requests in qo_indptr")
            return None, kv, None, None
        pages = read_pages(kv_indptr, last_page_len, page_size, batch_size=batch_size)
        if self.device.is_cuda and is_on(kv_indices, self.device):
            tensor = read_vector("kv_indices", kv_indices, "i32", length=None, why="page numbers")
            if tensor.shape[0] < pages.count:
                raise InvalidArgument(
                    "kv_indices", expected=f"at least {pages.count} page numbers", found=tensor.shape[0]
                )
            return pages, pages.indptr, None, kv_indices
        return pages, pages.indptr, read_page_numbers(kv_indices, count=pages.count), None

    def _check(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, extras: Extras, scales: Scales, planned: _Planned
    ) -> None:
        attention = self.attention
        tensors = read_queries(q, out, lse, attention, rows=planned.rows, why="qo_indptr's end")
        if planned.page_size is None:
            tensors += read_ragged(k, v, attention, rows=planned.kv_rows, why="kv_indptr's end")
        else:
            size = planned.page_size
            tensors += read_paged(k, v, attention, page_size=size, pages=planned.page_count)
        tensors += check_extras(
            attention, extras, batch_size=planned.batch_size, mask_bytes=planned.mask_bytes
        )
        tensors += read_scales(attention, self.backend, scales)
        require_device(tensors, self.device)


def check_extras(attention: Attention, extras: Extras, *, batch_size: int, mask_bytes: int) -> list[Tensor]:
    """Check the optional tensors that the mask and the position encoding need. Raise InvalidArgument.

    `mask_bytes` is what the packed masks of all requests take (plans.mask_indptr).
    """
    require_integer("token_pos_in_items_len", extras.token_pos_in_items_len, at_least=0)
    items = batch_size * extras.token_pos_in_items_len
    tensors: list[Tensor] = []
    wanted: dict[str, tuple[bool, str, int | None, str]] = {
        "custom_mask": (attention.mask is MaskMode.CUSTOM, "u8", mask_bytes, "bytes of all requests"),
        "mask_indptr": (attention.mask is MaskMode.CUSTOM, "i32", batch_size + 1, "batch + 1"),
        "alibi_slopes": (
            attention.pos_encoding is PosEncoding.ALIBI,
            "f32",
            attention.num_qo_heads,
            "num_qo_heads",
        ),
        "prefix_len": (attention.mask is MaskMode.MULTI_ITEM, "u32", batch_size, "batch"),
        "token_pos_in_items": (
            attention.mask is MaskMode.MULTI_ITEM,
            "u16",
            items,
            "batch x token_pos_in_items_len",
        ),
        "max_item_len": (attention.mask is MaskMode.MULTI_ITEM, "u16", batch_size, "batch"),
    }
    for name, (needed, dtype, length, why) in wanted.items():
        value = getattr(extras, name)
        if needed and value is None:
            raise InvalidArgument(name, expected=f"a {dtype} tensor [{why}]", found=None)
        if not needed and value is not None:
            raise InvalidArgument(
                name,
                expected=f"nothing with mask {attention.mask.name} and {attention.pos_encoding.name}",
                found=type(value).__name__,
            )
        if value is not None:
            tensors.append(read_vector(name, value, dtype, length=length, why=why))
    return tensors
