"""Cases of single and batch prefill: masks, layouts, head groups, page sizes, and an empty request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from kernel_depot.kernels.arguments import NO_SCALES, Extras, Scales
from kernel_depot.kernels.attention import FP8, Attention, Backend, Layout, MaskMode, PosEncoding, fa3_refusal
from kernel_depot.kernels.batch_prefill import BatchPrefillPlan
from kernel_depot.kernels.plans import mask_indptr, pack_mask
from kernel_depot.kernels.prefill import single_prefill
from kernel_depot.kernels.runtime import device_sm
from kernel_depot.kernels.uri_parameters import AttentionModule
from kernel_depot.smoke.numerics.bench import Bench
from kernel_depot.smoke.numerics.case import LIMITS, Case, Skipped
from kernel_depot.smoke.numerics.paging import Paging, starts
from kernel_depot.smoke.numerics.references import Seen, attended, visible
from kernel_depot.smoke.numerics.requests import CAP, ROPE, WINDOW, batch, lse_limit, slopes
from kernel_depot.smoke.numerics.verdict import Distance, close, near, repeated

FP8_LIMIT: Final = 6e-2
"""Of FP8 queries and keys, whose softmax is rounded to FP8 before the second product."""

F16_REDUCTION_LIMIT: Final = 1e-2

QO_LENGTHS: Final = (1, 17, 0, 128, 3)
KV_LENGTHS: Final = (5, 17, 7, 300, 131)

FP8_SCALES: Final = Scales(q=0.5, k=2.0, v=3.0)


@dataclass(frozen=True, slots=True)
class Form:
    """One way to ask a module: `page_size` None means ragged keys; `heads` of queries and of keys."""

    mask: MaskMode
    heads: tuple[int, int]
    page_size: int | None = None
    layout: Layout = Layout.NHD

    def __str__(self) -> str:
        keys = "ragged" if self.page_size is None else f"page {self.page_size}"
        group = self.heads[0] // self.heads[1]
        return f"{keys} {self.layout.name} {self.mask.name.lower()} group {group}"


_FORMS: Final = (
    Form(MaskMode.NONE, (8, 2)),
    Form(MaskMode.CAUSAL, (2, 2)),
    Form(MaskMode.CAUSAL, (16, 2)),
    Form(MaskMode.CUSTOM, (8, 2)),
    Form(MaskMode.NONE, (8, 2), 16, Layout.HND),
    Form(MaskMode.CAUSAL, (8, 2), 1),
    Form(MaskMode.CAUSAL, (16, 2), 16),
)


def batch_cases(module: AttentionModule) -> Iterator[Case]:
    """Yield a batch prefill module's cases."""
    for form in _FORMS:
        if form.page_size is not None and module.head_dim_qk != module.head_dim_vo:
            continue  # kernels take equal strides of keys and values
        if _computes(module, form.mask):
            yield Case(f"batch {form}", partial(_batch, module=module, form=form))


def single_cases(module: AttentionModule) -> Iterator[Case]:
    """Yield a single prefill module's cases."""
    for rows, keys in ((1, 1), (63, 517)):
        for mask, heads, layout in (
            (MaskMode.NONE, (8, 2), Layout.NHD),
            (MaskMode.CAUSAL, (2, 2), Layout.HND),
            (MaskMode.CAUSAL, (16, 2), Layout.NHD),
            (MaskMode.CUSTOM, (8, 2), Layout.NHD),
        ):
            if layout is Layout.HND and module.backend is Backend.FA3:
                continue
            if _computes(module, mask):
                form = Form(mask, heads, layout=layout)
                name = f"single {rows} of {keys} {form}".replace("ragged ", "")
                yield Case(name, partial(_single, module=module, form=form, rows=rows, keys=keys))


def _computes(module: AttentionModule, mask: MaskMode) -> bool:
    """Tell whether a module is asked for a mask: FA3 has no custom one, and windows go with causal ones."""
    if mask is MaskMode.CUSTOM:
        return module.backend is not Backend.FA3 and not module.window
    return mask is MaskMode.CAUSAL or not module.window


def _attention(bench: Bench, module: AttentionModule, form: Form) -> Attention:
    options: dict[str, Any] = ROPE if module.pos_encoding is PosEncoding.ROPE else {}
    attention = module.attention(
        *form.heads, window_left=WINDOW, logits_soft_cap=CAP, mask=form.mask, layout=form.layout, **options
    )
    if module.backend is Backend.FA3:
        refusal = fa3_refusal(attention, sm=device_sm(bench.device))
        if refusal is not None:
            raise Skipped(f"{refusal[0]}: {refusal[1]}, not {refusal[2]}")
    elif module.dtype_q in FP8:
        raise Skipped("kernel-depot calls FP8 queries of FlashAttention 3 alone")
    return attention


