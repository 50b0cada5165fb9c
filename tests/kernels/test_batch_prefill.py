"""What batch prefill sends, in order, for each release and backend, and what it refuses before it sends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels import batch_prefill
from kernel_depot.kernels.arguments import Extras, Scales
from kernel_depot.kernels.attention import Attention, Backend, Layout, MaskMode, PosEncoding
from kernel_depot.kernels.batch_prefill import BatchPrefillPlan
from kernel_depot.kernels.errors import InvalidArgument, KernelCallFailed, ModuleMissing, SignatureMismatch
from kernel_depot.kernels.memory import CPU, Device
from kernel_depot.kernels.workspaces import Workspace
from kernel_depot.platform import Sm

HOST = Device(CPU)
RELEASES = [(0, 6, 3), (0, 6, 18), (0, 7, 4)]
SCALE = 1.0 / math.sqrt(128)
QO, KV = [0, 3, 3, 8], [0, 4, 6, 13]
F16 = {"dtype_q": "f16", "dtype_kv": "f16", "dtype_o": "f16"}
FP8 = {"dtype_q": "e4m3", "dtype_kv": "e4m3", "dtype_o": "bf16"}
URI = (
    "batch_prefill_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{o}_dtype_idx_i32_head_dim_qk_128"
    "_head_dim_vo_128_posenc_{posenc}_use_swa_{swa}_use_logits_cap_{cap}_f16qk_{f16qk}{end}"
)


def attention(**options: Any) -> Attention:
    dims = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 128, "head_dim_vo": 128}
    return Attention(**{**dims, **F16, **options})


def uri(end: str = "", *, dtypes: str = "f16 f16 f16", posenc: int = 0, **options: bool) -> str:
    q, kv, o = dtypes.split()
    flags = {"swa": False, "cap": False, "f16qk": False, **options}
    return URI.format(q=q, kv=kv, o=o, posenc=posenc, end=end, **flags)


def small() -> Workspace:
    return Workspace(HOST, float_bytes=1 << 12, int_bytes=1 << 12, index_bytes=1 << 12)


def fa2_end(release: tuple[int, ...]) -> str:
    return "_kv_stride_equal" if release >= (0, 7) else ""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host's device count as an H200, so that FlashAttention 3 is chosen for it."""
    monkeypatch.setattr(batch_prefill, "device_sm", lambda device: Sm(9, 0))


@pytest.mark.parametrize("release", RELEASES)
def test_ragged_fa2_sends_every_argument_in_its_place(stand_ins: Any, release: tuple[int, ...]) -> None:
    name = uri(fa2_end(release), swa=True, cap=True)
    stand_ins.add(name, "batch_prefill", release)
    plan = BatchPrefillPlan.ragged(
        attention(window_left=64, logits_soft_cap=30.0, sm_scale=0.5, mask=MaskMode.CAUSAL),
        device=HOST,
        workspace=small(),
        runtime=stand_ins.runtime(release),
    )
    assert (plan.uri, plan.backend) == (name, Backend.FA2)

    plan.plan(QO, KV, fixed_split_size=512, disable_split_kv=True, num_colocated_ctas=2)
    (planned,) = stand_ins.calls(name)
    later: list[Any] = [0, False][: {(0, 6, 18): 1, (0, 7, 4): 2}.get(release, 0)]
    head: list[Any] = [[4096], [4096], [4096], [4], [4], [3], 8, 3, 8, 2, 1]
    assert planned.shapes == [*head, False, 128, 128, True, 64, 512, True, 2, *later]
    assert [np.frombuffer(bytes(planned.arguments[at]["head"]), np.int32).tolist() for at in (3, 4, 5)] == [
        QO,
        KV,
        [4, 2, 7],
    ]

    q, k = np.zeros((8, 8, 128), np.float16), np.zeros((13, 2, 128), np.float16)
    v, out, lse = k.copy(), q.copy(), np.zeros((8, 8), np.float32)
    plan.run(q, k, v, out, lse=lse, enable_pdl=True)
    (run,) = stand_ins.calls(name)
    scales = [None, None] if release >= (0, 6, 10) else []
    assert run.function == "ragged_run"
    assert run.shapes[:3] == [[4096], [4096], [1, 7, 11]]
    assert run.shapes[3:14] == [
        [8, 8, 128], [13, 2, 128], [13, 2, 128], [4], [4], [8, 8, 128], [8, 8], 1, 0, 64, True,
    ]  # fmt: skip
    assert run.shapes[14:] == [None] * 6 + scales + [30.0, 0.5, 1.0, 1e-4, 0]
    addresses = [run.arguments[at]["address"] for at in (3, 4, 5, 8, 9)]
    assert addresses == [array.ctypes.data for array in (q, k, v, out, lse)]
    assert [np.frombuffer(bytes(run.arguments[at]["head"]), np.int32).tolist() for at in (6, 7)] == [QO, KV]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("layout", list(Layout))
