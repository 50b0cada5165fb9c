"""The opponent on a GPU: right within 1e-2 of float64, also from several threads and streams at once.

`KERNEL_DEPOT_GPU_CACHE` names a node's cache that was synced with `--group opponent`; without it these skip.
"""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.opponent import SWITCH, ragged_prefill_bf16_hd128, ragged_prefill_bf16_hd256
from kernel_depot.opponent.reference import reference, relative_error

CALLS = {128: ragged_prefill_bf16_hd128, 256: ragged_prefill_bf16_hd256}
LENGTHS = ([1], [7, 1, 130], [64] * 8, [1000, 3, 17])


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Path:
    if "KERNEL_DEPOT_GPU_CACHE" not in os.environ:
        pytest.skip("KERNEL_DEPOT_GPU_CACHE names no cache")
    monkeypatch.setenv(SWITCH, "1")
    return Path(os.environ["KERNEL_DEPOT_GPU_CACHE"])


def inputs(torch: Any, lengths: list[int], dim: int, heads: int, kv_heads: int) -> Any:
    rows = sum(lengths)
    q, k, v = (
        torch.randn(rows, count, dim, device="cuda", dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads)
    )
    indptr = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    return q, k, v, torch.full_like(q, math.nan), indptr


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_it_is_right(torch: Any, cache: Path, dim: int, causal: bool, lengths: list[int]) -> None:
    q, k, v, out, indptr = inputs(torch, lengths, dim, 8, 2)
    given = CALLS[dim](q, k, v, indptr, indptr, out=out, causal=causal, cache=cache)
    assert given is out
    wanted = reference(torch, q, k, v, indptr, causal=causal, sm_scale=1 / math.sqrt(dim))
    assert relative_error(torch, out, wanted) < 1e-2


@pytest.mark.gpu
def test_out_is_allocated_when_none_is_given(torch: Any, cache: Path) -> None:
    q, k, v, _, indptr = inputs(torch, [5, 9], 128, 4, 4)
    out = ragged_prefill_bf16_hd128(q, k, v, indptr, indptr, causal=True, cache=cache)
    wanted = reference(torch, q, k, v, indptr, causal=True, sm_scale=1 / math.sqrt(128))
    assert relative_error(torch, out, wanted) < 1e-2


@pytest.mark.gpu
def test_threads_and_streams_do_not_disturb_each_other(torch: Any, cache: Path) -> None:
    errors: list[tuple[int, float]] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        dim = (128, 256)[number % 2]
        with torch.cuda.stream(stream):
            for turn in range(12):
                lengths = LENGTHS[(number + turn) % len(LENGTHS)]
                q, k, v, out, indptr = inputs(torch, lengths, dim, 8, 4)
                CALLS[dim](q, k, v, indptr, indptr, out=out, causal=True, cache=cache)
                wanted = reference(torch, q, k, v, indptr, causal=True, sm_scale=1 / math.sqrt(dim))
                errors.append((number, relative_error(torch, out, wanted)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(errors) == 72
    assert [(number, error) for number, error in errors if not error < 1e-2] == []


@pytest.mark.gpu
def test_a_call_does_not_wait_for_the_gpu(torch: Any, cache: Path) -> None:
    q, k, v, out, indptr = inputs(torch, [64, 64], 128, 8, 8)
    ragged_prefill_bf16_hd128(q, k, v, indptr, indptr, out=out, causal=True, cache=cache)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    ragged_prefill_bf16_hd128(q, k, v, indptr, indptr, out=out, causal=True, cache=cache)
    ragged_prefill_bf16_hd128(
        q[:64], k[:64], v[:64], [0, 64], [0, 64], out=out[:64], causal=True, cache=cache
    )
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_tensors_elsewhere_are_refused(torch: Any, cache: Path) -> None:
    q, k, v, _, indptr = inputs(torch, [4], 128, 4, 4)
    from kernel_depot.kernels.errors import InvalidArgument

    with pytest.raises(InvalidArgument):
        ragged_prefill_bf16_hd128(q.cpu(), k.cpu(), v.cpu(), indptr, indptr, causal=True, cache=cache)
    with pytest.raises(InvalidArgument):
        ragged_prefill_bf16_hd128(q, k.cpu(), v, indptr, indptr, causal=True, cache=cache)
    with pytest.raises(InvalidArgument):
        ragged_prefill_bf16_hd128(q, k, v, [0, 3], indptr, causal=True, cache=cache)
