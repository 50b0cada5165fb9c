"""Appending to a paged cache on a GPU: each token's bytes in its slot, and nothing anywhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels.attention import Layout
from kernel_depot.kernels.page import append_paged_kv_cache, append_paged_mla_kv_cache
from kernel_depot.kernels.runtime import Runtime

pytestmark = pytest.mark.gpu

LENGTHS, NEW = [3, 40, 17, 16], [3, 7, 1, 16]
"""Tokens of each request once appended, and how many of them are new."""


@pytest.fixture
def modules(runtime: Runtime) -> Runtime:
    if "page" not in runtime.files:
        pytest.skip("not among the modules: page")
    return runtime


def layout_of(page_size: int) -> tuple[dict[str, Any], Any, int]:
    """Return the index arrays, the slot of each new token, and how many pages there are."""
    counts = [-(-length // page_size) for length in LENGTHS]
    indptr = [0, *np.cumsum(counts).tolist()]
    numbers = np.random.default_rng(2).permutation(sum(counts) + 3)[: sum(counts)]
    requests = np.repeat(np.arange(len(NEW)), NEW)
    positions = np.concatenate([np.arange(end - new, end) for end, new in zip(LENGTHS, NEW, strict=True)])
    slots = numbers[np.array(indptr)[requests] + positions // page_size] * page_size + positions % page_size
    arrays = {
        "batch_indices": requests,
        "positions": positions,
        "kv_indices": numbers,
        "kv_indptr": indptr,
        "kv_last_page_len": [(length - 1) % page_size + 1 for length in LENGTHS],
    }
    return {name: np.array(values, np.int32) for name, values in arrays.items()}, slots, sum(counts) + 3


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "e4m3"])
def test_keys_and_values(
    torch: Any, modules: Runtime, make: Any, dtype: str, page_size: int, layout: Layout
) -> None:
    arrays, slots, pages = layout_of(page_size)
    rows = [make.normal(dtype, sum(NEW), 2, 128) for _ in range(2)]
    inner = (page_size, 2) if layout is Layout.NHD else (2, page_size)
    caches = [make.normal(dtype, pages, *inner, 128) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    indices = {name: make.device(values) for name, values in arrays.items()}
    append_paged_kv_cache(
        *rows, k_cache=caches[0], v_cache=caches[1], **indices, layout=layout, runtime=modules
    )
    for cache, former, new in zip(caches, before, rows, strict=True):
        found, expected = (
            (tensor.transpose(1, 2) if layout is Layout.HND else tensor)
            .contiguous()
            .view(torch.uint8)
            .cpu()
            .numpy()
            .reshape(pages * page_size, 2, -1)
            for tensor in (cache, former)
        )
        expected = expected.copy()
        expected[slots] = new.view(torch.uint8).cpu().numpy().reshape(sum(NEW), 2, -1)
        assert int((found != expected).sum()) == 0, (dtype, page_size, layout)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_latent_keys(torch: Any, modules: Runtime, make: Any, dtype: str, page_size: int) -> None:
    arrays, slots, pages = layout_of(page_size)
    rows = [make.normal(dtype, sum(NEW), dim) for dim in (512, 64)]
    caches = [make.normal(dtype, pages, page_size, dim) for dim in (512, 64)]
    before = [cache.clone() for cache in caches]
    indices = {name: make.device(values) for name, values in arrays.items()}
    append_paged_mla_kv_cache(
        *rows, ckv_cache=caches[0], kpe_cache=caches[1], **indices, runtime=modules
    )  # fmt: skip
    for cache, former, new in zip(caches, before, rows, strict=True):
        found, expected = (
            tensor.reshape(pages * page_size, -1).view(torch.uint8).cpu().numpy()
            for tensor in (cache, former)
        )
        expected = expected.copy()
        expected[slots] = new.view(torch.uint8).cpu().numpy()
        assert int((found != expected).sum()) == 0, (dtype, page_size)
