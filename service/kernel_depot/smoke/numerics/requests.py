"""Seeded attention requests: queries, keys and values, as kernels take them and as float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernel_depot.kernels.attention import Attention, Layout, PosEncoding
from kernel_depot.smoke.numerics.bench import Bench, Operand
from kernel_depot.smoke.numerics.formats import Reals, encode
from kernel_depot.smoke.numerics.paging import Paging, starts
from kernel_depot.smoke.numerics.references import Request

WINDOW: Final = 40
CAP: Final = 5.0
"""Keys to the left, and the soft cap of logits, of modules that have them: both small enough to count."""

ROPE: Final[dict[str, Any]] = {"rope_scale": 2.0, "rope_theta": 5e4}

FILLER: Final = 200.0
"""What lies in cache slots that no request owns: finite in every format, and far from all values."""

LSE_LIMIT: Final = 2e-3
LSE_LIMIT_BENT: Final = 2e-2
"""Of the softmax's sum, base 2, absolute; the second where the kernel's own tanh or rotation comes in."""


@dataclass(frozen=True)
class Batch:
    """Tensors and values of requests one after another."""

    q: Operand
    k: Operand
    v: Operand
    qo_lengths: Sequence[int]
    kv_lengths: Sequence[int]

    @property
    def requests(self) -> list[Request]:
        """Return each request's queries, keys and values."""
        qo, kv = starts(self.qo_lengths), starts(self.kv_lengths)
        return [
            (self.q.exact[a:b], self.k.exact[c:d], self.v.exact[c:d])
            for a, b, c, d in zip(qo, qo[1:], kv, kv[1:], strict=False)
        ]

    def keys(self, bench: Bench, attention: Attention) -> tuple[Any, Any]:
        """Return keys and values as ragged tensors of the attention's layout."""
        if attention.layout is Layout.NHD:
            return self.k.tensor, self.v.tensor
        k, v = (bench.place(attention.dtype_kv, np.swapaxes(one.bits, 0, 1)) for one in (self.k, self.v))
        return k, v

    def caches(self, bench: Bench, attention: Attention, paging: Paging) -> tuple[Any, Any]:
        """Return keys and values as paged caches."""
        k, v = (
            bench.place(
                attention.dtype_kv,
                paging.cache(one.bits, filler=filler(attention.dtype_kv), layout=attention.layout),
            )
            for one in (self.k, self.v)
        )
        return k, v


def batch(bench: Bench, attention: Attention, qo_lengths: Sequence[int], kv_lengths: Sequence[int]) -> Batch:
    """Return requests of these lengths."""
    heads = attention.num_qo_heads, attention.num_kv_heads
    tokens = sum(kv_lengths)
    return Batch(
        bench.normal(attention.dtype_q, sum(qo_lengths), heads[0], attention.head_dim_qk),
        bench.normal(attention.dtype_kv, tokens, heads[1], attention.head_dim_qk),
        bench.normal(attention.dtype_kv, tokens, heads[1], attention.head_dim_vo),
        qo_lengths,
        kv_lengths,
    )


def filler(dtype: str) -> Any:
    """Return the bits of FILLER in a format."""
    return encode(dtype, np.array([FILLER]))[0]


def slopes(bench: Bench, attention: Attention) -> tuple[Reals | None, Any]:
    """Return ALiBi's slopes and their tensor, each None where the attention has none."""
    if attention.pos_encoding is not PosEncoding.ALIBI:
        return None, None
    values: NDArray[Any] = 2.0 ** -np.arange(1, 1 + attention.num_qo_heads)
    operand = bench.operand("f32", values)
    return operand.exact, operand.tensor


def lse_limit(attention: Attention) -> float:
    """Return how far the softmax's sum may be off."""
    plain = attention.pos_encoding is PosEncoding.NONE and not attention.logits_soft_cap
    return LSE_LIMIT if plain and not attention.f16_qk_reduction else LSE_LIMIT_BENT
