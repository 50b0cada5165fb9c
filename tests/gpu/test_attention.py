"""Attention on a GPU against float64: prefill, decode, MLA, with all that their modules can be asked for."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels.arguments import Extras, Scales
from kernel_depot.kernels.attention import Attention, Backend, Layout, MaskMode, PosEncoding
from kernel_depot.kernels.batch_decode import BatchDecodePlan
from kernel_depot.kernels.batch_prefill import BatchPrefillPlan
from kernel_depot.kernels.decode import single_decode
from kernel_depot.kernels.errors import ModuleMissing
from kernel_depot.kernels.memory import CUDA, Device
from kernel_depot.kernels.mla import BatchMlaPlan
from kernel_depot.kernels.plans import mask_indptr, pack_mask
from kernel_depot.kernels.prefill import single_prefill
from kernel_depot.kernels.runtime import Runtime, device_sm
from kernel_depot.smoke.numerics.case import LIMITS as HALF_LIMITS
from kernel_depot.smoke.numerics.prefill import FP8_LIMIT
from kernel_depot.smoke.numerics.references import attend, attended, visible

pytestmark = pytest.mark.gpu

GPU = Device(CUDA, 0)
LIMITS = {**HALF_LIMITS, "e4m3": FP8_LIMIT}

QO_LENGTHS, KV_LENGTHS = [1, 17, 0, 128, 3], [5, 17, 7, 300, 131]
GARBAGE = 1000.0
"""What lies in cache slots that no request owns: finite, and far from everything, so that a leak shows."""

Array = Any


def exact(tensor: Any) -> Array:
    return tensor.double().cpu().numpy()


def indptr(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def or_skip(build: Callable[[], Any]) -> Any:
    """Return what `build` makes; skip when the modules under test lack the one it needs."""
    try:
        return build()
    except ModuleMissing as error:
        pytest.skip(f"not among the modules: {error.uri}")


def need(backend: Backend) -> None:
    sm = device_sm(GPU)
    if backend is Backend.FA3 and (sm is None or (sm.major, sm.minor) != (9, 0)):
        pytest.skip(f"fa3 is for sm90; this is {sm}")


def same_bits(torch: Any, first: Any, second: Any, facts: str) -> None:
    torch.cuda.synchronize()
    unequal = int((first.view(torch.uint8) != second.view(torch.uint8)).sum())
    assert unequal == 0, f"{facts}: a second launch differs in {unequal} bytes"


@dataclass(frozen=True)
class Case:
    """One batch prefill."""

    name: str
    paged: bool = False
    backend: Backend = Backend.FA2
    dtype: str = "f16"
    dim: int = 128
    heads: tuple[int, int] = (8, 2)
    mask: MaskMode = MaskMode.NONE
    layout: Layout = Layout.NHD
    page_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)


FA2, FA3, CAUSAL = Backend.FA2, Backend.FA3, MaskMode.CAUSAL
CASES = [
    *(
        Case(f"ragged-{backend}-{dtype}-{mask.name}", False, backend, dtype, mask=mask)
        for backend in (FA2, FA3)
        for dtype in ("f16", "bf16")
        for mask in (MaskMode.NONE, CAUSAL)
    ),
    *(
        Case(f"paged-{backend}-{layout.name}-page{size}", True, backend, mask=CAUSAL, layout=layout,
             page_size=size)
        for backend in (FA2, FA3)
        for layout in Layout
        for size in (1, 16)
    ),
    *(
        Case(f"ragged-{backend}-group{group}", False, backend, heads=(group * 2, 2), mask=CAUSAL)
        for backend in (FA2, FA3)
        for group in (1, 8)
    ),
    *(
        Case(f"{'paged' if paged else 'ragged'}-{backend}-dim256", paged, backend, "bf16", 256, mask=CAUSAL)
        for backend in (FA2, FA3)
        for paged in (False, True)
    ),
    Case("paged-fa2-group5", True, FA2, heads=(10, 2), mask=CAUSAL),
    Case("paged-fa2-group16", True, FA2, heads=(16, 1)),
    Case("ragged-fa2-HND", layout=Layout.HND, mask=CAUSAL),
    Case("ragged-fa2-sm_scale", options={"sm_scale": 0.3}),
    Case("ragged-fa2-custom", mask=MaskMode.CUSTOM),
    Case("paged-fa2-custom", True, mask=MaskMode.CUSTOM),
    *(
        Case(f"{'paged' if paged else 'ragged'}-{backend}-window-cap", paged, backend, mask=CAUSAL,
             options={"window_left": 40, "logits_soft_cap": 5.0})
        for backend in (FA2, FA3)
        for paged in (False, True)
    ),
    *(
        Case(f"{'paged' if paged else 'ragged'}-fa2-rope", paged, mask=CAUSAL,
             options={"pos_encoding": PosEncoding.ROPE, "rope_scale": 2.0, "rope_theta": 5e4})
        for paged in (False, True)
    ),
    *(
        Case(f"{'paged' if paged else 'ragged'}-fa2-alibi", paged, mask=CAUSAL,
             options={"pos_encoding": PosEncoding.ALIBI})
        for paged in (False, True)
    ),
]  # fmt: skip


@dataclass
class Batch:
    """Requests' tensors: queries, keys and values by request in float64, and as the plan takes them."""

    q: Any
    k: Any
    v: Any
    requests: list[tuple[Array, Array, Array]]
    planned: dict[str, Any]