def test_paged_fa2_sends_the_cache_and_its_indices(
    stand_ins: Any, release: tuple[int, ...], layout: Layout
) -> None:
    name = uri(fa2_end(release))
    stand_ins.add(name, "batch_prefill", release)
    plan = BatchPrefillPlan.paged(
        attention(layout=layout), device=HOST, workspace=small(), runtime=stand_ins.runtime(release)
    )
    plan.plan(
        [0, 1, 1, 5], [0, 2, 2, 3], kv_indices=[4, 0, 2], last_page_len=[5, 0, 16], page_size=16,
        cuda_graph=True,
    )  # fmt: skip
    (planned,) = stand_ins.calls(name)
    later: list[Any] = [0, False][: {(0, 6, 18): 1, (0, 7, 4): 2}.get(release, 0)]
    assert planned.shapes[6:] == [5, 3, 8, 2, 16, True, 128, 128, False, -1, -1, False, 0, *later]
    lengths = np.frombuffer(bytes(planned.arguments[5]["head"]), np.int32).tolist()
    assert lengths == [21, 0, 16]

    inner = (16, 2) if layout is Layout.NHD else (2, 16)
    cache = np.zeros((6, *inner, 128), np.float16)
    q = np.zeros((5, 8, 128), np.float16)
    plan.run(q, cache, cache.copy(), q.copy())
    (run,) = stand_ins.calls(name)
    scales = [None, None] if release >= (0, 6, 10) else []
    assert run.function == "paged_run"
    assert run.shapes[3:16] == [
        [5, 8, 128], [6, *inner, 128], [6, *inner, 128], [4], [4], [3], [3], [5, 8, 128], None, 0,
        int(layout), -1, False,
    ]  # fmt: skip
    assert run.shapes[16:] == [None] * 6 + scales + [0.0, SCALE, 1.0, 1e-4, 0]
    assert [np.frombuffer(bytes(run.arguments[at]["head"]), np.int32).tolist() for at in range(6, 10)] == [
        [0, 1, 1, 5],
        [0, 2, 2, 3],
        [4, 0, 2],
        [5, 0, 16],
    ]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.usefixtures("hopper")
def test_fa3_is_chosen_on_hopper_and_takes_its_own_arguments(
    stand_ins: Any, release: tuple[int, ...], paged: bool
) -> None:
    name = uri("_sm90")
    stand_ins.add(name, "batch_prefill_sm90", release)
    plan = BatchPrefillPlan(
        attention(mask=MaskMode.CAUSAL), paged=paged, device=HOST, workspace=small(),
        runtime=stand_ins.runtime(release),
    )  # fmt: skip
    assert plan.backend is Backend.FA3
    q = np.zeros((8, 8, 128), np.float16)
    if paged:
        plan.plan(QO, [0, 1, 1, 3], kv_indices=[0, 1, 2], last_page_len=[4, 0, 1], page_size=8)
        cache = np.zeros((3, 8, 2, 128), np.float16)
        plan.run(q, cache, cache, q.copy())
    else:
        plan.plan(QO, KV)
        k = np.zeros((13, 2, 128), np.float16)
        plan.run(q, k, k, q.copy())
    planned, run = stand_ins.calls(name)
    assert planned.shapes[6:] == [8, 3, 8, 2, 8 if paged else 1, False, 128, 128, True, -1]
    assert run.shapes[-12:] == [1, 0, -1, False, *[None] * 4, 0.0, SCALE, 1.0, 0]
    assert len(run.arguments) == (24 if paged else 22)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.usefixtures("hopper")
