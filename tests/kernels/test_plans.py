"""Index arrays on the host: what is accepted, what is said of what is not, and packed masks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.plans import (
    INT32_MAX,
    host_integers,
    mask_indptr,
    pack_mask,
    read_indptr,
    read_pages,
)


class OnDevice:
    """An array that says it lies on a GPU; reading it would wait for that."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("a device tensor was read")


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40))
def test_an_indptr_of_lengths_is_read_as_it_is(lengths: list[int]) -> None:
    starts = [0, *np.cumsum(lengths).tolist()]
    for spelled in (starts, tuple(starts), np.array(starts), np.array(starts, np.uint32)):
        found = read_indptr("qo_indptr", spelled)
        assert (found.dtype, found.tolist()) == (np.int32, starts)


@given(st.lists(st.integers(-INT32_MAX - 2, INT32_MAX + 2), max_size=12))
def test_an_indptr_is_right_or_refused_and_never_changed(numbers: list[int]) -> None:
    right = (
        len(numbers) >= 2
        and numbers[0] == 0
        and max(numbers) <= INT32_MAX
        and all(low <= high for low, high in itertools.pairwise(numbers))
    )
    if right:
        assert read_indptr("kv_indptr", numbers).tolist() == numbers
        return
    with pytest.raises(InvalidArgument) as caught:
        read_indptr("kv_indptr", numbers)
    assert caught.value.name == "kv_indptr"


@pytest.mark.parametrize("values", [OnDevice(), None, "text", 3, [[1]], [1.5], [True], [{}], [1, [2]]])
def test_what_are_no_host_integers_is_refused(values: object) -> None:
    with pytest.raises(InvalidArgument, match="host"):
        host_integers("kv_indices", values)


def test_host_integers_are_a_copy() -> None:
    source = np.array([1, 2], np.int32)
    found = host_integers("kv_indices", source)
    source[0] = 9
    assert found.tolist() == [1, 2]


@given(st.integers(1, 64), st.lists(st.integers(0, 700), min_size=1, max_size=20))
def test_pages_count_the_tokens_they_were_made_for(page_size: int, lengths: list[int]) -> None:
    counts = [-(-length // page_size) for length in lengths]
    last = [(length - 1) % page_size + 1 if length else 0 for length in lengths]
    pages = read_pages([0, *np.cumsum(counts).tolist()], last, page_size, batch_size=len(lengths))
    assert pages.lengths.tolist() == lengths
    assert pages.count == sum(counts)


def test_a_request_longer_than_int32_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="2\\*\\*31"):
        read_pages([0, 3], [1], 1 << 30, batch_size=1)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(0, 2**32 - 1),
)
def test_packed_masks_are_read_back_bit_by_bit(shapes: list[tuple[int, int]], seed: int) -> None:
    random = np.random.default_rng(seed)
    masks = [random.random(shape) < 0.5 for shape in shapes]
    packed = pack_mask(masks)
    starts = mask_indptr(*(np.array([mask.shape[axis] for mask in masks], np.int32) for axis in (0, 1)))
    assert starts[-1] == packed.size
    for mask, start in zip(masks, starts.tolist(), strict=False):
        rows, keys = mask.shape
        for row in range(rows):
            for key in range(keys):
                bit = row * keys + key
                assert bool(packed[start + bit // 8] >> (bit % 8) & 1) == mask[row, key]


@pytest.mark.parametrize("mask", [np.zeros((2, 2)), np.zeros(4, bool), [[1, 0]]])
def test_only_boolean_matrices_are_packed(mask: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"masks\[1\]"):
        pack_mask([np.zeros((1, 1), bool), mask])


def test_a_mask_of_two_gibibytes_is_refused() -> None:
    lengths = np.array([150_000], np.int32)
    with pytest.raises(InvalidArgument, match="custom_mask"):
        mask_indptr(lengths, lengths)
