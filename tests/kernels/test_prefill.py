"""What a single prefill sends for each release and backend, and what it refuses before it sends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels import prefill
from kernel_depot.kernels.arguments import Scales
from kernel_depot.kernels.attention import Backend, Layout, MaskMode, PosEncoding
from kernel_depot.kernels.errors import InvalidArgument, KernelCallFailed, ModuleMissing
from kernel_depot.kernels.plans import pack_mask
from kernel_depot.kernels.prefill import single_prefill
from kernel_depot.kernels.workspaces import SCRATCH_BYTES
from kernel_depot.platform import Sm

RELEASES = [(0, 6, 3), (0, 6, 18), (0, 7, 4)]
SCALE = 1.0 / math.sqrt(128)


def uri(end: str = "", *, dtypes: str = "f16 f16 f16", posenc: int = 0, **options: bool) -> str:
    q, kv, o = dtypes.split()
    flags = {"swa": False, "cap": False, "f16qk": False, **options}
    return (
        f"single_prefill_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{o}_head_dim_qk_128_head_dim_vo_128"
        f"_posenc_{posenc}_use_swa_{flags['swa']}_use_logits_cap_{flags['cap']}_f16qk_{flags['f16qk']}{end}"
    )


def tensors(layout: Layout = Layout.NHD) -> dict[str, Any]:
    """5 queries of 8 heads and 9 keys of 2, all zero."""
    keys = (9, 2, 128) if layout is Layout.NHD else (2, 9, 128)
    return {
        "q": np.zeros((5, 8, 128), np.float16),
        "k": np.zeros(keys, np.float16),
        "v": np.zeros(keys, np.float16),
        "out": np.zeros((5, 8, 128), np.float16),
    }


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("layout", list(Layout))
def test_fa2_sends_every_argument_in_its_place(
    stand_ins: Any, release: tuple[int, ...], layout: Layout
) -> None:
    name = uri(swa=True, cap=True, f16qk=True)
    stand_ins.add(name, "single_prefill", release)
    given, lse = tensors(layout), np.zeros((5, 8), np.float32)
    single_prefill(
        **given, mask=MaskMode.CAUSAL, layout=layout, window_left=4, logits_soft_cap=50.0, sm_scale=0.25,
        rope_scale=2.0, rope_theta=1e6, f16_qk_reduction=True, lse=lse, runtime=stand_ins.runtime(release),
    )  # fmt: skip
    (call,) = stand_ins.calls(name)
    scales = [None, None] if release >= (0, 6, 10) else []
    keys = list(given["k"].shape)
    assert call.shapes == [
        [5, 8, 128], keys, keys, [SCRATCH_BYTES], [5, 8, 128], [5, 8], 1, int(layout), 4, None, None, *scales,
        50.0, 0.25, 0.5, 1e-6,
    ]  # fmt: skip
    sent = [call.arguments[at]["address"] for at in (0, 1, 2, 4, 5)]
    assert sent == [array.ctypes.data for array in (*given.values(), lse)]


@pytest.mark.parametrize("release", RELEASES)
def test_fa3_has_arguments_of_its_own(
    stand_ins: Any, release: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "device_sm", lambda device: Sm(9, 0))
    stand_ins.add(uri("_sm90"), "single_prefill_sm90", release)
    single_prefill(**tensors(), backend=Backend.FA3, runtime=stand_ins.runtime(release))
    (call,) = stand_ins.calls(uri("_sm90"))
    assert call.shapes[5:] == [None, 0, 0, -1, None, 0.0, SCALE, 1.0]


def test_fa3_reads_keys_as_nhd_alone(stand_ins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "device_sm", lambda device: Sm(9, 0))
    stand_ins.add(uri("_sm90"), "single_prefill_sm90", (0, 6, 3))
    hnd = {**tensors(Layout.HND), "layout": Layout.HND, "backend": Backend.FA3}
    with pytest.raises(InvalidArgument, match="layout"):
        single_prefill(**hnd, runtime=stand_ins.runtime((0, 6, 3)))
    assert stand_ins.calls(uri("_sm90")) == []


def test_a_custom_mask_and_alibi_arrive_as_owned_tensors(stand_ins: Any) -> None:
    stand_ins.add(uri(posenc=2), "single_prefill", (0, 6, 3))
    mask = pack_mask([np.tri(5, 9, 4, dtype=bool)])
    slopes = np.linspace(0.1, 0.8, 8, dtype=np.float32)
    single_prefill(
        **tensors(), mask=MaskMode.CUSTOM, pos_encoding=PosEncoding.ALIBI, custom_mask=mask,
        alibi_slopes=slopes, runtime=stand_ins.runtime((0, 6, 3)),
    )  # fmt: skip
    (call,) = stand_ins.calls(uri(posenc=2))
    assert call.shapes[6:11] == [2, 0, -1, [6], [8]]
    assert call.arguments[9]["head"] == mask.tolist()
    assert call.arguments[10]["address"] == slopes.ctypes.data


def test_a_callers_scratch_is_used_when_it_is_large_enough(stand_ins: Any, tensor: Any) -> None:
    stand_ins.add(uri(), "single_prefill", (0, 6, 3))
    runtime = stand_ins.runtime((0, 6, 3))
    for wrong in (tensor("u16", SCRATCH_BYTES // 2), tensor("u8", SCRATCH_BYTES - 1)):
        with pytest.raises(InvalidArgument, match="workspace"):
            single_prefill(**tensors(), workspace=wrong, runtime=runtime)
    assert stand_ins.calls(uri()) == []
    room = tensor("u8", SCRATCH_BYTES)
    single_prefill(**tensors(), workspace=room, runtime=runtime)
    assert stand_ins.calls(uri())[0].arguments[3]["address"] == room.data_ptr()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("q", {"q": np.zeros((5, 128), np.float16)}),
        ("num_qo_heads", {"q": np.zeros((5, 7, 128), np.float16)}),
        ("q", {"q": np.zeros((10, 8, 128), np.float16), "out": np.zeros((10, 8, 128), np.float16)}),
        ("k", {"k": np.zeros((9, 2, 64), np.float16)}),
        ("v", {"v": np.zeros((9, 1, 128), np.float16)}),
        ("v", {"v": np.zeros((8, 2, 128), np.float16)}),
        ("dtype_kv", {"k": np.zeros((9, 2, 128), np.float32)}),
        ("v", {"v": np.zeros((9, 2, 128), np.float32)}),
        ("dtype_o", {"out": np.zeros((5, 8, 128), np.float32)}),
        ("out", {"out": np.zeros((5, 8, 64), np.float16)}),
        ("lse", {"lse": np.zeros((5, 8), np.float64)}),
        ("custom_mask", {"custom_mask": np.zeros(6, np.uint8)}),
        ("custom_mask", {"mask": MaskMode.CUSTOM}),
        ("custom_mask", {"mask": MaskMode.CUSTOM, "custom_mask": np.zeros(5, np.uint8)}),
        ("alibi_slopes", {"pos_encoding": PosEncoding.ALIBI}),
        ("alibi_slopes", {"alibi_slopes": np.zeros(8, np.float32)}),
        ("mask", {"mask": MaskMode.MULTI_ITEM}),
        ("window_left", {"window_left": -2}),
        ("logits_soft_cap", {"logits_soft_cap": math.inf}),
        ("logits_soft_cap", {"logits_soft_cap": -1.0}),
        ("sm_scale", {"sm_scale": 0.0}),
        ("sm_scale", {"sm_scale": math.nan}),
        ("rope_theta", {"rope_theta": -1.0}),
        ("stream", {"stream": "no stream"}),
        ("backend", {"backend": Backend.FA3}),
        ("scales.v", {"scales": Scales(v=2.0)}),
    ],
)
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_sent(
    stand_ins: Any, name: str, changes: dict[str, Any]
) -> None:
    for options in ({}, {"cap": True}):
        stand_ins.add(uri(**options), "single_prefill", (0, 6, 3))
    stand_ins.add(uri(posenc=2), "single_prefill", (0, 6, 3))
    runtime = stand_ins.runtime((0, 6, 3))
    with pytest.raises(InvalidArgument) as caught:
        single_prefill(**{**tensors(), "mask": MaskMode.CAUSAL, **changes}, runtime=runtime)
    assert caught.value.name == name
    assert stand_ins.calls(uri()) == []


def test_f16_reduction_is_for_f16_queries_alone(stand_ins: Any, tensor: Any) -> None:
    stand_ins.add(uri(), "single_prefill", (0, 6, 3))
    half = {key: tensor("bf16", *value.shape) for key, value in tensors().items()}
    with pytest.raises(InvalidArgument, match="f16_qk_reduction"):
        single_prefill(**half, f16_qk_reduction=True, runtime=stand_ins.runtime((0, 6, 3)))


def test_an_fp8_cache_has_a_module_of_its_own(stand_ins: Any, tensor: Any) -> None:
    name = uri(dtypes="f16 e4m3 f16")
    stand_ins.add(name, "single_prefill", (0, 6, 3))
    cache = {key: tensor("e4m3", 9, 2, 128) for key in ("k", "v")}
    single_prefill(**{**tensors(), **cache}, runtime=stand_ins.runtime((0, 6, 3)))
    (call,) = stand_ins.calls(name)
    assert [call.arguments[1][key] for key in ("code", "bits")] == [10, 8]


def test_the_kernels_own_text_arrives(stand_ins: Any) -> None:
    stand_ins.add(uri(), "single_prefill", (0, 6, 3))
    stand_ins.fail_next(uri(), "SinglePrefillWithKVCache kernel launch failed, error: invalid argument")
    with pytest.raises(KernelCallFailed, match="kernel launch failed, error: invalid argument") as caught:
        single_prefill(**tensors(), runtime=stand_ins.runtime((0, 6, 3)))
    assert caught.value.data["kind"] == "RuntimeError"


def test_the_stream_that_is_given_is_the_kernels_and_restored_after_a_failure(stand_ins: Any) -> None:
    stand_ins.add(uri(), "single_prefill", (0, 6, 3))
    runtime = stand_ins.runtime((0, 6, 3))
    for stream in (4096, 0):
        stand_ins.fail_next(uri(), "on purpose")
        with pytest.raises(KernelCallFailed):
            single_prefill(**tensors(), stream=stream, runtime=runtime)
    single_prefill(**tensors(), runtime=runtime)
    assert [call.stream for call in stand_ins.calls(uri())] == [4096, 0, 0]


def test_a_missing_module_is_named(stand_ins: Any) -> None:
    stand_ins.add(uri(), "single_prefill", (0, 6, 3))
    with pytest.raises(ModuleMissing) as caught:
        single_prefill(**tensors(), window_left=2, runtime=stand_ins.runtime((0, 6, 3)))
    assert caught.value.uri == uri(swa=True)
