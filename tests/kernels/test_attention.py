"""Which attention can be, and which backend computes it: FlashInfer's own choice."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_depot.kernels.attention import (
    FA3_HEAD_DIMS,
    Attention,
    Backend,
    MaskMode,
    PosEncoding,
    choose_backend,
)
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.platform import Sm

HOPPER = Sm(9, 0)
FP8 = {"dtype_q": "e4m3", "dtype_kv": "e4m3", "dtype_o": "bf16"}


def attention(**options: Any) -> Attention:
    given = {
        "num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 128, "head_dim_vo": 128, "dtype_q": "f16",
        "dtype_kv": "f16", "dtype_o": "f16", **options,
    }  # fmt: skip
    return Attention(**given)


@pytest.mark.parametrize("sm", [None, Sm(8, 0), Sm(8, 9), Sm(10, 0), Sm(10, 3), Sm(11, 0), Sm(12, 0)])
def test_everywhere_but_on_hopper_it_is_fa2(sm: Sm | None) -> None:
    assert choose_backend(attention(), Backend.AUTO, sm=sm) is Backend.FA2
    with pytest.raises(InvalidArgument, match="fa2 on any GPU but sm90"):
        choose_backend(attention(), Backend.FA3, sm=sm)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mask": MaskMode.CUSTOM}, "mask"),
        ({"pos_encoding": PosEncoding.ROPE}, "pos_encoding"),
        ({"pos_encoding": PosEncoding.ALIBI}, "pos_encoding"),
        ({"f16_qk_reduction": True}, "f16_qk_reduction"),
        ({"dtype_kv": "e4m3"}, "dtype_kv"),
        ({"head_dim_qk": 96, "head_dim_vo": 96}, "head_dim_qk"),
    ],
)
def test_on_hopper_what_fa3_cannot_compute_goes_to_fa2(options: dict[str, Any], name: str) -> None:
    asked = attention(**options)
    assert choose_backend(asked, Backend.AUTO, sm=HOPPER) is Backend.FA2
    with pytest.raises(InvalidArgument) as caught:
        choose_backend(asked, Backend.FA3, sm=HOPPER)
    assert caught.value.name == name


@pytest.mark.parametrize("mask", [MaskMode.NONE, MaskMode.CAUSAL, MaskMode.MULTI_ITEM])
def test_on_hopper_it_is_fa3_unless_fa2_is_asked_for(mask: MaskMode) -> None:
    asked = attention(mask=mask)
    assert choose_backend(asked, Backend.AUTO, sm=HOPPER) is Backend.FA3
    assert choose_backend(asked, Backend.FA2, sm=HOPPER) is Backend.FA2


@pytest.mark.parametrize("dims", sorted(FA3_HEAD_DIMS))
def test_fa3_has_four_pairs_of_head_dimensions(dims: tuple[int, int]) -> None:
    asked = attention(head_dim_qk=dims[0], head_dim_vo=dims[1])
    assert choose_backend(asked, Backend.AUTO, sm=HOPPER) is Backend.FA3


def test_fp8_queries_are_fa3s_alone() -> None:
    assert choose_backend(attention(**FP8), Backend.AUTO, sm=HOPPER) is Backend.FA3
    for wanted, sm in ((Backend.FA2, HOPPER), (Backend.AUTO, Sm(8, 9))):
        with pytest.raises(InvalidArgument, match="dtype_q"):
            choose_backend(attention(**FP8), wanted, sm=sm)
    assert choose_backend(attention(**FP8, window_left=4), Backend.AUTO, sm=HOPPER) is Backend.FA3
    with pytest.raises(InvalidArgument, match="head_dim_vo"):
        choose_backend(attention(**FP8, head_dim_qk=192), Backend.AUTO, sm=HOPPER)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("num_qo_heads", {"num_qo_heads": 0}),
        ("num_qo_heads", {"num_qo_heads": 9}),
        ("num_kv_heads", {"num_kv_heads": True}),
        ("head_dim_qk", {"head_dim_qk": 128.0}),
        ("dtype_q", {"dtype_q": "f32"}),
        ("dtype_kv", {"dtype_kv": "bf16"}),
        ("dtype_o", {"dtype_o": "bf16"}),
        ("dtype_kv", {**FP8, "dtype_kv": "e5m2"}),
        ("dtype_o", {**FP8, "dtype_o": "e4m3"}),
        ("logits_soft_cap", {**FP8, "logits_soft_cap": 1.0}),
        ("window_left", {"window_left": -2}),
        ("window_left", {"window_left": 4, "mask": MaskMode.MULTI_ITEM}),
        ("logits_soft_cap", {"logits_soft_cap": float("nan")}),
        ("sm_scale", {"sm_scale": -0.1}),
        ("rope_scale", {"rope_scale": 0.0}),
        ("rope_theta", {"rope_theta": float("inf")}),
    ],
)
def test_values_outside_their_domain_are_refused_by_name(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        attention(**options)
    assert caught.value.name == name
    assert caught.value.problem()["argument"] == name
