"""Gated delta rule prefill: its argument list, its two ways of grouping heads, and where it is gone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels.errors import InvalidArgument, SignatureMismatch
from kernel_depot.kernels.gdn import gdn_prefill

URI = "gdn_prefill_sm90"


def tensors(*, q: int = 4, k: int = 2, v: int = 2, **changes: Any) -> dict[str, Any]:
    """9 tokens of 2 sequences, with these heads of 64."""
    heads = max(q, v)
    return {
        "out": np.zeros((9, heads, 64), np.float16),
        "out_state": np.zeros((2, heads, 64, 64), np.float32),
        "q": np.zeros((9, q, 64), np.float16),
        "k": np.zeros((9, k, 64), np.float16),
        "v": np.zeros((9, v, 64), np.float16),
        "cu_seqlens": np.array([0, 4, 9], np.int64),
        **changes,
    }


@pytest.mark.parametrize(
    "heads", [{"q": 4, "k": 2, "v": 2}, {"q": 2, "k": 2, "v": 4}, {"q": 3, "k": 3, "v": 3}]
)
def test_all_is_sent_in_its_place(stand_ins: Any, heads: dict[str, int]) -> None:
    stand_ins.add(URI, "gdn", (0, 6, 3))
    most = max(heads.values())
    gates = {name: np.zeros((9, most), np.float32) for name in ("alpha", "beta")}
    state = np.zeros((2, most, 64, 64), np.float32)
    given = tensors(**heads)
    gdn_prefill(**given, state=state, **gates, scale=0.25, runtime=stand_ins.runtime((0, 6, 3)))
    (call,) = stand_ins.calls(URI)
    packed = [[9, heads[name], 64] for name in ("q", "k", "v")]
    states = [2, most, 64, 64]
    assert call.shapes == [
        [9, most, 64], states, *packed, [3], states, [9, most], [9, most], 0.25, [128],
    ]  # fmt: skip
    sent = [part["address"] for part in call.arguments[:6]]
    assert sent == [given[name].ctypes.data for name in ("out", "out_state", "q", "k", "v", "cu_seqlens")]


def test_what_may_be_left_out_is_none(stand_ins: Any) -> None:
    stand_ins.add(URI, "gdn", (0, 6, 3))
    gdn_prefill(**tensors(), runtime=stand_ins.runtime((0, 6, 3)))
    assert stand_ins.calls(URI)[0].shapes[6:10] == [None, None, None, 0]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("k", {"q": np.zeros((9, 4, 64), np.float16), "k": np.zeros((9, 4, 64), np.float16)}),
        ("k", {"q": np.zeros((9, 3, 64), np.float16), "out": np.zeros((9, 3, 64), np.float16)}),
        ("k", {"v": np.zeros((9, 6, 64), np.float16)}),
        ("q", {"q": np.zeros((9, 4, 64), np.float32)}),
        ("q", {"q": np.zeros((9, 8, 64), np.float16)[:, ::2]}),
        ("v", {"v": np.zeros((8, 2, 64), np.float16)}),
        ("v", {"v": np.zeros((9, 2, 64), np.float32)}),
        ("out", {"out": np.zeros((9, 2, 64), np.float16)}),
        ("out_state", {"out_state": np.zeros((2, 4, 64, 64), np.float16)}),
        ("out_state", {"out_state": np.zeros((3, 4, 64, 64), np.float32)}),
        ("state", {"state": np.zeros((2, 4, 64, 32), np.float32)}),
        ("alpha", {"alpha": np.zeros((9, 2), np.float32)}),
        ("beta", {"beta": np.zeros((9, 4), np.float16)}),
        ("cu_seqlens", {"cu_seqlens": np.array([0, 4, 9], np.int32)}),
        ("cu_seqlens", {"cu_seqlens": np.array([0], np.int64)}),
        ("scale", {"scale": math.nan}),
        ("workspace", {"workspace": np.zeros(127, np.uint8)}),
        ("workspace", {"workspace": np.zeros(128, np.float32)}),
    ],
)
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_sent(
    stand_ins: Any, name: str, changes: dict[str, Any]
) -> None:
    stand_ins.add(URI, "gdn", (0, 6, 3))
    given = tensors()
    with pytest.raises(InvalidArgument) as caught:
        gdn_prefill(**{**given, **changes}, runtime=stand_ins.runtime((0, 6, 3)))
    assert caught.value.name == name
    assert stand_ins.calls(URI) == []


@pytest.mark.parametrize("release", [(0, 6, 14), (0, 6, 18), (0, 7, 4)])
def test_releases_that_lack_it_are_named(stand_ins: Any, release: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"before 0\.6\.14") as caught:
        gdn_prefill(**tensors(), runtime=stand_ins.runtime(release))
    assert caught.value.found == ".".join(map(str, release))


def test_a_module_with_three_arguments_fewer_than_its_release_has_is_refused(stand_ins: Any) -> None:
    stand_ins.add(URI, "gdn", (0, 6, 3))
    with pytest.raises(SignatureMismatch):
        gdn_prefill(**tensors(), runtime=stand_ins.runtime((0, 6, 10)))
