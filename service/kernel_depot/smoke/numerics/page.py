"""Cases of the module `page`: each token's bytes in its slot, and nothing anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernel_depot.kernels.attention import Layout
from kernel_depot.kernels.page import (
    HEAD_DIM_CKV,
    HEAD_DIM_KPE,
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
)
from kernel_depot.smoke.numerics.bench import Bench
from kernel_depot.smoke.numerics.case import Case
from kernel_depot.smoke.numerics.paging import Paging
from kernel_depot.smoke.numerics.verdict import Distance, same

LENGTHS: Final = (3, 40, 17, 16)
NEW: Final = (3, 7, 1, 16)
"""Tokens of each request once appended, and how many of them are new."""

HEADS: Final = 2
DIM: Final = 128


def cases() -> Iterator[Case]:
    """Yield the module's cases."""
    for dtype in ("f16", "bf16", "e4m3", "e5m2"):
        for page_size, layout in ((1, Layout.NHD), (16, Layout.NHD), (16, Layout.HND)):
            name = f"append_paged_kv_cache {dtype} page {page_size} {layout.name}"
            yield Case(name, partial(_keys_and_values, dtype=dtype, page_size=page_size, layout=layout))
    for dtype in ("f16", "bf16"):
        for page_size in (1, 16, 64):
            name = f"append_paged_mla_kv_cache {dtype} page {page_size}"
            yield Case(name, partial(_latent_keys, dtype=dtype, page_size=page_size))


def _keys_and_values(bench: Bench, *, dtype: str, page_size: int, layout: Layout) -> list[Distance]:
    paging, arrays, new = _layout(bench, page_size)
    rows = [bench.normal(dtype, sum(LENGTHS), HEADS, DIM) for _ in range(2)]
    before = [bench.normal(dtype, paging.pages * page_size, HEADS, DIM).bits for _ in range(2)]
    shape = (paging.pages, page_size, HEADS, DIM)
    held = [_laid_out(bits.reshape(shape), layout) for bits in before]
    caches = [bench.output(dtype, *bits.shape, bits=bits) for bits in held]
    append_paged_kv_cache(
        bench.place(dtype, rows[0].bits[new]),
        bench.place(dtype, rows[1].bits[new]),
        k_cache=caches[0].tensor,
        v_cache=caches[1].tensor,
        **arrays,
        layout=layout,
        runtime=bench.runtime,
    )
    distances = []
    for name, cache, bits, row in zip(("k_cache", "v_cache"), caches, before, rows, strict=True):
        expected = bits.copy()
        expected[paging.slots[new]] = row.bits[new]
        distances.append(same(name, cache, _laid_out(expected.reshape(shape), layout)))
    return distances


def _latent_keys(bench: Bench, *, dtype: str, page_size: int) -> list[Distance]:
    paging, arrays, new = _layout(bench, page_size)
    dims = (HEAD_DIM_CKV, HEAD_DIM_KPE)
    rows = [bench.normal(dtype, sum(LENGTHS), dim) for dim in dims]
    before = [bench.normal(dtype, paging.pages * page_size, dim).bits for dim in dims]
    shapes = [(paging.pages, page_size, dim) for dim in dims]
    caches = [bench.output(dtype, *shape, bits=bits) for shape, bits in zip(shapes, before, strict=True)]
    append_paged_mla_kv_cache(
        bench.place(dtype, rows[0].bits[new]),
        bench.place(dtype, rows[1].bits[new]),
        ckv_cache=caches[0].tensor,
        kpe_cache=caches[1].tensor,
        **arrays,
        runtime=bench.runtime,
    )
    distances = []
    for name, cache, bits, row in zip(("ckv_cache", "kpe_cache"), caches, before, rows, strict=True):
        expected = bits.copy()
        expected[paging.slots[new]] = row.bits[new]
        distances.append(same(name, cache, expected.reshape(cache.shape)))
    return distances


def _layout(bench: Bench, page_size: int) -> tuple[Paging, dict[str, Any], NDArray[np.int64]]:
    """Return the pages, the index tensors, and which of all tokens are new."""
    paging = Paging.shuffled(LENGTHS, page_size=page_size, random=bench.random)
    positions = [np.arange(length - new, length) for length, new in zip(LENGTHS, NEW, strict=True)]
    ends = np.cumsum(LENGTHS)
    new = np.concatenate(
        [end - length + at for end, length, at in zip(ends, LENGTHS, positions, strict=True)]
    )
    arrays = {
        "batch_indices": np.repeat(np.arange(len(NEW)), NEW),
        "positions": np.concatenate(positions),
        "kv_indices": np.array(paging.indices),
        "kv_indptr": np.array(paging.indptr),
        "kv_last_page_len": np.array(paging.last_page_len),
    }
    return paging, {name: bench.place("i32", array) for name, array in arrays.items()}, new


def _laid_out(cache: NDArray[Any], layout: Layout) -> NDArray[Any]:
    return np.ascontiguousarray(np.swapaxes(cache, 1, 2)) if layout is Layout.HND else cache