def batch(make: Any, case: Case, *, dtype_kv: str | None = None) -> Batch:
    qo_heads, kv_heads = case.heads
    dtype_kv = dtype_kv or case.dtype
    q = make.normal(case.dtype, sum(QO_LENGTHS), qo_heads, case.dim)
    k, v = (make.normal(dtype_kv, sum(KV_LENGTHS), kv_heads, case.dim) for _ in range(2))
    requests = [
        (exact(q)[qo : qo + rows], exact(k)[kv : kv + keys], exact(v)[kv : kv + keys])
        for qo, rows, kv, keys in zip(
            indptr(QO_LENGTHS), QO_LENGTHS, indptr(KV_LENGTHS), KV_LENGTHS, strict=False
        )
    ]
    planned: dict[str, Any] = {"qo_indptr": indptr(QO_LENGTHS)}
    if not case.paged:
        planned["kv_indptr"] = indptr(KV_LENGTHS)
        if case.layout is Layout.HND:
            k, v = (tensor.transpose(0, 1).contiguous() for tensor in (k, v))
        return Batch(q, k, v, requests, planned)
    (k, v), pages = paged(make, [k, v], KV_LENGTHS, page_size=case.page_size, layout=case.layout)
    return Batch(q, k, v, requests, {**planned, **pages})