def test_fp8_goes_to_fa3_with_three_factors(
    stand_ins: Any, tensor: Any, release: tuple[int, ...], paged: bool
) -> None:
    name = uri("_sm90", dtypes="e4m3 e4m3 bf16")
    stand_ins.add(name, "batch_prefill_fp8_sm90", release)
    plan = BatchPrefillPlan(
        attention(**FP8), paged=paged, device=HOST, workspace=small(), runtime=stand_ins.runtime(release)
    )
    q, out = tensor("e4m3", 8, 8, 128), tensor("bf16", 8, 8, 128)
    if paged:
        plan.plan(QO, [0, 1, 1, 3], kv_indices=[0, 1, 2], last_page_len=[4, 0, 1], page_size=8)
        k, v = tensor("e4m3", 3, 8, 2, 128), tensor("e4m3", 3, 8, 2, 128)
    else:
        plan.plan(QO, KV)
        k, v = tensor("e4m3", 13, 2, 128), tensor("e4m3", 13, 2, 128)
    plan.run(q, k, v, out, scales=Scales(q=0.5, k=tensor("f32", 2), v=4.0))
    _, run = stand_ins.calls(name)
    assert run.shapes[-7:] == [None, [2], None, SCALE, 0.5, 1.0, 4.0]
    assert len(run.arguments) == (23 if paged else 21)


def test_optional_tensors_arrive_as_owned_tensors_in_their_places(stand_ins: Any) -> None:
    name = uri()
    stand_ins.add(name, "batch_prefill", (0, 6, 3))
    plan = BatchPrefillPlan.ragged(
        attention(mask=MaskMode.CUSTOM), device=HOST, workspace=small(), runtime=stand_ins.runtime((0, 6, 3))
    )
    plan.plan([0, 3], [0, 5])
    q, k = np.zeros((3, 8, 128), np.float16), np.zeros((5, 2, 128), np.float16)
    mask = np.full(2, 255, np.uint8)
    plan.run(q, k, k, q.copy(), extras=Extras(custom_mask=mask, mask_indptr=np.array([0, 2], np.int32)))
    _, run = stand_ins.calls(name)
    assert run.shapes[10] == 2
    assert run.shapes[14:20] == [[2], [2], None, None, None, None]
    assert run.arguments[14]["address"] == mask.ctypes.data


def items(count: int = 1, **changes: Any) -> Extras:
    """The tensors of multi-item scoring: two items of two tokens behind a prefix of two, for each request."""
    given: dict[str, Any] = {
        "prefix_len": np.full(count, 2, np.uint32),
        "token_pos_in_items": np.array([0, 1, 0, 1, 0] * count, np.uint16),
        "max_item_len": np.ones(count, np.uint16),
        "token_pos_in_items_len": 5,
    }
    return Extras(**{**given, **changes})


