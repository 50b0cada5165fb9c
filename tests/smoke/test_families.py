"""Each family's cases on modules that compute: right ones pass, and what each parameter means is noticed."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_depot.kernels.memory import CPU, Device
from kernel_depot.smoke.numerics.session import judge
from kernel_depot.smoke.report import Outcome, Status


def name_of(
    family: str,
    *,
    q: str = "f16",
    kv: str = "",
    posenc: int = 0,
    bent: bool = False,
) -> str:
    """The name of a module; `bent` ones have a window and a soft cap."""
    if family in ("page", "norm"):
        return family
    if family == "gdn":
        return "gdn_prefill_sm90"
    index = "dtype_idx_i32_" if family.startswith("batch") else ""
    dtypes = f"dtype_q_{q}_dtype_kv_{kv or q}_dtype_o_{q}_{index}"
    if family == "batch_mla":
        return f"batch_mla_attention_{dtypes}head_dim_ckv_512_head_dim_kpe_64_profiler_False"
    tail = "_f16qk_False" if family.endswith("prefill") else ""
    return (
        f"{family}_with_kv_cache_{dtypes}head_dim_qk_64_head_dim_vo_64_posenc_{posenc}_use_swa_{bent}"
        f"_use_logits_cap_{bent}{tail}"
    )


def judged(node: Any, *modules: str) -> list[Outcome]:
    return judge(node.cache.root, node.publish(), modules, device=Device(CPU), timeout=120)


ATTENTION = ["single_prefill", "batch_prefill", "single_decode", "batch_decode"]


def test_right_modules_pass(node: Any, computing: Any) -> None:
    all_pass(node, computing, [(family, {}) for family in (*ATTENTION, "batch_mla", "gdn", "page")])


def test_a_modules_name_says_what_it_is_asked_for(node: Any, computing: Any) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("single_decode", {"bent": True}),
        ("single_decode", {"posenc": 1}),
        ("single_decode", {"posenc": 2}),
        ("single_decode", {"q": "bf16", "kv": "e5m2"}),
        ("batch_decode", {"kv": "e4m3"}),
        ("single_prefill", {"q": "bf16"}),
        ("batch_prefill", {"bent": True, "kv": "e4m3"}),
    ]
    all_pass(node, computing, asked)


def all_pass(node: Any, computing: Any, asked: list[tuple[str, dict[str, Any]]]) -> None:
    names = [name_of(family, **options) for family, options in asked]
    for name, (family, options) in zip(names, asked, strict=True):
        node.module(name, computing(family, posenc=options.get("posenc", 0)))
    outcomes = judged(node, *names)
    assert [one for one in outcomes if one.status is not Status.PASS] == []
    for name in names:
        assert sum(one.subject == name for one in outcomes) >= 3


@pytest.mark.parametrize(
    ("family", "fault", "options"),
    [
        ("single_decode", "kScale", {}),
        ("single_decode", "kBase", {}),
        ("single_decode", "kWindow", {"bent": True}),
        ("batch_decode", "kLast", {}),
        ("batch_mla", "kLast", {}),
        ("gdn", "kScale", {}),
        ("page", "kSlot", {}),
        ("page", "kLast", {}),
    ],
)
def test_planted_faults_are_caught(
    node: Any, computing: Any, family: str, fault: str, options: dict[str, Any]
) -> None:
    uri = name_of(family, **options)
    node.module(uri, computing(family, fault=fault))
    outcomes = judged(node, uri)
    assert {one.status for one in outcomes} <= {Status.PASS, Status.FAIL}
    bad = [one for one in outcomes if one.status is Status.FAIL]
    assert bad
    assert all(one.expected != one.found for one in bad)


def test_a_rotation_that_is_left_out_is_caught(node: Any, computing: Any) -> None:
    uri = name_of("single_decode", posenc=1)
    node.module(uri, computing("single_decode", posenc=0))
    assert Status.FAIL in {one.status for one in judged(node, uri)}


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        (name_of("batch_prefill") + "_sm90", "fa2 on any GPU but sm90"),
        (name_of("batch_mla") + "_sm90", "needs sm90"),
        ("fused_moe_90", "on the GPUs that it is for"),
    ],
)
def test_what_this_device_cannot_run_is_skipped(node: Any, computing: Any, uri: str, reason: str) -> None:
    node.module(uri, computing("page"))
    outcomes = judged(node, uri)
    assert {one.status for one in outcomes} == {Status.SKIPPED}
    assert all(reason in one.detail for one in outcomes)
