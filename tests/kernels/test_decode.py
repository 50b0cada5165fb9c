"""Single decode: its argument list, the group sizes its kernels have, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels.attention import Layout, PosEncoding
from kernel_depot.kernels.decode import group_sizes, single_decode
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.workspaces import SCRATCH_BYTES

RELEASES = [(0, 6, 3), (0, 6, 18), (0, 7, 4)]
SCALE = 1.0 / math.sqrt(128)


def uri(*, dtypes: str = "f16 f16 f16", posenc: int = 0, **options: bool) -> str:
    q, kv, o = dtypes.split()
    flags = {"swa": False, "cap": False, **options}
    return (
        f"single_decode_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{o}_head_dim_qk_128_head_dim_vo_128"
        f"_posenc_{posenc}_use_swa_{flags['swa']}_use_logits_cap_{flags['cap']}"
    )


def tensors(layout: Layout = Layout.NHD, *, heads: int = 8) -> dict[str, Any]:
    keys = (9, 2, 128) if layout is Layout.NHD else (2, 9, 128)
    return {
        "q": np.zeros((heads, 128), np.float16),
        "k": np.zeros(keys, np.float16),
        "v": np.zeros(keys, np.float16),
        "out": np.zeros((heads, 128), np.float16),
    }


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("layout", list(Layout))
def test_every_argument_is_sent_in_its_place(
    stand_ins: Any, release: tuple[int, ...], layout: Layout
) -> None:
    name = uri(posenc=2, swa=True, cap=True)
    stand_ins.add(name, "single_decode", release)
    given, lse, slopes = tensors(layout), np.zeros(8, np.float32), np.ones(8, np.float32)
    single_decode(
        **given, layout=layout, pos_encoding=PosEncoding.ALIBI, window_left=7, logits_soft_cap=20.0,
        rope_scale=8.0, rope_theta=2e4, alibi_slopes=slopes, lse=lse, runtime=stand_ins.runtime(release),
    )  # fmt: skip
    (call,) = stand_ins.calls(name)
    keys = list(given["k"].shape)
    assert call.shapes == [
        [8, 128], keys, keys, [SCRATCH_BYTES], [8, 128], [8], int(layout), 7, [8], 20.0, SCALE, 0.125, 5e-5,
    ]  # fmt: skip
    sent = [call.arguments[at]["address"] for at in (0, 1, 2, 4, 5, 8)]
    assert sent == [array.ctypes.data for array in (*given.values(), lse, slopes)]


def test_an_fp8_cache_has_a_module_of_its_own(stand_ins: Any, tensor: Any) -> None:
    name = uri(dtypes="f16 e4m3 f16")
    stand_ins.add(name, "single_decode", (0, 6, 3))
    cache = {key: tensor("e4m3", 9, 2, 128) for key in ("k", "v")}
    single_decode(**{**tensors(), **cache}, runtime=stand_ins.runtime((0, 6, 3)))
    assert len(stand_ins.calls(name)) == 1


@pytest.mark.parametrize(
    ("release", "sizes"),
    [
        ((0, 6, 3), {1, 2, 3, 4, 8}),
        ((0, 6, 18), {1, 2, 3, 4, 6, 8}),
        ((0, 7, 4), {1, 2, 3, 4, 6, 8, 16}),
    ],
)
def test_group_sizes_that_kernels_lack_are_refused_with_the_prefill_named(
    stand_ins: Any, release: tuple[int, ...], sizes: set[int]
) -> None:
    assert set(group_sizes(release)) == sizes
    stand_ins.add(uri(), "single_decode", release)
    runtime = stand_ins.runtime(release)
    for size in range(1, 18):
        if size in sizes:
            single_decode(**tensors(heads=2 * size), runtime=runtime)
            continue
        with pytest.raises(InvalidArgument) as caught:
            single_decode(**tensors(heads=2 * size), runtime=runtime)
        assert caught.value.name == "num_qo_heads"
        assert "single_prefill" in str(caught.value.remedy)
    assert len(stand_ins.calls(uri())) == len(sizes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("q", {"q": np.zeros((1, 8, 128), np.float16)}),
        ("q", {"q": np.zeros((8, 256), np.float16)[:, ::2]}),
        ("q", {"q": np.zeros((8, 256), np.float16)[:, :128]}),
        ("num_qo_heads", {"q": np.zeros((7, 128), np.float16), "out": np.zeros((7, 128), np.float16)}),
        ("k", {"k": np.zeros((9, 128), np.float16)}),
        ("k", {"k": np.zeros((9, 2, 64), np.float16)}),
        ("k", {"k": np.zeros((9, 4, 128), np.float16)[:, ::2]}),
        ("v", {"v": np.zeros((8, 2, 128), np.float16)}),
        ("v", {"v": np.zeros((9, 2, 64), np.float16)}),
        ("out", {"out": np.zeros((8, 64), np.float16)}),
        ("dtype_o", {"out": np.zeros((8, 128), np.float32)}),
        ("lse", {"lse": np.zeros((8, 1), np.float32)}),
        ("lse", {"lse": np.zeros(8, np.float16)}),
        ("alibi_slopes", {"alibi_slopes": np.zeros(8, np.float32)}),
        ("alibi_slopes", {"pos_encoding": PosEncoding.ALIBI, "alibi_slopes": np.zeros(2, np.float32)}),
        ("workspace", {"workspace": np.zeros(1024, np.uint8)}),
        ("workspace", {"workspace": np.zeros(SCRATCH_BYTES // 4, np.float32)}),
    ],
)
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_sent(
    stand_ins: Any, name: str, changes: dict[str, Any]
) -> None:
    stand_ins.add(uri(), "single_decode", (0, 6, 3))
    stand_ins.add(uri(posenc=2), "single_decode", (0, 6, 3))
    with pytest.raises(InvalidArgument) as caught:
        single_decode(**{**tensors(), **changes}, runtime=stand_ins.runtime((0, 6, 3)))
    assert caught.value.name == name
    assert stand_ins.calls(uri()) == []