def _limit(attention: Attention) -> float:
    if attention.dtype_q in FP8:
        return FP8_LIMIT
    return F16_REDUCTION_LIMIT if attention.f16_qk_reduction else LIMITS[attention.dtype_o]


def _masks(bench: Bench, attention: Attention, shapes: list[tuple[int, int]]) -> list[Seen]:
    if attention.mask is MaskMode.CUSTOM:
        masks = [bench.random.random(shape) < 0.5 for shape in shapes]
        for mask in masks:
            mask[:, 0] = True  # a query that sees no key has no result
        return masks
    causal = attention.mask is MaskMode.CAUSAL
    return [visible(*shape, causal=causal, window=attention.window_left) for shape in shapes]


def _batch(bench: Bench, *, module: AttentionModule, form: Form) -> list[Distance]:
    attention = _attention(bench, module, form)
    given = batch(bench, attention, QO_LENGTHS, KV_LENGTHS)
    plan = BatchPrefillPlan(
        attention,
        paged=form.page_size is not None,
        device=bench.device,
        backend=module.backend,
        workspace=bench.workspace,
        runtime=bench.runtime,
    )
    if form.page_size is None:
        k, v = given.keys(bench, attention)
        plan.plan(starts(QO_LENGTHS), starts(KV_LENGTHS))
    else:
        paging = Paging.shuffled(KV_LENGTHS, page_size=form.page_size, random=bench.random)
        k, v = given.caches(bench, attention, paging)
        plan.plan(
            starts(QO_LENGTHS),
            paging.indptr,
            kv_indices=paging.indices,
            last_page_len=paging.last_page_len,
            page_size=form.page_size,
        )
    masks = _masks(bench, attention, list(zip(QO_LENGTHS, KV_LENGTHS, strict=True)))
    gradients, slope_tensor = slopes(bench, attention)
    extras: dict[str, Any] = {"alibi_slopes": slope_tensor}
    if form.mask is MaskMode.CUSTOM:
        where = mask_indptr(np.array(QO_LENGTHS, np.int32), np.array(KV_LENGTHS, np.int32))
        extras["custom_mask"] = bench.place("u8", pack_mask(masks))
        extras["mask_indptr"] = bench.place("i32", where)
    fp8 = attention.dtype_q in FP8
    rows, heads = sum(QO_LENGTHS), attention.num_qo_heads
    out, again = (bench.output(attention.dtype_o, rows, heads, attention.head_dim_vo) for _ in range(2))
    lse = None if fp8 else bench.output("f32", rows, heads)
    options: dict[str, Any] = {"extras": Extras(**extras), "scales": FP8_SCALES if fp8 else NO_SCALES}
    plan.run(given.q.tensor, k, v, out.tensor, lse=lse and lse.tensor, **options)
    plan.run(given.q.tensor, k, v, again.tensor, **options)
    reference, sums = attended(attention, given.requests, masks, gradients)
    # The factors of queries and keys cancel each other.
    distances = [near("out", out, reference * (3.0 if fp8 else 1.0), limit=_limit(attention))]
    if lse is not None:
        distances.append(close("lse", lse, sums, limit=lse_limit(attention)))
    repeated("out", out, again)
    return distances


def _single(bench: Bench, *, module: AttentionModule, form: Form, rows: int, keys: int) -> list[Distance]:
    attention = _attention(bench, module, form)
    given = batch(bench, attention, [rows], [keys])
    masks = _masks(bench, attention, [(rows, keys)])
    gradients, slope_tensor = slopes(bench, attention)
    k, v = given.keys(bench, attention)
    custom = bench.place("u8", pack_mask(masks)) if form.mask is MaskMode.CUSTOM else None
    fp8 = attention.dtype_q in FP8
    heads = attention.num_qo_heads
    out, again = (bench.output(attention.dtype_o, rows, heads, attention.head_dim_vo) for _ in range(2))
    lse = None if fp8 else bench.output("f32", rows, heads)
    for target, sums in ((out, lse), (again, None)):
        single_prefill(
            given.q.tensor,
            k,
            v,
            target.tensor,
            mask=form.mask,
            layout=form.layout,
            pos_encoding=attention.pos_encoding,
            window_left=attention.window_left,
            logits_soft_cap=attention.logits_soft_cap,
            rope_scale=attention.rope_scale,
            rope_theta=attention.rope_theta,
            f16_qk_reduction=attention.f16_qk_reduction,
            custom_mask=custom,
            alibi_slopes=slope_tensor,
            scales=FP8_SCALES if fp8 else NO_SCALES,
            lse=sums and sums.tensor,
            backend=module.backend,
            runtime=bench.runtime,
        )
    reference, expected = attended(attention, given.requests, masks, gradients)
    distances = [near("out", out, reference * (3.0 if fp8 else 1.0), limit=_limit(attention))]
    if lse is not None:
        distances.append(close("lse", lse, expected, limit=lse_limit(attention)))
    repeated("out", out, again)
    return distances
