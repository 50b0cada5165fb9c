"""Cases of gated delta rule prefill: packed sequences, one token and odd lengths, three head groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from kernel_depot.kernels.gdn import gdn_prefill
from kernel_depot.smoke.numerics.bench import Bench
from kernel_depot.smoke.numerics.case import Case
from kernel_depot.smoke.numerics.paging import starts
from kernel_depot.smoke.numerics.references import delta_rule
from kernel_depot.smoke.numerics.verdict import Distance, near

LENGTHS: Final = (1, 64, 129, 37)
DIM: Final = 128
HEADS: Final = {"equal": (2, 2, 2), "grouped": (4, 1, 1), "more values": (2, 2, 8)}
"""Heads of queries, keys and values."""

LIMITS: Final = {"f16": 5e-3, "bf16": 2e-2}
"""Errors add up in a sequence's state. FlashInfer's tests allow 1e-3 and 1e-2 an element of the output."""


def cases() -> Iterator[Case]:
    """Yield the module's cases."""
    for dtype in LIMITS:
        for word, heads in HEADS.items():
            for gated in (False, True):
                name = f"gdn_prefill {dtype} {word}{' gated' if gated else ''}"
                yield Case(name, partial(_prefill, dtype=dtype, heads=heads, gated=gated))


def _prefill(bench: Bench, *, dtype: str, heads: tuple[int, int, int], gated: bool) -> list[Distance]:
    tokens, most = sum(LENGTHS), max(heads)
    q = bench.normal(dtype, tokens, heads[0], DIM)
    directions = bench.random.standard_normal((tokens, heads[1], DIM))
    k = bench.operand(dtype, directions / np.linalg.norm(directions, axis=-1, keepdims=True))
    v = bench.normal(dtype, tokens, heads[2], DIM)
    bounds = starts(LENGTHS)
    gates: dict[str, Any] = {}
    if gated:
        gates = {
            "alpha": bench.uniform("f32", tokens, most, low=0.9),
            "beta": bench.uniform("f32", tokens, most),
            "state": bench.normal("f32", len(LENGTHS), most, DIM, DIM, scale=0.1),
        }
    out = bench.output(dtype, tokens, most, DIM)
    last = bench.output("f32", len(LENGTHS), most, DIM, DIM)
    gdn_prefill(
        out.tensor,
        last.tensor,
        q.tensor,
        k.tensor,
        v.tensor,
        bench.place("i64", np.array(bounds)),
        **{name: operand.tensor for name, operand in gates.items()},
        runtime=bench.runtime,
    )
    ones = np.ones((tokens, most))
    alpha, beta = (gates[name].exact if gated else ones for name in ("alpha", "beta"))
    first = gates["state"].exact if gated else np.zeros((len(LENGTHS), most, DIM, DIM))
    outs, states = [], []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = slice(start, end)
        one = delta_rule(
            q.exact[part],
            k.exact[part],
            v.exact[part],
            first[number],
            alpha[part],
            beta[part],
            scale=1 / math.sqrt(DIM),
        )
        outs.append(one[0])
        states.append(one[1])
    return [
        near("out", out, np.concatenate(outs), limit=LIMITS[dtype]),
        near("state", last, np.stack(states), limit=LIMITS[dtype]),
    ]
