"""Numeric cases judge modules that compute on the CPU: right ones pass, each planted fault is caught."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest

from kernel_depot.kernels.memory import CPU, Device
from kernel_depot.platform import Sm
from kernel_depot.smoke.numerics.session import judge
from kernel_depot.smoke.report import Outcome, SmokeReport, Status


@pytest.fixture
def on_cpu(node: Any, libtvm_ffi: bytes) -> Any:
    """A node whose modules are judged on CPU tensors."""
    node.runtime(libtvm_ffi)
    node.host = dataclasses.replace(node.host, on_cpu=True)
    return node


def numeric(report: SmokeReport, module: str) -> list[Outcome]:
    return [one for one in report.outcomes if one.check == "numeric" and one.subject == module]


def judged(node: Any, *modules: str, timeout: float = 60.0) -> list[Outcome]:
    """Return the outcomes of numeric cases alone."""
    digest = node.publish()
    return judge(node.cache.root, digest, modules, device=Device(CPU), timeout=timeout)


def result(report: SmokeReport, module: str) -> Any:
    return next(one for one in report.results() if one.module == module)


def test_a_right_module_passes_every_case(on_cpu: Any, computing: Any) -> None:
    on_cpu.module("norm", computing("norm"))
    report = on_cpu.smoke()
    cases = numeric(report, "norm")
    assert [one for one in cases if one.status is not Status.PASS] == []
    names = {str(one.case).split()[0] for one in cases}
    assert names == {
        "rmsnorm", "gemma_rmsnorm", "fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "layernorm",
    }  # fmt: skip
    assert all(one.error is not None and 0 < one.error < one.limit for one in cases)
    assert report.ok
    assert result(report, "norm").status is Status.PASS
    assert f"{len(cases)} of {len(cases)} cases" in result(report, "norm").why
    assert [row[:3] for row in report.rows() if row[0] == "numeric"] == [("numeric", "norm", "pass")]


def test_one_flipped_constant_is_caught_in_every_case_and_said(on_cpu: Any, computing: Any) -> None:
    on_cpu.module("norm", computing("norm", fault="kEpsilon"))
    report = on_cpu.smoke()
    cases = numeric(report, "norm")
    assert {one.status for one in cases} == {Status.FAIL}
    assert not report.ok
    first = cases[0]
    assert first.case
    assert "relative to its norm" in first.detail
    assert first.expected is not None
    assert first.found is not None
    assert first.expected != first.found
    said = result(report, "norm")
    assert (said.status, said.expected, said.found) == (Status.FAIL, first.expected, first.found)
    assert all(str(one.case) in said.why for one in cases)
    assert any(first.detail in row[3] and f"expected {first.expected}" in row[3] for row in report.rows())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kSign", "relative to its norm"),
        ("kWeight", "relative to its norm"),
        ("kNan", "not finite"),
        ("kBeside", "beside it"),
        ("kAgain", "a second launch differs"),
    ],
)
def test_a_planted_fault_is_caught(on_cpu: Any, computing: Any, fault: str, words: str) -> None:
    on_cpu.module("norm", computing("norm", fault=fault))
    bad = [one for one in judged(on_cpu, "norm") if one.status is Status.FAIL]
    assert bad
    assert all(words in one.detail for one in bad)


def test_a_crash_and_a_hang_are_outcomes_and_what_comes_after_still_runs(on_cpu: Any, computing: Any) -> None:
    on_cpu.module("norm", computing("norm", fault="kCrash"))
    on_cpu.module("page", computing("page"))
    report = on_cpu.smoke()
    crashed = [one for one in numeric(report, "norm") if one.status is Status.CRASHED]
    assert [one.detail.split(":")[0] for one in crashed] == ["SIGSEGV", "SIGSEGV"]
    assert numeric(report, "norm")[-1].status is Status.SKIPPED
    assert {one.status for one in numeric(report, "page")} == {Status.PASS}
    assert result(report, "norm").status is Status.CRASHED
    assert not report.ok


def test_a_hang_ends_with_its_case(on_cpu: Any, computing: Any) -> None:
    on_cpu.module("norm", computing("norm", fault="kHang"))
    crashed = [one for one in judged(on_cpu, "norm", timeout=2) if one.status is Status.CRASHED]
    assert [one.detail for one in crashed] == ["no answer in 2 s"] * 2


def test_broken_files_are_refused_and_the_others_are_still_judged(on_cpu: Any, computing: Any) -> None:
    whole = computing("norm")
    on_cpu.module("norm", whole)
    on_cpu.module("page", whole[: len(whole) // 2])
    on_cpu.module("gdn_prefill_sm90", whole, sms=("sm_90a",))
    on_cpu.host = dataclasses.replace(on_cpu.host, sm=Sm(12, 0))
    report = on_cpu.smoke()
    assert {name: result(report, name).status for name in ("norm", "page", "gdn_prefill_sm90")} == {
        "norm": Status.PASS,
        "page": Status.REFUSED,
        "gdn_prefill_sm90": Status.REFUSED,
    }
    assert "cut off" in result(report, "page").why
    assert "no code for sm_120" in result(report, "gdn_prefill_sm90").why
    assert not report.ok


def test_a_module_without_a_case_is_skipped_and_not_passed(on_cpu: Any, computing: Any) -> None:
    on_cpu.module("sampling", computing("norm"))
    report = on_cpu.smoke()
    [outcome] = numeric(report, "sampling")
    assert (outcome.status, outcome.case) == (Status.SKIPPED, None)
    assert "calls no module of this kind" in outcome.detail
    assert result(report, "sampling").status is Status.SKIPPED
    assert result(report, "sampling").why == outcome.detail
    assert report.ok


def test_a_case_calls_no_other_module_than_its_own(on_cpu: Any, computing: Any) -> None:
    """In 0.6.3 the name of a paged prefill has no such end: it is said, and nothing is called."""
    name = (
        "batch_prefill_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_dtype_idx_i32_head_dim_qk_64_"
        "head_dim_vo_64_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
    )
    on_cpu.module(f"{name}_kv_stride_equal", computing("norm"))
    [outcome] = numeric(on_cpu.smoke(), f"{name}_kv_stride_equal")
    assert outcome.status is Status.SKIPPED
    assert outcome.detail == f"in release 0.6.3 kernel-depot calls {name} instead"


def test_a_module_for_gpus_is_not_judged_without_one(on_cpu: Any, computing: Any) -> None:
    on_cpu.module("norm", computing("norm"), sms=("sm_90a",))
    report = on_cpu.smoke()
    [outcome] = numeric(report, "norm")
    assert (outcome.status, outcome.detail) == (Status.SKIPPED, "no GPU")
    assert result(report, "norm").status is Status.SKIPPED


def test_what_the_environment_lacks_is_named(
    on_cpu: Any, computing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tvm_ffi" else find(name))
    on_cpu.module("norm", computing("norm"))
    [outcome] = numeric(on_cpu.smoke(), "norm")
    assert outcome.detail == "needs apache-tvm-ffi: pip install 'kernel-depot[kernels]'"


def test_a_runtime_of_another_abi_is_said_for_every_module(on_cpu: Any, computing: Any) -> None:
    on_cpu.tvm_ffi_version = "0.2.0"
    on_cpu.module("norm", computing("norm"))
    [outcome] = numeric(on_cpu.smoke(), "norm")
    assert outcome.status is Status.REFUSED
    assert "another ABI" in outcome.detail
