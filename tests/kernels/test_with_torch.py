"""Calls with torch's tensors, which are told apart in one step once such tensors have passed all checks.

Skipped where torch is not installed; the tests of tests/gpu go the same way.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from kernel_depot.kernels.attention import Attention
from kernel_depot.kernels.batch_decode import BatchDecodePlan
from kernel_depot.kernels.batch_prefill import BatchPrefillPlan
from kernel_depot.kernels.errors import InvalidArgument, KernelCallFailed
from kernel_depot.kernels.memory import CPU, Device
from kernel_depot.kernels.mla import BatchMlaPlan
from kernel_depot.kernels.norm import fused_add_rmsnorm, rmsnorm
from kernel_depot.kernels.tensors import alike, fingerprint
from kernel_depot.kernels.workspaces import Workspace

HOST = Device(CPU)
REST = (
    "dtype_q_f16_dtype_kv_f16_dtype_o_f16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128_posenc_0"
    "_use_swa_False"
)
PREFILL = f"batch_prefill_with_kv_cache_{REST}_use_logits_cap_False_f16qk_False"
DECODE = f"batch_decode_with_kv_cache_{REST}_use_logits_cap_False"
MLA = (
    "batch_mla_attention_dtype_q_f16_dtype_kv_f16_dtype_o_f16_dtype_idx_i32_head_dim_ckv_512_head_dim_kpe_64"
    "_profiler_False"
)


@pytest.fixture(scope="module")
def torch() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torch")


def attention() -> Attention:
    return Attention(
        num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, head_dim_vo=128, dtype_q="f16", dtype_kv="f16",
        dtype_o="f16",
    )  # fmt: skip


def prepared(stand_ins: Any, torch: Any, family: str) -> tuple[str, Any, list[Any]]:
    """Return a module's name, a plan made, and tensors that it runs with; `out` is the last."""
    given: dict[str, Any] = {"device": HOST, "workspace": Workspace(HOST, float_bytes=64, int_bytes=64)}

    def zeros(*shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.float16)

    if family == "batch_prefill":
        stand_ins.add(PREFILL, family, (0, 6, 3))
        ragged = BatchPrefillPlan.ragged(attention(), runtime=stand_ins.runtime((0, 6, 3)), **given)
        ragged.plan([0, 3], [0, 5])
        return PREFILL, ragged, [zeros(3, 8, 128), zeros(5, 2, 128), zeros(5, 2, 128), zeros(3, 8, 128)]
    if family == "batch_decode":
        stand_ins.add(DECODE, family, (0, 6, 3))
        decode = BatchDecodePlan(attention(), runtime=stand_ins.runtime((0, 6, 3)), **given)
        decode.plan([0, 1], [0], [4], page_size=8)
        cache = (1, 8, 2, 128)
        return DECODE, decode, [zeros(1, 8, 128), zeros(*cache), zeros(*cache), zeros(1, 8, 128)]
    stand_ins.add(MLA, family, (0, 6, 3))
    latent = BatchMlaPlan(
        num_heads=4, dtype="f16", sm_scale=0.1, runtime=stand_ins.runtime((0, 6, 3)), **given
    )
    latent.plan([0, 1], [0, 1], [0], [4], page_size=8)
    shapes = ((1, 4, 512), (1, 4, 64), (1, 8, 512), (1, 8, 64), (1, 4, 512))
    return MLA, latent, [zeros(*shape) for shape in shapes]


@pytest.mark.parametrize("family", ["batch_prefill", "batch_decode", "batch_mla"])
def test_a_call_like_the_last_sends_the_same_and_one_unlike_it_is_checked(
    stand_ins: Any, torch: Any, family: str
) -> None:
    name, plan, tensors = prepared(stand_ins, torch, family)
    for _ in range(3):
        plan.run(*tensors)
    fresh = [tensor.clone() for tensor in tensors]
    plan.run(*fresh)
    first, *repeated, last = stand_ins.calls(name)[-4:]
    for call in repeated:
        assert call.arguments == first.arguments
    assert last.shapes == first.shapes
    assert [part["address"] for part in last.arguments[3 : 3 + len(tensors) - 1]] == [
        tensor.data_ptr() for tensor in fresh[:-1]
    ]
    for at, tensor in enumerate(tensors):
        for wrong in (tensor.float(), tensor[..., :-1], tensor[None]):
            with pytest.raises(InvalidArgument):
                plan.run(*tensors[:at], wrong, *tensors[at + 1 :])
    assert stand_ins.calls(name) == []
    if family != "batch_mla":
        plan.run(*tensors, enable_pdl=True)
        (call,) = stand_ins.calls(name)
        assert [value for value in call.arguments if isinstance(value, bool)] == [True]
    plan.run(*tensors)
    assert len(stand_ins.calls(name)) == 1