def paged(
    make: Any, rows: list[Any], lengths: list[int], *, page_size: int, layout: Layout
) -> tuple[list[Any], dict[str, Any]]:
    """Scatter rows over pages in no order, garbage between them; return the caches and what to plan."""
    torch = make.torch
    counts = [-(-length // page_size) for length in lengths]
    total = sum(counts) + 3
    numbers = np.random.default_rng(5).permutation(total)[: sum(counts)]
    slots = np.concatenate(
        [
            numbers[start + np.arange(length) // page_size] * page_size + np.arange(length) % page_size
            for start, length in zip(indptr(counts), lengths, strict=False)
        ]
    )
    caches = []
    for tensor in rows:
        cache = torch.full((total * page_size, *tensor.shape[1:]), GARBAGE, device="cuda").to(tensor.dtype)
        # FP8 has no scatter of its own; its bytes do.
        width = torch.uint8 if tensor.element_size() == 1 else tensor.dtype
        cache.view(width)[make.device(slots)] = tensor.view(width)
        cache = cache.reshape(total, page_size, *tensor.shape[1:])
        caches.append(cache.transpose(1, 2).contiguous() if layout is Layout.HND else cache)
    return caches, {
        "kv_indptr": indptr(counts),
        "kv_indices": numbers.tolist(),
        "last_page_len": [(length - 1) % page_size + 1 if length else 0 for length in lengths],
        "page_size": page_size,
    }


def attention(case: Case, **options: Any) -> Attention:
    return Attention(
        **{
            "num_qo_heads": case.heads[0],
            "num_kv_heads": case.heads[1],
            "head_dim_qk": case.dim,
            "head_dim_vo": case.dim,
            "dtype_q": case.dtype,
            "dtype_kv": case.dtype,
            "dtype_o": case.dtype,
            "mask": case.mask,
            "layout": case.layout,
            **case.options,
            **options,
        }
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batch_prefill(torch: Any, runtime: Runtime, make: Any, meter: Any, case: Case) -> None:
    need(case.backend)
    computed = attention(case)
    plan = or_skip(
        lambda: BatchPrefillPlan(
            computed, paged=case.paged, device=GPU, backend=case.backend, runtime=runtime
        )
    )
    given = batch(make, case)
    shapes = list(zip(QO_LENGTHS, KV_LENGTHS, strict=True))
    masks = [visible(*shape, causal=case.mask is CAUSAL, window=computed.window_left) for shape in shapes]
    extras, slopes = {}, None
    if case.mask is MaskMode.CUSTOM:
        random = np.random.default_rng(11)
        masks = [random.random(shape) < 0.5 for shape in shapes]
        for mask in masks:
            mask[:, 0] = True  # a query that sees no key has no result
        starts = mask_indptr(np.array(QO_LENGTHS, np.int32), np.array(KV_LENGTHS, np.int32))
        extras = {"custom_mask": make.device(pack_mask(masks)), "mask_indptr": make.device(starts)}
    if computed.pos_encoding is PosEncoding.ALIBI:
        slopes = 2.0 ** -np.arange(1, 1 + case.heads[0])
        extras = {"alibi_slopes": make.device(slopes.astype(np.float32))}
    plan.plan(**given.planned)
    options: dict[str, Any] = {"extras": Extras(**extras)} if extras else {}
    out, again = (make.poisoned(case.dtype, *given.q.shape) for _ in range(2))
    lse = make.poisoned("f32", *given.q.shape[:2])
    plan.run(given.q, given.k, given.v, out, lse=lse, **options)
    plan.run(given.q, given.k, given.v, again, **options)
    again.fill_(math.nan)  # the first was checked; one like it goes the short way
    plan.run(given.q, given.k, given.v, again, **options)
    reference, lse_reference = attended(computed, given.requests, masks, slopes)
    meter(
        plan.uri, out, reference, limit=LIMITS[case.dtype], lse=lse, lse_reference=lse_reference,
        lse_limit=2e-2 if case.options else 2e-3,
    )  # fmt: skip
    same_bits(torch, out, again, case.name)


@pytest.mark.parametrize("backend", [FA2, FA3])
def test_multi_item_scoring(torch: Any, runtime: Runtime, make: Any, meter: Any, backend: Backend) -> None:
    """A prefix of 30 tokens, then items of 10 and 23, each after a delimiter and blind to one another."""
    need(backend)
    prefix, items = 30, (10, 23)
    positions = np.concatenate([np.arange(0, 1 + item) for item in items] + [np.zeros(1)]).astype(np.uint16)
    keys = prefix + positions.size
    case = Case("multi-item", True, backend, mask=MaskMode.MULTI_ITEM)
    plan = or_skip(
        lambda: BatchPrefillPlan.paged(attention(case), device=GPU, backend=backend, runtime=runtime)
    )
    q = make.normal("f16", keys, 8, 128)
    k, v = make.normal("f16", keys, 2, 128), make.normal("f16", keys, 2, 128)
    (k_cache, v_cache), pages = paged(make, [k, v], [keys], page_size=16, layout=Layout.NHD)
    plan.plan([0, keys], **pages)
    extras = Extras(
        prefix_len=make.device(np.array([prefix], np.int32)).view(torch.uint32),
        token_pos_in_items=make.device(positions.view(np.int16)).view(torch.uint16),
        max_item_len=make.device(np.array([max(items)], np.int16)).view(torch.uint16),
        token_pos_in_items_len=positions.size,
    )
    out = make.poisoned("f16", keys, 8, 128)
    plan.run(q, k_cache, v_cache, out, extras=extras)
    mask = visible(keys, keys, causal=True)
    at, key = np.arange(keys)[:, None], np.arange(keys)[None]
    own = np.concatenate([np.full(prefix, keys), positions])[:, None]
    mask &= (key < prefix) | (at < key + own)
    reference, _ = attend(exact(q), exact(k), exact(v), scale=1 / math.sqrt(128), mask=mask)
    meter(plan.uri, out, reference, limit=LIMITS["f16"])


@pytest.mark.parametrize("paged_keys", [False, True])
def test_fp8_queries_and_keys(torch: Any, runtime: Runtime, make: Any, meter: Any, paged_keys: bool) -> None:
    need(FA3)
    case = Case("fp8", paged_keys, FA3, "e4m3", mask=CAUSAL)
    computed = attention(case, dtype_o="bf16")
    plan = or_skip(lambda: BatchPrefillPlan(computed, paged=paged_keys, device=GPU, runtime=runtime))
    given = batch(make, case)
    plan.plan(**given.planned)
    out = make.poisoned("bf16", *given.q.shape)
    plan.run(given.q, given.k, given.v, out, scales=Scales(q=0.5, k=2.0, v=3.0))
    masks = [visible(*shape, causal=True) for shape in zip(QO_LENGTHS, KV_LENGTHS, strict=True)]
    reference, _ = attended(computed, given.requests, masks, None)
    meter(plan.uri, out, 3.0 * reference, limit=LIMITS["e4m3"])


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(
    ("dtype", "mask", "options"),
    [
        ("f16", MaskMode.NONE, {}),
        ("f16", CAUSAL, {}),
        ("bf16", CAUSAL, {}),
        ("f16", MaskMode.CUSTOM, {}),
        ("f16", CAUSAL, {"window_left": 20, "logits_soft_cap": 4.0}),
        ("f16", CAUSAL, {"pos_encoding": PosEncoding.ROPE, "rope_theta": 1e5}),
        ("f16", CAUSAL, {"pos_encoding": PosEncoding.ALIBI}),
        ("f16", CAUSAL, {"f16_qk_reduction": True}),
    ],
)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (63, 517)])
def test_single_prefill(
    torch: Any,
    runtime: Runtime,
    make: Any,
    meter: Any,
    dtype: str,
    mask: MaskMode,
    options: dict[str, Any],
    layout: Layout,
    rows: int,
    keys: int,
) -> None:
    q, k, v = make.normal(dtype, rows, 8, 128), *(make.normal(dtype, keys, 2, 128) for _ in range(2))
    out, again = make.poisoned(dtype, rows, 8, 128), make.poisoned(dtype, rows, 8, 128)
    lse = make.poisoned("f32", rows, 8)
    seen = visible(rows, keys, causal=mask is CAUSAL, window=options.get("window_left", -1))
    extras, slopes = {}, None
    if mask is MaskMode.CUSTOM:
        seen = np.random.default_rng(3).random((rows, keys)) < 0.5
        seen[:, 0] = True
        extras = {"custom_mask": make.device(pack_mask([seen]))}
    if options.get("pos_encoding") is PosEncoding.ALIBI:
        slopes = 2.0 ** -np.arange(1, 9)
        extras = {"alibi_slopes": make.device(slopes.astype(np.float32))}
    sent = [tensor.transpose(0, 1).contiguous() if layout is Layout.HND else tensor for tensor in (k, v)]

    def call(target: Any, **more: Any) -> None:
        single_prefill(
            q, *sent, target, mask=mask, layout=layout, **options, **extras, **more, runtime=runtime
        )

    or_skip(lambda: call(out, lse=lse))
    call(again)
    case = Case("", dtype=dtype, mask=mask, options=options)
    reference, lse_reference = attended(
        attention(case), [(exact(q), exact(k), exact(v))], [seen], slopes
    )  # fmt: skip
    limit = 1e-2 if options.get("f16_qk_reduction") else LIMITS[dtype]
    meter(
        "single_prefill", out, reference, limit=limit, lse=lse, lse_reference=lse_reference,
        lse_limit=2e-2 if options else 2e-3,
    )  # fmt: skip
    same_bits(torch, out, again, "single_prefill")


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(
    ("dtype", "group", "options"),
    [
        ("f16", 1, {}),
        ("f16", 4, {}),
        ("bf16", 8, {}),
        ("f16", 4, {"window_left": 50, "logits_soft_cap": 3.0}),
        ("f16", 4, {"pos_encoding": PosEncoding.ROPE, "rope_scale": 4.0}),
        ("f16", 4, {"pos_encoding": PosEncoding.ALIBI}),
    ],
)
@pytest.mark.parametrize("keys", [1, 255, 3001])
def test_single_decode(
    torch: Any,
    runtime: Runtime,
    make: Any,
    meter: Any,
    dtype: str,
    group: int,
    options: dict[str, Any],
    layout: Layout,
    keys: int,
) -> None:
    heads = 2 * group
    q, k, v = make.normal(dtype, heads, 128), *(make.normal(dtype, keys, 2, 128) for _ in range(2))
    out, again, lse = make.poisoned(dtype, heads, 128), make.poisoned(dtype, heads, 128), None
    slopes, extras = None, {}
    if options.get("pos_encoding") is PosEncoding.ALIBI:
        # The kernel counts from the first key here, which moves lse alone.
        slopes = 2.0 ** -np.arange(1, 1 + heads)
        extras = {"alibi_slopes": make.device(slopes.astype(np.float32))}
    else:
        lse = make.poisoned("f32", heads)
    sent = [tensor.transpose(0, 1).contiguous() if layout is Layout.HND else tensor for tensor in (k, v)]

    def call(target: Any, **more: Any) -> None:
        single_decode(q, *sent, target, layout=layout, **options, **extras, **more, runtime=runtime)

    or_skip(lambda: call(out, lse=lse))
    call(again)
    seen = visible(1, keys, window=options.get("window_left", -1))
    case = Case("", dtype=dtype, heads=(heads, 2), options=options)
    reference, lse_reference = attended(
        attention(case), [(exact(q)[None], exact(k), exact(v))], [seen], slopes
    )  # fmt: skip
    meter(
        "single_decode", out, reference[0], limit=LIMITS[dtype], lse=lse, lse_reference=lse_reference[0],
        lse_limit=2e-2 if options else 2e-3,
    )  # fmt: skip
    same_bits(torch, out, again, "single_decode")


DECODE_LENGTHS = [1, 16, 333, 2000]


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("dtype", "dtype_kv", "group", "options"),
    [
        ("f16", "f16", 1, {}),
        ("f16", "f16", 8, {}),
        ("bf16", "bf16", 4, {}),
        ("f16", "e4m3", 4, {}),
        ("f16", "f16", 4, {"window_left": 50, "logits_soft_cap": 3.0}),
        ("f16", "f16", 4, {"pos_encoding": PosEncoding.ROPE, "rope_theta": 1e6}),
        ("f16", "f16", 4, {"pos_encoding": PosEncoding.ALIBI}),
    ],
)
def test_batch_decode(
    torch: Any,
    runtime: Runtime,
    make: Any,
    meter: Any,
    dtype: str,
    dtype_kv: str,
    group: int,
    options: dict[str, Any],
    page_size: int,
    layout: Layout,
) -> None:
    case = Case("", True, dtype=dtype, heads=(2 * group, 2), layout=layout, options=options)
    computed = attention(case, dtype_kv=dtype_kv)
    plan = or_skip(lambda: BatchDecodePlan(computed, device=GPU, runtime=runtime))
    count = len(DECODE_LENGTHS)
    q = make.normal(dtype, count, 2 * group, 128)
    k, v = (make.normal(dtype_kv, sum(DECODE_LENGTHS), 2, 128) for _ in range(2))
    caches, pages = paged(make, [k, v], DECODE_LENGTHS, page_size=page_size, layout=layout)
    plan.plan(**pages)
    out, again = make.poisoned(dtype, *q.shape), make.poisoned(dtype, *q.shape)
    slopes, extras, lse = None, {}, None
    if computed.pos_encoding is PosEncoding.ALIBI:
        slopes = 2.0 ** -np.arange(1, 1 + 2 * group)
        extras = {"alibi_slopes": make.device(slopes.astype(np.float32))}
    else:
        lse = make.poisoned("f32", *q.shape[:2])
    plan.run(q, *caches, out, lse=lse, **extras)
    plan.run(q, *caches, again, **extras)
    again.fill_(math.nan)  # the first was checked; one like it goes the short way
    plan.run(q, *caches, again, **extras)
    starts = indptr(DECODE_LENGTHS)
    requests = [
        (exact(q)[at : at + 1], exact(k)[start : start + length], exact(v)[start : start + length])
        for at, (start, length) in enumerate(zip(starts, DECODE_LENGTHS, strict=False))
    ]
    masks = [visible(1, length, window=computed.window_left) for length in DECODE_LENGTHS]
    reference, lse_reference = attended(computed, requests, masks, slopes)
    meter(
        plan.uri, out, reference, limit=LIMITS[dtype], lse=lse, lse_reference=lse_reference,
        lse_limit=2e-2 if options else 2e-3,
    )  # fmt: skip
    same_bits(torch, out, again, plan.uri)


def test_a_captured_decode_follows_later_plans(torch: Any, runtime: Runtime, make: Any, meter: Any) -> None:
    case = Case("", True)
    plan = or_skip(lambda: BatchDecodePlan(attention(case), device=GPU, runtime=runtime))
    q = make.normal("f16", 3, 8, 128)
    k, v = (make.normal("f16", 512, 2, 128) for _ in range(2))
    cache_k, cache_v = (tensor.reshape(512, 1, 2, 128) for tensor in (k, v))
    out = make.poisoned("f16", 3, 8, 128)

    def replan(lengths: list[int]) -> None:
        numbers = list(range(511, 511 - sum(lengths), -1))
        plan.plan(indptr(lengths), numbers, [1] * 3, page_size=1, cuda_graph=True)

    def backwards(tensor: Any) -> Array:
        return exact(tensor)[::-1]

    replan([1, 2, 3])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        plan.run(q, cache_k, cache_v, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(q, cache_k, cache_v, out)
    for lengths in ([1, 2, 3], [100, 17, 300], [5, 1, 40]):
        replan(lengths)
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        pages = [511 - at for at in range(sum(lengths))]
        requests = [
            (
                exact(q)[at : at + 1],
                exact(k)[pages[start : start + length]],
                exact(v)[pages[start : start + length]],
            )
            for at, (start, length) in enumerate(zip(indptr(lengths), lengths, strict=False))
        ]
        masks = [visible(1, length) for length in lengths]
        reference, _ = attended(attention(case), requests, masks, None)
        meter(f"{plan.uri} replayed for {lengths}", out, reference, limit=LIMITS["f16"])


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("mask", [MaskMode.NONE, CAUSAL])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("backend", [FA2, FA3])
@pytest.mark.parametrize("rows", [[1, 1, 1, 1], [1, 5, 17, 0]], ids=["decode", "prefill"])
def test_batch_mla(
    torch: Any,
    runtime: Runtime,
    make: Any,
    meter: Any,
    rows: list[int],
    backend: Backend,
    dtype: str,
    mask: MaskMode,
    page_size: int,
) -> None:
    need(backend)
    heads, lengths, scale = 16, [3, 64, 700, 129], 192**-0.5
    plan = or_skip(
        lambda: BatchMlaPlan(
            num_heads=heads,
            dtype=dtype,
            sm_scale=scale,
            device=GPU,
            mask=mask,
            backend=backend,
            runtime=runtime,
        )
    )
    q_nope, q_pe = (make.normal(dtype, sum(rows), heads, dim) for dim in (512, 64))
    ckv, kpe = (make.normal(dtype, sum(lengths), 1, dim) for dim in (512, 64))
    caches, pages = paged(make, [ckv, kpe], lengths, page_size=page_size, layout=Layout.NHD)
    plan.plan(
        indptr(rows), pages["kv_indptr"], pages["kv_indices"], lengths, page_size=page_size
    )  # fmt: skip
    out, again = (make.poisoned(dtype, sum(rows), heads, 512) for _ in range(2))
    lse = make.poisoned("f32", sum(rows), heads)
    sent = [cache.squeeze(2) for cache in caches]
    plan.run(q_nope, q_pe, *sent, out, lse=lse)
    plan.run(q_nope, q_pe, *sent, again)
    again.fill_(math.nan)  # the first was checked; one like it goes the short way
    plan.run(q_nope, q_pe, *sent, again)
    outs, lses = [], []
    q = np.concatenate([exact(q_nope), exact(q_pe)], axis=-1)
    k = np.concatenate([exact(ckv), exact(kpe)], axis=-1)
    for at, count, start, length in zip(indptr(rows), rows, indptr(lengths), lengths, strict=False):
        keys = slice(start, start + length)
        seen = visible(count, length, causal=mask is CAUSAL)
        one = attend(q[at : at + count], k[keys], exact(ckv)[keys], scale=scale, mask=seen)
        outs.append(one[0])
        lses.append(one[1])
    meter(
        plan.uri, out, np.concatenate(outs), limit=LIMITS[dtype], lse=lse,
        lse_reference=np.concatenate(lses), lse_limit=1e-2,
    )  # fmt: skip
    same_bits(torch, out, again, plan.uri)


def resident() -> int:
    """Return the bytes of host memory this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.parametrize("kind", ["ragged-fa2", "ragged-fa3", "paged-fa2", "decode", "mla"])
def test_ten_thousand_rounds_leave_memory_flat(torch: Any, runtime: Runtime, make: Any, kind: str) -> None:
    need(FA3 if kind == "ragged-fa3" else FA2)
    q, out = make.normal("f16", 8, 8, 128), make.poisoned("f16", 8, 8, 128)
    if kind == "mla":
        plan = or_skip(
            lambda: BatchMlaPlan(num_heads=8, dtype="f16", sm_scale=0.07, device=GPU, runtime=runtime)
        )
        tensors = [
            make.normal("f16", *shape) for shape in ((8, 8, 512), (8, 8, 64), (4, 16, 512), (4, 16, 64))
        ]
        wide = make.poisoned("f16", 8, 8, 512)

        def once() -> None:
            plan.plan([0, 3, 8], [0, 2, 4], [3, 1, 0, 2], [20, 32], page_size=16)
            plan.run(*tensors, wide)

    elif kind == "decode":
        plan = or_skip(lambda: BatchDecodePlan(attention(Case("")), device=GPU, runtime=runtime))
        cache = make.normal("f16", 16, 16, 2, 128)

        def once() -> None:
            plan.plan(list(range(0, 17, 2)), list(range(16)), [7] * 8, page_size=16)
            plan.run(q, cache, cache, out)

    elif kind == "paged-fa2":
        plan = or_skip(
            lambda: BatchPrefillPlan.paged(attention(Case("")), device=GPU, backend=FA2, runtime=runtime)
        )
        cache = make.normal("f16", 4, 16, 2, 128)

        def once() -> None:
            plan.plan([0, 3, 8], [0, 2, 4], kv_indices=[3, 1, 0, 2], last_page_len=[4, 16], page_size=16)
            plan.run(q, cache, cache, out)

    else:
        backend = FA3 if kind.endswith("fa3") else FA2
        plan = or_skip(
            lambda: BatchPrefillPlan.ragged(attention(Case("")), device=GPU, backend=backend, runtime=runtime)
        )
        keys = make.normal("f16", 32, 2, 128)

        def once() -> None:
            plan.plan([0, 3, 8], [0, 12, 32])
            plan.run(q, keys, keys, out)

    def rounds(count: int) -> tuple[int, int]:
        for _ in range(count):
            once()
        torch.cuda.synchronize()
        gc.collect()
        return resident(), torch.cuda.mem_get_info()[0]

    host, free = rounds(1_000)
    host_after, free_after = rounds(10_000)
    facts = f"{kind}: host {host} to {host_after} bytes, device free {free} to {free_after} bytes"
    print(facts)
    assert host_after - host < 1 << 20, facts
    assert free - free_after < 1 << 20, facts