@pytest.mark.parametrize("sm", [None, Sm(9, 0)])
def test_multi_item_scoring_is_for_paged_keys(
    stand_ins: Any, monkeypatch: pytest.MonkeyPatch, sm: Sm | None
) -> None:
    monkeypatch.setattr(batch_prefill, "device_sm", lambda device: sm)
    name = uri("_sm90" if sm else "")
    stand_ins.add(name, "batch_prefill_sm90" if sm else "batch_prefill", (0, 6, 3))
    scoring = attention(mask=MaskMode.MULTI_ITEM)
    given: dict[str, Any] = {
        "device": HOST, "workspace": small(), "runtime": stand_ins.runtime((0, 6, 3))
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match="mask"):
        BatchPrefillPlan.ragged(scoring, **given)
    plan = BatchPrefillPlan.paged(scoring, **given)
    pages = {"kv_indices": [0, 1], "last_page_len": [7, 7], "page_size": 8}
    plan.plan([0, 7, 14], [0, 1, 2], **pages)
    q, cache = np.zeros((14, 8, 128), np.float16), np.zeros((2, 8, 2, 128), np.float16)
    plan.run(q, cache, cache, q.copy(), extras=items(2))
    planned, run = stand_ins.calls(name)
    assert planned.shapes[14] is True
    assert (run.shapes[12], run.shapes[-1]) == (3, 5)
    assert run.shapes[16:19] == [[2], [10], [2]] if sm else run.shapes[19:22] == [[2], [10], [2]]
    for wrong, changes in (
        ("prefix_len", {"prefix_len": None}),
        ("prefix_len", {"prefix_len": np.zeros(2, np.int32)}),
        ("token_pos_in_items", {"token_pos_in_items": np.zeros(5, np.uint16)}),
        ("max_item_len", {"max_item_len": np.zeros(1, np.uint16)}),
        ("token_pos_in_items_len", {"token_pos_in_items_len": -1}),
        ("custom_mask", {"custom_mask": np.zeros(9, np.uint8)}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            plan.run(q, cache, cache, q.copy(), extras=items(2, **changes))
        assert caught.value.name == wrong
    assert stand_ins.calls(name) == []


def test_alibi_and_rope_name_their_modules_and_send_what_they_need(stand_ins: Any) -> None:
    for number in (1, 2):
        stand_ins.add(uri(posenc=number), "batch_prefill", (0, 6, 3))
    runtime = stand_ins.runtime((0, 6, 3))
    q, k = np.zeros((3, 8, 128), np.float16), np.zeros((5, 2, 128), np.float16)
    rope = BatchPrefillPlan.ragged(
        attention(pos_encoding=PosEncoding.ROPE, rope_scale=4.0, rope_theta=5e5),
        device=HOST,
        workspace=small(),
        runtime=runtime,
    )
    rope.plan([0, 3], [0, 5])
    rope.run(q, k, k, q.copy())
    assert stand_ins.calls(uri(posenc=1))[1].shapes[22:24] == [0.25, 2e-6]

    alibi = BatchPrefillPlan.ragged(
        attention(pos_encoding=PosEncoding.ALIBI), device=HOST, workspace=small(), runtime=runtime
    )
    alibi.plan([0, 3], [0, 5])
    with pytest.raises(InvalidArgument, match="alibi_slopes"):
        alibi.run(q, k, k, q.copy())
    alibi.run(q, k, k, q.copy(), extras=Extras(alibi_slopes=np.ones(8, np.float32)))
    assert stand_ins.calls(uri(posenc=2))[1].shapes[14:20] == [None, None, [8], None, None, None]


@pytest.fixture
def ragged(stand_ins: Any) -> BatchPrefillPlan:
    """A planned ragged prefill of 3 requests: 8 query rows, 13 key rows."""
    stand_ins.add(uri(), "batch_prefill", (0, 6, 3))
    plan = BatchPrefillPlan.ragged(
        attention(), device=HOST, workspace=small(), runtime=stand_ins.runtime((0, 6, 3))
    )
    plan.plan(QO, KV)
    stand_ins.calls(uri())
    return plan


GOOD = {
    "q": np.zeros((8, 8, 128), np.float16),
    "k": np.zeros((13, 2, 128), np.float16),
    "v": np.zeros((13, 2, 128), np.float16),
    "out": np.zeros((8, 8, 128), np.float16),
}
WIDE = np.zeros((8, 8, 256), np.float16)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", np.zeros((7, 8, 128), np.float16)),
        ("q", np.zeros((8, 4, 128), np.float16)),
        ("q", np.zeros((8, 8, 128), np.float32)),
        ("q", WIDE[:, :, ::2]),
        ("q", "no tensor"),
        ("k", np.zeros((13, 4, 128), np.float16)),
        ("k", np.zeros((14, 2, 128), np.float16)),
        ("k", np.zeros((13, 2, 64), np.float16)),
        ("v", np.zeros((12, 2, 128), np.float16)),
        ("v", np.zeros((13, 2, 128), np.float32)),
        ("out", np.zeros((8, 8, 64), np.float16)),
        ("out", WIDE[:, :, :128]),
        ("lse", np.zeros((8, 8), np.float16)),
        ("lse", np.zeros((8, 4), np.float32)),
        ("lse", np.zeros((8, 16), np.float32)[:, ::2]),
    ],
)
def test_a_wrong_tensor_is_refused_by_name_and_nothing_is_sent(
    ragged: BatchPrefillPlan, stand_ins: Any, name: str, value: Any
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ragged.run(**{**GOOD, name: value})
    assert caught.value.name == name
    assert caught.value.expected is not None
    assert stand_ins.calls(uri()) == []
    ragged.run(**GOOD)
    assert len(stand_ins.calls(uri())) == 1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qo_indptr", {"qo_indptr": [1, 3]}),
        ("qo_indptr", {"qo_indptr": [0]}),
        ("qo_indptr", {"qo_indptr": [0, 4, 3]}),
        ("qo_indptr", {"qo_indptr": [[0, 3]]}),
        ("qo_indptr", {"qo_indptr": [0.0, 3.0]}),
        ("qo_indptr", {"qo_indptr": [0, 2**31]}),
        ("kv_indptr", {"kv_indptr": [0, 3, 5]}),
        ("kv_indptr", {"kv_indptr": [0, 3, 2, 5]}),
        ("kv_indices", {"kv_indices": [0]}),
        ("last_page_len", {"last_page_len": [1]}),
        ("fixed_split_size", {"fixed_split_size": -2}),
        ("num_colocated_ctas", {"num_colocated_ctas": -1}),
    ],
)
def test_a_wrong_plan_is_refused_by_name(
    ragged: BatchPrefillPlan, stand_ins: Any, name: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ragged.plan(**{"qo_indptr": QO, "kv_indptr": KV, **changes})
    assert caught.value.name == name
    assert stand_ins.calls(uri()) == []


def test_a_causal_request_has_no_more_queries_than_keys(stand_ins: Any) -> None:
    stand_ins.add(uri(), "batch_prefill", (0, 6, 3))
    plan = BatchPrefillPlan.ragged(
        attention(mask=MaskMode.CAUSAL), device=HOST, workspace=small(), runtime=stand_ins.runtime((0, 6, 3))
    )
    with pytest.raises(InvalidArgument, match="qo_indptr"):
        plan.plan([0, 3, 8], [0, 3, 7])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("kv_indices", {"kv_indices": [0, 1]}),
        ("kv_indices", {"kv_indices": [0, 1, -1]}),
        ("kv_indices", {"kv_indices": None}),
        ("last_page_len", {"last_page_len": [4, 1, 1]}),
        ("last_page_len", {"last_page_len": [4, 0, 9]}),
        ("last_page_len", {"last_page_len": [0, 0, 1]}),
        ("last_page_len", {"last_page_len": [4, 0]}),
        ("page_size", {"page_size": 0}),
        ("kv_indptr", {"kv_indptr": [0, 1, 3]}),
    ],
)
def test_a_wrong_paged_plan_is_refused_by_name(stand_ins: Any, name: str, changes: dict[str, Any]) -> None:
    stand_ins.add(uri(), "batch_prefill", (0, 6, 3))
    plan = BatchPrefillPlan.paged(
        attention(), device=HOST, workspace=small(), runtime=stand_ins.runtime((0, 6, 3))
    )
    good = {
        "qo_indptr": QO, "kv_indptr": [0, 1, 1, 3], "kv_indices": [0, 1, 2], "last_page_len": [4, 0, 1],
        "page_size": 8,
    }  # fmt: skip
    with pytest.raises(InvalidArgument) as caught:
        plan.plan(**{**good, **changes})
    assert caught.value.name == name
    assert stand_ins.calls(uri()) == []