@pytest.mark.parametrize("family", ["batch_prefill", "batch_decode", "batch_mla"])
def test_a_failure_of_a_repeated_call_tells_the_kernels_text(stand_ins: Any, torch: Any, family: str) -> None:
    name, plan, tensors = prepared(stand_ins, torch, family)
    plan.run(*tensors)
    stand_ins.fail_next(name, "an illegal memory access was encountered")
    with pytest.raises(KernelCallFailed, match="an illegal memory access was encountered") as caught:
        plan.run(*tensors)
    assert caught.value.data["function"].startswith(name)


@pytest.mark.parametrize("family", ["batch_prefill", "batch_decode", "batch_mla"])
def test_a_later_plan_is_looked_at_anew(stand_ins: Any, torch: Any, family: str) -> None:
    name, plan, tensors = prepared(stand_ins, torch, family)
    plan.run(*tensors)
    if family == "batch_prefill":
        plan.plan([0, 2], [0, 5])
    elif family == "batch_decode":
        plan.plan([0, 1, 1], [0], [4, 0], page_size=8)
    else:
        plan.plan([0, 2], [0, 1], [0], [4], page_size=8)
    stand_ins.calls(name)
    with pytest.raises(InvalidArgument):
        plan.run(*tensors)
    assert stand_ins.calls(name) == []


def test_only_tensors_that_are_alike_pass(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def pair() -> tuple[Any, Any]:
        return torch.zeros(4, 6, dtype=torch.float16), torch.zeros(3, dtype=torch.int32)

    first, second = pair()
    others = [
        (first.float(), second),
        (first.t().contiguous().t(), second),
        (first[:3], second),
        (first, second.long()),
        (first, second[:2]),
        (first, torch.zeros(6, dtype=torch.int32)[::2]),
        (second, first),
        (first[None], second),
        (first.numpy(), second),
        (first, None),
    ]
    tests = [alike(first, second)]
    with monkeypatch.context() as without_guards:
        if hasattr(torch._C, "_dynamo"):
            without_guards.setattr(torch._C._dynamo, "guards", None)
        tests.append(alike(first, second))
    tests.append(alike(first, second))
    for test in tests:
        assert test is not None
        assert test(first, second)
        assert test(*pair())
        for other in others:
            assert not test(*other)
            assert fingerprint(*other) != fingerprint(first, second)
    assert alike(first, first)(first, first)
    assert alike(first, second.numpy()) is None


def test_norms_repeat_and_tell_calls_apart(stand_ins: Any, torch: Any) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    runtime = stand_ins.runtime((0, 6, 3))

    def half(*shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.float16)

    for _ in range(3):
        for rows in ((4, 64), (4, 2, 64)):
            rmsnorm(half(*rows), half(*rows), half(64), eps=1e-5, runtime=runtime)
            rmsnorm(half(*rows), half(*rows), half(64), eps=1e-5, enable_pdl=True, runtime=runtime)
            rmsnorm(half(*rows), half(*rows), half(64), eps=1e-3, runtime=runtime)
        fused_add_rmsnorm(half(4, 64), half(4, 64), half(64), eps=1e-5, runtime=runtime)
    calls = stand_ins.calls("norm")[-7:]
    assert [(call.function, call.arguments[3], call.arguments[4]) for call in calls] == [
        *[("rmsnorm", 1e-5, False), ("rmsnorm", 1e-5, True), ("rmsnorm", 1e-3, False)] * 2,
        ("fused_add_rmsnorm", 1e-5, False),
    ]
    for out, x, weight in (
        (half(4, 64), half(4, 64), half(32)),
        (half(4, 64), half(4, 64).float(), half(64)),
        (half(3, 64), half(4, 64), half(64)),
    ):
        with pytest.raises(InvalidArgument):
            rmsnorm(out, x, weight, eps=1e-3, runtime=runtime)
    assert stand_ins.calls("norm") == []
    rmsnorm(half(4, 64), half(4, 64), half(64), eps=1e-3, runtime=runtime)
    stand_ins.fail_next("norm", "RMSNorm failed")
    with pytest.raises(KernelCallFailed, match="RMSNorm failed"):
        rmsnorm(half(4, 64), half(4, 64), half(64), eps=1e-3, runtime=runtime)
