"""Paged caches: requests' tokens scattered over pages in no order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernel_depot.kernels.attention import Layout


def starts(lengths: Sequence[int]) -> list[int]:
    """Return where each of consecutive pieces starts, and where the last ends."""
    return [0, *np.cumsum(lengths).tolist()]


@dataclass(frozen=True)
class Paging:
    """Where the tokens of requests lie. `slots` [tokens] are page number x page_size + place in the page."""

    page_size: int
    pages: int
    indptr: list[int]
    indices: list[int]
    last_page_len: list[int]
    slots: NDArray[np.int64]

    @classmethod
    def shuffled(cls, lengths: Sequence[int], *, page_size: int, random: np.random.Generator) -> Paging:
        """Give each request the pages it needs, in no order, some pages left to nobody."""
        counts = [-(-length // page_size) for length in lengths]
        pages = sum(counts) + 3
        indices = random.permutation(pages)[: sum(counts)]
        indptr = starts(counts)
        slots = [
            indices[start + np.arange(length) // page_size] * page_size + np.arange(length) % page_size
            for start, length in zip(indptr, lengths, strict=False)
        ]
        last = [(length - 1) % page_size + 1 if length else 0 for length in lengths]
        return cls(page_size, pages, indptr, indices.tolist(), last, np.concatenate(slots))

    def cache(self, rows: NDArray[Any], *, filler: Any, layout: Layout = Layout.NHD) -> NDArray[Any]:
        """Return a cache that holds `rows` [tokens, ...], `filler` in the slots that nobody owns.

        [pages, page_size, ...], or with HND [pages, heads, page_size, dim].
        """
        cache = np.full((self.pages * self.page_size, *rows.shape[1:]), filler, rows.dtype)
        cache[self.slots] = rows
        cache = cache.reshape(self.pages, self.page_size, *rows.shape[1:])
        return np.ascontiguousarray(np.swapaxes(cache, 1, 2)) if layout is Layout.HND else cache