def test_a_cache_must_hold_the_pages_that_were_planned_and_have_one_stride(stand_ins: Any) -> None:
    stand_ins.add(uri(), "batch_prefill", (0, 6, 3))
    plan = BatchPrefillPlan.paged(
        attention(), device=HOST, workspace=small(), runtime=stand_ins.runtime((0, 6, 3))
    )
    plan.plan([0, 1], [0, 2], kv_indices=[9, 3], last_page_len=[1], page_size=8)
    q = np.zeros((1, 8, 128), np.float16)
    full, short = np.zeros((10, 8, 2, 128), np.float16), np.zeros((9, 8, 2, 128), np.float16)
    gapped = np.zeros((10, 8, 4, 128), np.float16)[:, :, ::2]
    for name, k, v in (
        ("k_cache", short, full),
        ("v_cache", full, short),
        ("v_cache", full, gapped),
        ("k_cache", np.zeros((10, 2, 8, 128), np.float16), full),
    ):
        with pytest.raises(InvalidArgument) as caught:
            plan.run(q, k, v, q.copy())
        assert caught.value.name == name
    plan.run(q, gapped, np.zeros((10, 8, 4, 128), np.float16)[:, :, ::2], q.copy())
    assert [call.function for call in stand_ins.calls(uri())] == ["plan", "paged_run"]


