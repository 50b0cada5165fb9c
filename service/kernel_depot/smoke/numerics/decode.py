"""Cases of single and batch decode: one key and many, head groups, page sizes, both layouts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from kernel_depot.kernels.attention import Attention, Layout, PosEncoding
from kernel_depot.kernels.batch_decode import BatchDecodePlan
from kernel_depot.kernels.decode import single_decode
from kernel_depot.kernels.uri_parameters import AttentionModule
from kernel_depot.smoke.numerics.bench import Bench
from kernel_depot.smoke.numerics.case import LIMITS, Case
from kernel_depot.smoke.numerics.paging import Paging
from kernel_depot.smoke.numerics.references import attended, visible
from kernel_depot.smoke.numerics.requests import CAP, ROPE, WINDOW, batch, lse_limit, slopes
from kernel_depot.smoke.numerics.verdict import Distance, close, near, repeated

KEY_HEADS: Final = 2
LENGTHS: Final = (1, 16, 333, 2000)


def single_cases(module: AttentionModule) -> Iterator[Case]:
    """Yield a single decode module's cases."""
    for keys, group, layout in (
        (1, 4, Layout.NHD),
        (255, 1, Layout.HND),
        (255, 8, Layout.NHD),
        (3001, 4, Layout.NHD),
    ):
        name = f"single {keys} {layout.name} group {group}"
        yield Case(name, partial(_single, module=module, keys=keys, group=group, layout=layout))


def batch_cases(module: AttentionModule) -> Iterator[Case]:
    """Yield a batch decode module's cases."""
    for page_size, group, layout in (
        (1, 4, Layout.NHD),
        (16, 1, Layout.NHD),
        (16, 8, Layout.HND),
        (16, 4, Layout.NHD),
    ):
        name = f"batch page {page_size} {layout.name} group {group}"
        yield Case(name, partial(_batch, module=module, page_size=page_size, group=group, layout=layout))


def _attention(module: AttentionModule, group: int, layout: Layout) -> Attention:
    options: dict[str, Any] = ROPE if module.pos_encoding is PosEncoding.ROPE else {}
    return module.attention(
        KEY_HEADS * group,
        KEY_HEADS,
        window_left=WINDOW,
        logits_soft_cap=CAP,
        layout=layout,
        **options,
    )


def _single(
    bench: Bench, *, module: AttentionModule, keys: int, group: int, layout: Layout
) -> list[Distance]:
    attention = _attention(module, group, layout)
    given = batch(bench, attention, [1], [keys])
    gradients, slope_tensor = slopes(bench, attention)
    heads, dim = attention.num_qo_heads, attention.head_dim_vo
    k, v = given.keys(bench, attention)
    q = bench.place(attention.dtype_q, given.q.bits[0])
    out, again = (bench.output(attention.dtype_o, heads, dim) for _ in range(2))
    # With ALiBi the kernel counts from the first key here, which moves the softmax's sum alone.
    lse = None if gradients is not None else bench.output("f32", heads)
    for target, sums in ((out, lse), (again, None)):
        single_decode(
            q,
            k,
            v,
            target.tensor,
            layout=layout,
            pos_encoding=attention.pos_encoding,
            window_left=attention.window_left,
            logits_soft_cap=attention.logits_soft_cap,
            rope_scale=attention.rope_scale,
            rope_theta=attention.rope_theta,
            alibi_slopes=slope_tensor,
            lse=sums and sums.tensor,
            runtime=bench.runtime,
        )
    masks = [visible(1, keys, window=attention.window_left)]
    reference, expected = attended(attention, given.requests, masks, gradients)
    distances = [near("out", out, reference[0], limit=LIMITS[attention.dtype_o])]
    if lse is not None:
        distances.append(close("lse", lse, expected[0], limit=lse_limit(attention)))
    repeated("out", out, again)
    return distances


def _batch(
    bench: Bench, *, module: AttentionModule, page_size: int, group: int, layout: Layout
) -> list[Distance]:
    attention = _attention(module, group, layout)
    count = len(LENGTHS)
    given = batch(bench, attention, [1] * count, LENGTHS)
    paging = Paging.shuffled(LENGTHS, page_size=page_size, random=bench.random)
    k, v = given.caches(bench, attention, paging)
    gradients, slope_tensor = slopes(bench, attention)
    plan = BatchDecodePlan(attention, device=bench.device, workspace=bench.workspace, runtime=bench.runtime)
    plan.plan(paging.indptr, paging.indices, paging.last_page_len, page_size=page_size)
    heads, dim = attention.num_qo_heads, attention.head_dim_vo
    out, again = (bench.output(attention.dtype_o, count, heads, dim) for _ in range(2))
    lse = None if gradients is not None else bench.output("f32", count, heads)
    for target, sums in ((out, lse), (again, None)):
        plan.run(
            given.q.tensor,
            k,
            v,
            target.tensor,
            lse=sums and sums.tensor,
            alibi_slopes=slope_tensor,
        )
    masks = [visible(1, length, window=attention.window_left) for length in LENGTHS]
    reference, expected = attended(attention, given.requests, masks, gradients)
    distances = [near("out", out, reference, limit=LIMITS[attention.dtype_o])]
    if lse is not None:
        distances.append(close("lse", lse, expected, limit=lse_limit(attention)))
    repeated("out", out, again)
    return distances
