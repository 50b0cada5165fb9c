"""Batch decode: plan and run as two calls, CUDA graphs' fixed places, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels.attention import Attention, Layout, MaskMode, PosEncoding
from kernel_depot.kernels.batch_decode import BatchDecodePlan
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import CPU, Device
from kernel_depot.kernels.workspaces import Workspace

HOST = Device(CPU)
RELEASES = [(0, 6, 3), (0, 6, 18), (0, 7, 4)]
SCALE = 1.0 / math.sqrt(128)


def uri(*, dtypes: str = "f16 f16 f16", posenc: int = 0, **options: bool) -> str:
    q, kv, o = dtypes.split()
    flags = {"swa": False, "cap": False, **options}
    return (
        f"batch_decode_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{o}_dtype_idx_i32_head_dim_qk_128"
        f"_head_dim_vo_128_posenc_{posenc}_use_swa_{flags['swa']}_use_logits_cap_{flags['cap']}"
    )


def attention(**options: Any) -> Attention:
    given = {
        "num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 128, "head_dim_vo": 128, "dtype_q": "f16",
        "dtype_kv": "f16", "dtype_o": "f16", **options,
    }  # fmt: skip
    return Attention(**given)


def small() -> Workspace:
    return Workspace(HOST, float_bytes=1 << 12, int_bytes=1 << 12, index_bytes=1 << 12)


def make(stand_ins: Any, release: tuple[int, ...] = (0, 6, 3), **options: Any) -> BatchDecodePlan:
    return BatchDecodePlan(
        attention(**options), device=HOST, workspace=small(), runtime=stand_ins.runtime(release)
    )


def integers(argument: dict[str, Any]) -> list[int]:
    return np.frombuffer(bytes(argument["head"]), np.int32).tolist()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("layout", list(Layout))
def test_plan_and_run_send_every_argument_in_its_place(
    stand_ins: Any, release: tuple[int, ...], layout: Layout
) -> None:
    name = uri(posenc=2, swa=True, cap=True)
    stand_ins.add(name, "batch_decode", release)
    plan = make(
        stand_ins, release, layout=layout, pos_encoding=PosEncoding.ALIBI, window_left=9,
        logits_soft_cap=15.0, sm_scale=0.5,
    )  # fmt: skip
    plan.plan([0, 2, 2, 3], [4, 1, 0], [3, 0, 16], page_size=16, cuda_graph=True)
    inner = (16, 2) if layout is Layout.NHD else (2, 16)
    q, cache = np.zeros((3, 8, 128), np.float16), np.zeros((5, *inner, 128), np.float16)
    out, lse, slopes = q.copy(), np.zeros((3, 8), np.float32), np.ones(8, np.float32)
    plan.run(q, cache, cache, out, lse=lse, alibi_slopes=slopes, enable_pdl=True)

    planned, run = stand_ins.calls(name)
    assert planned.shapes == [
        [4096], [4096], [4096], [4], 3, 8, 2, 16, True, 9, 15.0, 128, 128, [0], [0],
    ]  # fmt: skip
    assert [(planned.arguments[at]["code"], planned.arguments[at]["bits"]) for at in (13, 14)] == [
        (2, 16)
    ] * 2
    pages = [5, *inner, 128]
    assert run.shapes == [
        [4096], [4096], run.arguments[2], [3, 8, 128], pages, pages, [4], [3], [3], [3, 8, 128], [3, 8],
        int(layout), 9, True, [8], 15.0, 0.5, 1.0, 1e-4,
    ]  # fmt: skip
    assert run.arguments[2][1:] == [7, 11]
    assert [integers(run.arguments[at]) for at in (6, 7, 8)] == [[0, 2, 2, 3], [4, 1, 0], [3, 0, 16]]


def test_a_captured_run_finds_a_later_plans_indices_in_the_same_places(stand_ins: Any) -> None:
    stand_ins.add(uri(), "batch_decode", (0, 6, 3))
    plan = make(stand_ins)
    q, cache = np.zeros((2, 8, 128), np.float16), np.zeros((200, 1, 2, 128), np.float16)
    places = []
    for pages in (2, 200):
        plan.plan([0, 1, pages], list(range(pages)), [1, 1], page_size=1, cuda_graph=True)
        plan.run(q, cache, cache, q.copy())
        run = stand_ins.calls(uri())[-1]
        places.append([run.arguments[at]["address"] for at in (0, 1, 6, 7, 8)])
    assert places[0] == places[1]


@pytest.mark.parametrize(("dtype", "code"), [("e4m3", 10), ("e5m2", 12)])
def test_an_fp8_cache_has_a_module_of_its_own(stand_ins: Any, tensor: Any, dtype: str, code: int) -> None:
    name = uri(dtypes=f"f16 {dtype} f16")
    stand_ins.add(name, "batch_decode", (0, 6, 3))
    plan = make(stand_ins, dtype_kv=dtype)
    plan.plan([0, 1], [0], [1], page_size=1)
    q = np.zeros((1, 8, 128), np.float16)
    plan.run(q, tensor(dtype, 1, 1, 2, 128), tensor(dtype, 1, 1, 2, 128), q.copy())
    planned, run = stand_ins.calls(name)
    assert (planned.arguments[14]["code"], run.arguments[4]["code"]) == (code, code)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mask", {"mask": MaskMode.CAUSAL}),
        ("head_dim_vo", {"head_dim_vo": 64}),
        ("num_qo_heads", {"num_qo_heads": 10}),
    ],
)
def test_what_decode_kernels_cannot_compute_is_refused_at_once(
    stand_ins: Any, name: str, options: dict[str, Any]
) -> None:
    stand_ins.add(uri(), "batch_decode", (0, 6, 3))
    with pytest.raises(InvalidArgument) as caught:
        make(stand_ins, **options)
    assert caught.value.name == name
    if name == "num_qo_heads":
        assert "BatchPrefillPlan.paged" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("kv_indptr", {"kv_indptr": [1, 2, 3]}),
        ("kv_indptr", {"kv_indptr": [0, 2, 1]}),
        ("kv_indptr", {"kv_indptr": [0]}),
        ("kv_indices", {"kv_indices": [0, 1]}),
        ("kv_indices", {"kv_indices": [0, 1, -3]}),
        ("last_page_len", {"last_page_len": [1, 9]}),
        ("last_page_len", {"last_page_len": [1, 0]}),
        ("last_page_len", {"last_page_len": [1]}),
        ("page_size", {"page_size": -1}),
    ],
)
def test_a_wrong_plan_is_refused_by_name(stand_ins: Any, name: str, changes: dict[str, Any]) -> None:
    stand_ins.add(uri(), "batch_decode", (0, 6, 3))
    plan = make(stand_ins)
    good = {"kv_indptr": [0, 1, 3], "kv_indices": [0, 1, 2], "last_page_len": [1, 8], "page_size": 8}
    with pytest.raises(InvalidArgument) as caught:
        plan.plan(**{**good, **changes})
    assert caught.value.name == name
    assert stand_ins.calls(uri()) == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("q", {"q": np.zeros((3, 8, 128), np.float16)}),
        ("q", {"q": np.zeros((2, 16, 128), np.float16)[:, ::2]}),
        ("k_cache", {"k_cache": np.zeros((3, 2, 8, 128), np.float16)}),
        ("k_cache", {"k_cache": np.zeros((2, 8, 2, 128), np.float16)}),
        ("v_cache", {"v_cache": np.zeros((3, 8, 4, 128), np.float16)[:, :, ::2]}),
        ("v_cache", {"v_cache": np.zeros((3, 8, 2, 128), np.float32)}),
        ("out", {"out": np.zeros((2, 8, 64), np.float16)}),
        ("lse", {"lse": np.zeros((2, 2), np.float32)}),
        ("alibi_slopes", {"alibi_slopes": np.zeros(8, np.float32)}),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(stand_ins: Any, name: str, changes: dict[str, Any]) -> None:
    stand_ins.add(uri(), "batch_decode", (0, 6, 3))
    plan = make(stand_ins)
    plan.plan([0, 1, 3], [0, 1, 2], [1, 8], page_size=8)
    stand_ins.calls(uri())
    good = {
        "q": np.zeros((2, 8, 128), np.float16),
        "k_cache": np.zeros((3, 8, 2, 128), np.float16),
        "v_cache": np.zeros((3, 8, 2, 128), np.float16),
        "out": np.zeros((2, 8, 128), np.float16),
    }
    with pytest.raises(InvalidArgument) as caught:
        plan.run(**{**good, **changes})
    assert caught.value.name == name
    assert stand_ins.calls(uri()) == []


def test_ten_thousand_rounds_leave_memory_flat(stand_ins: Any) -> None:
    import psutil

    stand_ins.add(uri(), "batch_decode", (0, 6, 3))
    plan = make(stand_ins)
    q, cache = np.zeros((2, 8, 128), np.float16), np.zeros((3, 8, 2, 128), np.float16)
    out = q.copy()

    def rounds(count: int) -> int:
        for _ in range(count):
            plan.plan([0, 1, 3], [0, 1, 2], [1, 8], page_size=8)
            plan.run(q, cache, cache, out)
        return int(psutil.Process().memory_info().rss)

    before = rounds(2_000)
    after = rounds(8_000)
    # A round that kept one of its tensors' DLPack blocks would add 8,000 x at least 128 bytes.
    assert after - before < 512 << 10, (before, after)