def test_a_run_without_a_plan_or_after_anothers_is_refused(stand_ins: Any) -> None:
    stand_ins.add(uri(), "batch_prefill", (0, 6, 3))
    runtime, shared = stand_ins.runtime((0, 6, 3)), small()
    first, second = (
        BatchPrefillPlan.ragged(attention(), device=HOST, workspace=shared, runtime=runtime) for _ in range(2)
    )
    with pytest.raises(InvalidArgument, match="plan"):
        first.run(**GOOD)
    first.plan(QO, KV)
    second.plan(QO, KV)
    with pytest.raises(InvalidArgument) as caught:
        first.run(**GOOD)
    assert (caught.value.name, caught.value.found) == ("plan", "a later plan of another owner")
    second.run(**GOOD)
    assert [call.function for call in stand_ins.calls(uri())] == ["plan", "plan", "ragged_run"]


def test_a_planner_that_fails_leaves_no_plan_and_tells_its_text(
    ragged: BatchPrefillPlan, stand_ins: Any
) -> None:
    stand_ins.fail_next(uri(), "Buffer overflow when allocating memory")
    with pytest.raises(KernelCallFailed, match="Buffer overflow when allocating memory"):
        ragged.plan(QO, KV)
    with pytest.raises(InvalidArgument, match="plan"):
        ragged.run(**GOOD)
    ragged.plan(QO, KV)
    ragged.run(**GOOD)


def test_a_module_of_another_release_is_refused_with_both_signatures(stand_ins: Any) -> None:
    stand_ins.add(uri(), "batch_prefill", (0, 6, 18))
    with pytest.raises(SignatureMismatch) as caught:
        BatchPrefillPlan.ragged(
            attention(), device=HOST, workspace=small(), runtime=stand_ins.runtime((0, 6, 3))
        )
    assert str(caught.value.expected).count(",") == 18
    assert str(caught.value.found).count(",") == 19
    assert stand_ins.calls(uri()) == []


def test_a_missing_module_is_named_with_the_nearest(stand_ins: Any) -> None:
    stand_ins.add(uri(), "batch_prefill", (0, 6, 3))
    with pytest.raises(ModuleMissing) as caught:
        BatchPrefillPlan.ragged(
            attention(window_left=3), device=HOST, workspace=small(), runtime=stand_ins.runtime((0, 6, 3))
        )
    assert caught.value.uri == uri(swa=True)
    assert uri() in str(caught.value.found)


def test_index_arrays_larger_than_their_room_are_refused(stand_ins: Any) -> None:
    stand_ins.add(uri(), "batch_prefill", (0, 6, 3))
    room = Workspace(HOST, float_bytes=1 << 12, int_bytes=1 << 12, index_bytes=512)
    plan = BatchPrefillPlan.ragged(
        attention(), device=HOST, workspace=room, runtime=stand_ins.runtime((0, 6, 3))
    )
    with pytest.raises(InvalidArgument) as caught:
        plan.plan(list(range(200)), list(range(200)))
    assert (caught.value.name, caught.value.found) == ("workspace", 512)


