"""Batch MLA: the explicit scale, each release's argument list, and the plan that 0.7 leaves to its caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels import mla
from kernel_depot.kernels.attention import Backend, MaskMode
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import CPU, Device
from kernel_depot.kernels.mla import BatchMlaPlan
from kernel_depot.kernels.workspaces import Workspace
from kernel_depot.platform import Sm

HOST = Device(CPU)
RELEASES = [(0, 6, 3), (0, 6, 18), (0, 7, 4)]
BASE = (
    "batch_mla_attention_dtype_q_f16_dtype_kv_f16_dtype_o_f16_dtype_idx_i32_head_dim_ckv_512_head_dim_kpe_64"
    "_profiler_False"
)
SCALE = 192**-0.5


def uri(release: tuple[int, ...], end: str = "") -> str:
    return BASE + ("_planabi2" if release >= (0, 7) else "") + end


def small() -> Workspace:
    return Workspace(HOST, float_bytes=1 << 12, int_bytes=1 << 12, index_bytes=1 << 12)


def make(stand_ins: Any, release: tuple[int, ...], **options: Any) -> BatchMlaPlan:
    given = {"num_heads": 4, "dtype": "f16", "sm_scale": SCALE, "device": HOST, "workspace": small()}
    return BatchMlaPlan(**{**given, **options}, runtime=stand_ins.runtime(release))


def tensors() -> dict[str, Any]:
    """3 query rows of 4 heads, and 5 pages of 8."""
    return {
        "q_nope": np.zeros((3, 4, 512), np.float16),
        "q_pe": np.zeros((3, 4, 64), np.float16),
        "ckv_cache": np.zeros((5, 8, 512), np.float16),
        "kpe_cache": np.zeros((5, 8, 64), np.float16),
        "out": np.zeros((3, 4, 512), np.float16),
    }


PLAN = {"qo_indptr": [0, 1, 3], "kv_indptr": [0, 2, 3], "kv_indices": [4, 0, 2], "kv_lengths": [9, 8]}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("mask", [MaskMode.NONE, MaskMode.CAUSAL])
@pytest.mark.parametrize("backend", [Backend.FA2, Backend.FA3])
def test_plan_and_run_send_every_argument_in_its_place(
    stand_ins: Any,
    release: tuple[int, ...],
    mask: MaskMode,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hopper = backend is Backend.FA3
    if hopper:
        monkeypatch.setattr(mla, "device_sm", lambda device: Sm(9, 0))
    name = uri(release, "_sm90" if hopper else "")
    stand_ins.add(name, "batch_mla_sm90" if hopper else "batch_mla", release)
    plan = make(stand_ins, release, mask=mask)
    assert (plan.uri, plan.backend) == (name, backend)
    plan.plan(**PLAN, page_size=8)
    plan.run(**tensors(), lse=np.zeros((3, 4), np.float32), lse_base_e=True)
    planned, run = stand_ins.calls(name)
    causal = mask is MaskMode.CAUSAL
    assert planned.shapes == [[4096], [4096], [4096], [3], [3], [2], 4, 512, causal]
    later = [] if release < (0, 6, 14) else [1.0, 1.0, None]
    assert run.shapes == [
        [4096], [4096], run.arguments[2], [3, 4, 512], [3, 4, 64], [5, 8, 512], [5, 8, 64], [3], [3, 4, 512],
        [3, 4], int(causal), 4, 8, SCALE, True, *later,
    ]  # fmt: skip
    assert run.arguments[2][1:] == [7, 11]
    assert np.frombuffer(bytes(run.arguments[7]["head"]), np.int32).tolist() == [4, 0, 2]
    count = run.arguments[2][0]
    # The planner writes its number into the plan: 0.6 also on the device, 0.7 in pinned memory alone.
    assert run.arguments[1]["head"][:17] == [count] * 16 + [0]


def test_a_scale_must_be_given(stand_ins: Any) -> None:
    stand_ins.add(uri((0, 6, 3)), "batch_mla", (0, 6, 3))
    given: dict[str, Any] = {"num_heads": 4, "dtype": "f16", "device": HOST}
    with pytest.raises(TypeError, match="sm_scale"):
        BatchMlaPlan(**given, runtime=stand_ins.runtime((0, 6, 3)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("num_heads", {"num_heads": 0}),
        ("sm_scale", {"sm_scale": 0.0}),
        ("dtype", {"dtype": "e4m3"}),
        ("mask", {"mask": MaskMode.CUSTOM}),
        ("backend", {"backend": Backend.FA3}),
        ("workspace", {"device": Device(CPU, 1)}),
    ],
)
def test_what_kernels_cannot_compute_is_refused_at_once(
    stand_ins: Any, name: str, options: dict[str, Any]
) -> None:
    stand_ins.add(uri((0, 6, 3)), "batch_mla", (0, 6, 3))
    with pytest.raises(InvalidArgument) as caught:
        make(stand_ins, (0, 6, 3), **options)
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qo_indptr", {"qo_indptr": [0]}),
        ("kv_indptr", {"kv_indptr": [0, 3]}),
        ("kv_indices", {"kv_indices": [0, 1]}),
        ("kv_indices", {"kv_indices": [0, 1, -1]}),
        ("kv_lengths", {"kv_lengths": [17, 8]}),
        ("kv_lengths", {"kv_lengths": [-1, 8]}),
        ("kv_lengths", {"kv_lengths": [9]}),
        ("page_size", {"page_size": 0}),
        ("qo_indptr", {"kv_lengths": [9, 1]}),
    ],
)
def test_a_wrong_plan_is_refused_by_name(stand_ins: Any, name: str, changes: dict[str, Any]) -> None:
    stand_ins.add(uri((0, 6, 3)), "batch_mla", (0, 6, 3))
    plan = make(stand_ins, (0, 6, 3), mask=MaskMode.CAUSAL)
    with pytest.raises(InvalidArgument) as caught:
        plan.plan(**{**PLAN, "page_size": 8, **changes})
    assert caught.value.name == name
    assert stand_ins.calls(uri((0, 6, 3))) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q_nope", np.zeros((3, 4, 256), np.float16)),
        ("q_nope", np.zeros((2, 4, 512), np.float16)),
        ("q_pe", np.zeros((3, 4, 128), np.float16)),
        ("q_pe", np.zeros((3, 4, 64), np.float32)),
        ("ckv_cache", np.zeros((5, 4, 512), np.float16)),
        ("ckv_cache", np.zeros((4, 8, 512), np.float16)),
        ("kpe_cache", np.zeros((5, 8, 128), np.float16)[:, :, ::2]),
        ("out", np.zeros((3, 8, 512), np.float16)[:, ::2]),
        ("lse", np.zeros((3, 2), np.float32)),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(stand_ins: Any, name: str, value: Any) -> None:
    stand_ins.add(uri((0, 6, 3)), "batch_mla", (0, 6, 3))
    plan = make(stand_ins, (0, 6, 3))
    with pytest.raises(InvalidArgument, match="plan"):
        plan.run(**tensors())
    plan.plan(**PLAN, page_size=8)
    stand_ins.calls(uri((0, 6, 3)))
    with pytest.raises(InvalidArgument) as caught:
        plan.run(**{**tensors(), name: value})
    assert caught.value.name == name
    assert stand_ins.calls(uri((0, 6, 3))) == []
