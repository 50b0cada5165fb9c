"""Cases of batch MLA: decode and prefill, with a request without queries, on pages of 1, 16 and 64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from kernel_depot.kernels.attention import HALVES, Backend, MaskMode
from kernel_depot.kernels.mla import HEAD_DIM_CKV, HEAD_DIM_KPE, BatchMlaPlan
from kernel_depot.kernels.runtime import device_sm
from kernel_depot.kernels.uri_parameters import MlaModule
from kernel_depot.smoke.numerics.bench import Bench
from kernel_depot.smoke.numerics.case import LIMITS, Case, Skipped
from kernel_depot.smoke.numerics.paging import Paging, starts
from kernel_depot.smoke.numerics.references import attend, visible
from kernel_depot.smoke.numerics.requests import filler
from kernel_depot.smoke.numerics.verdict import Distance, close, near, repeated

HEADS: Final = 16
LENGTHS: Final = (3, 64, 700, 129)
ROWS: Final = {"decode": (1, 1, 1, 1), "prefill": (1, 5, 17, 0)}
SCALE: Final = 192**-0.5
"""DeepSeek's: of the head dimension before its weights were absorbed."""

LSE_LIMIT: Final = 1e-2


def cases(module: MlaModule) -> Iterator[Case]:
    """Yield the module's cases."""
    for kind, mask, page_size in (
        ("decode", MaskMode.NONE, 1),
        ("decode", MaskMode.NONE, 64),
        ("prefill", MaskMode.NONE, 16),
        ("prefill", MaskMode.CAUSAL, 1),
        ("prefill", MaskMode.CAUSAL, 64),
    ):
        name = f"{kind} {mask.name.lower()} page {page_size}"
        run = partial(_attended, module=module, rows=ROWS[kind], mask=mask, page_size=page_size)
        yield Case(name, run)


def _attended(
    bench: Bench, *, module: MlaModule, rows: Sequence[int], mask: MaskMode, page_size: int
) -> list[Distance]:
    dtype = module.dtype_q
    if {module.dtype_kv, module.dtype_o} != {dtype} or dtype not in HALVES:
        raise Skipped("kernel-depot calls latent attention all in f16 or all in bf16")
    sm = device_sm(bench.device)
    if module.backend is Backend.FA3 and (sm is None or (sm.major, sm.minor) != (9, 0)):
        raise Skipped("FlashAttention 3 needs sm90")
    plan = BatchMlaPlan(
        num_heads=HEADS,
        dtype=dtype,
        sm_scale=SCALE,
        device=bench.device,
        mask=mask,
        backend=module.backend,
        workspace=bench.workspace,
        runtime=bench.runtime,
    )
    paging = Paging.shuffled(LENGTHS, page_size=page_size, random=bench.random)
    q_nope, q_pe = (bench.normal(dtype, sum(rows), HEADS, dim) for dim in (HEAD_DIM_CKV, HEAD_DIM_KPE))
    ckv, kpe = (bench.normal(dtype, sum(LENGTHS), dim) for dim in (HEAD_DIM_CKV, HEAD_DIM_KPE))
    ckv_cache, kpe_cache = (
        bench.place(dtype, paging.cache(part.bits, filler=filler(dtype))) for part in (ckv, kpe)
    )
    plan.plan(starts(rows), paging.indptr, paging.indices, list(LENGTHS), page_size=page_size)
    out, again = (bench.output(dtype, sum(rows), HEADS, HEAD_DIM_CKV) for _ in range(2))
    lse = bench.output("f32", sum(rows), HEADS)
    for target, sums in ((out, lse.tensor), (again, None)):
        plan.run(q_nope.tensor, q_pe.tensor, ckv_cache, kpe_cache, target.tensor, lse=sums)
    q = np.concatenate([q_nope.exact, q_pe.exact], axis=-1)
    k = np.concatenate([ckv.exact, kpe.exact], axis=-1)[:, None]
    outs, expected = [], []
    for at, count, start, length in zip(starts(rows), rows, starts(LENGTHS), LENGTHS, strict=False):
        keys = slice(start, start + length)
        seen = visible(count, length, causal=mask is MaskMode.CAUSAL)
        one = attend(q[at : at + count], k[keys], ckv.exact[keys, None], scale=SCALE, mask=seen)
        outs.append(one[0])
        expected.append(one[1])
    distances = [
        near("out", out, np.concatenate(outs), limit=LIMITS[dtype]),
        close("lse", lse, np.concatenate(expected), limit=LSE_LIMIT),
    ]
    repeated("out", out, again)
    return distances