def test_whole_numbers_serve_as_scalars(stand_ins: Any) -> None:
    stand_ins.add(uri(cap=True), "batch_prefill", (0, 6, 3))
    plan = BatchPrefillPlan.ragged(
        attention(logits_soft_cap=30, sm_scale=1),
        device=HOST,
        workspace=small(),
        runtime=stand_ins.runtime((0, 6, 3)),
    )
    plan.plan(QO, KV)
    plan.run(**GOOD)
    assert stand_ins.calls(uri(cap=True))[1].shapes[20:22] == [30.0, 1.0]


def test_factors_that_a_backend_does_not_take_are_refused(ragged: BatchPrefillPlan, stand_ins: Any) -> None:
    with pytest.raises(InvalidArgument, match="scales"):
        ragged.run(**GOOD, scales=Scales(k=0.5))
    assert stand_ins.calls(uri()) == []


@pytest.mark.parametrize("sm", [None, Sm(9, 0)])
def test_ragged_hnd_goes_to_fa2(stand_ins: Any, monkeypatch: pytest.MonkeyPatch, sm: Sm | None) -> None:
    monkeypatch.setattr(batch_prefill, "device_sm", lambda device: sm)
    stand_ins.add(uri(), "batch_prefill", (0, 6, 3))
    given = {"device": HOST, "workspace": small(), "runtime": stand_ins.runtime((0, 6, 3))}
    with pytest.raises(InvalidArgument, match="layout"):
        BatchPrefillPlan.ragged(attention(layout=Layout.HND), backend=Backend.FA3, **given)
    plan = BatchPrefillPlan.ragged(attention(layout=Layout.HND), **given)
    plan.plan(QO, KV)
    k = np.zeros((2, 13, 128), np.float16)
    with pytest.raises(InvalidArgument) as caught:
        plan.run(**GOOD)
    assert caught.value.name == "k"
    plan.run(**{**GOOD, "k": k, "v": k})
    assert stand_ins.calls(uri())[1].shapes[3:12] == [
        [8, 8, 128], [2, 13, 128], [2, 13, 128], [4], [4], [8, 8, 128], None, 0, 1,
    ]  # fmt: skip


@pytest.mark.usefixtures("hopper")
def test_factors_are_checked_like_every_tensor(stand_ins: Any, tensor: Any) -> None:
    name = uri("_sm90", dtypes="e4m3 e4m3 bf16")
    stand_ins.add(name, "batch_prefill_fp8_sm90", (0, 6, 3))
    plan = BatchPrefillPlan.ragged(
        attention(**FP8), device=HOST, workspace=small(), runtime=stand_ins.runtime((0, 6, 3))
    )
    plan.plan([0, 2], [0, 2])
    stand_ins.calls(name)
    q, k, out = tensor("e4m3", 2, 8, 128), tensor("e4m3", 2, 2, 128), tensor("bf16", 2, 8, 128)
    for wrong, scales in (
        ("scales.q", Scales(q=tensor("f32", 2))),
        ("scales.k", Scales(k=tensor("f16", 2))),
        ("scales.v", Scales(v=math.inf)),
    ):
        with pytest.raises(InvalidArgument) as caught:
            plan.run(q, k, k, out, scales=scales)
        assert caught.value.name == wrong
    assert stand_ins.calls(name) == []


def test_a_custom_mask_too_short_for_the_plan_is_refused(stand_ins: Any) -> None:
    stand_ins.add(uri(), "batch_prefill", (0, 6, 3))
    plan = BatchPrefillPlan.ragged(
        attention(mask=MaskMode.CUSTOM), device=HOST, workspace=small(), runtime=stand_ins.runtime((0, 6, 3))
    )
    plan.plan([0, 3], [0, 5])
    q, k = np.zeros((3, 8, 128), np.float16), np.zeros((5, 2, 128), np.float16)
    extras = Extras(custom_mask=np.zeros(1, np.uint8), mask_indptr=np.array([0, 1], np.int32))
    with pytest.raises(InvalidArgument, match="custom_mask"):
        plan.run(q, k, k, q.copy(), extras=extras)
