"""Appending to paged caches: argument lists, layouts, and indices of the wrong length or dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels.attention import Layout
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.page import append_paged_kv_cache, append_paged_mla_kv_cache

RELEASES = [(0, 6, 3), (0, 6, 18), (0, 7, 4)]


def half(*shape: int) -> Any:
    return np.zeros(shape, np.float16)


def indices(**changes: Any) -> dict[str, Any]:
    """The index tensors of 7 tokens of 2 requests that have 4 pages together."""
    return {
        "batch_indices": np.zeros(7, np.int32),
        "positions": np.zeros(7, np.int32),
        "kv_indices": np.zeros(4, np.int32),
        "kv_indptr": np.zeros(3, np.int32),
        "kv_last_page_len": np.zeros(2, np.int32),
        **changes,
    }


def cache(layout: Layout = Layout.NHD) -> Any:
    return half(4, 16, 2, 128) if layout is Layout.NHD else half(4, 2, 16, 128)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("layout", list(Layout))
def test_keys_and_values_are_sent_in_their_places(
    stand_ins: Any, release: tuple[int, ...], layout: Layout
) -> None:
    stand_ins.add("page", "page", release)
    given = {
        "key": half(7, 2, 128),
        "value": half(7, 2, 128),
        "k_cache": cache(layout),
        "v_cache": cache(layout),
    }
    append_paged_kv_cache(**given, **indices(), layout=layout, runtime=stand_ins.runtime(release))
    (call,) = stand_ins.calls("page")
    pages = [4, 16, 2, 128] if layout is Layout.NHD else [4, 2, 16, 128]
    assert call.function == "append_paged_kv_cache"
    assert call.shapes == [
        [7, 2, 128], [7, 2, 128], [7], [7], pages, pages, [4], [3], [2], int(layout),
    ]  # fmt: skip
    sent = [call.arguments[at]["address"] for at in (0, 1, 4, 5)]
    assert sent == [given[name].ctypes.data for name in ("key", "value", "k_cache", "v_cache")]


@pytest.mark.parametrize("release", RELEASES)
def test_latent_keys_are_sent_in_their_places(stand_ins: Any, release: tuple[int, ...]) -> None:
    stand_ins.add("page", "page", release)
    append_paged_mla_kv_cache(
        half(7, 512), half(7, 64), ckv_cache=half(4, 16, 512), kpe_cache=half(4, 16, 64), **indices(),
        runtime=stand_ins.runtime(release),
    )  # fmt: skip
    (call,) = stand_ins.calls("page")
    assert call.function == "append_paged_mla_kv_cache"
    assert call.shapes == [[7, 512], [7, 64], [7], [7], [4, 16, 512], [4, 16, 64], [4], [3], [2]]


@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "e5m2"])
def test_every_dtype_of_a_cache_is_appended_to(stand_ins: Any, tensor: Any, dtype: str) -> None:
    stand_ins.add("page", "page", (0, 6, 3))
    append_paged_kv_cache(
        tensor(dtype, 7, 2, 128), tensor(dtype, 7, 2, 128), k_cache=tensor(dtype, 4, 16, 2, 128),
        v_cache=tensor(dtype, 4, 16, 2, 128), **indices(), runtime=stand_ins.runtime((0, 6, 3)),
    )  # fmt: skip
    assert len(stand_ins.calls("page")) == 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("key", half(7, 128)),
        ("key", np.zeros((7, 2, 128), np.float32)),
        ("key", half(7, 2, 256)[:, :, ::2]),
        ("value", half(6, 2, 128)),
        ("value", np.zeros((7, 2, 128), np.float32)),
        ("k_cache", half(4, 16, 4, 128)),
        ("k_cache", half(4, 16, 2, 64)),
        ("k_cache", half(4, 16, 256)),
        ("v_cache", half(5, 16, 2, 128)),
        ("v_cache", half(4, 32, 2, 128)[:, ::2]),
        ("v_cache", np.zeros((4, 16, 2, 128), np.float32)),
        ("batch_indices", np.zeros(6, np.int32)),
        ("batch_indices", np.zeros(7, np.int64)),
        ("batch_indices", np.zeros(14, np.int32)[::2]),
        ("positions", np.zeros((7, 1), np.int32)),
        ("kv_indices", np.zeros(4, np.int64)),
        ("kv_indptr", np.zeros(2, np.int32)),
        ("kv_last_page_len", np.zeros(2, np.uint32)),
        ("kv_last_page_len", np.zeros(0, np.int32)),
    ],
)
def test_a_wrong_tensor_is_refused_by_name_and_nothing_is_sent(stand_ins: Any, name: str, wrong: Any) -> None:
    stand_ins.add("page", "page", (0, 6, 3))
    given = {
        "key": half(7, 2, 128), "value": half(7, 2, 128), "k_cache": cache(), "v_cache": cache(), **indices(),
    }  # fmt: skip
    with pytest.raises(InvalidArgument) as caught:
        append_paged_kv_cache(**{**given, name: wrong}, runtime=stand_ins.runtime((0, 6, 3)))
    assert caught.value.name == name
    assert stand_ins.calls("page") == []


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ckv", half(7, 256)),
        ("kpe", half(7, 128)),
        ("kpe", half(6, 64)),
        ("ckv_cache", half(4, 16, 576)),
        ("kpe_cache", half(4, 8, 64)),
        ("kpe_cache", np.zeros((4, 16, 64), np.float32)),
        ("positions", np.zeros(8, np.int32)),
    ],
)
def test_a_wrong_latent_tensor_is_refused_by_name(stand_ins: Any, name: str, wrong: Any) -> None:
    stand_ins.add("page", "page", (0, 6, 3))
    given = {
        "ckv": half(7, 512), "kpe": half(7, 64), "ckv_cache": half(4, 16, 512), "kpe_cache": half(4, 16, 64),
        **indices(),
    }  # fmt: skip
    with pytest.raises(InvalidArgument) as caught:
        append_paged_mla_kv_cache(**{**given, name: wrong}, runtime=stand_ins.runtime((0, 6, 3)))
    assert caught.value.name == name
    assert stand_ins.calls("page") == []
