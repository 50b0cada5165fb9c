"""Cases of the module `norm`: every function, with an epsilon that counts, since it is easily lost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from kernel_depot.kernels import norm
from kernel_depot.smoke.numerics.bench import Bench
from kernel_depot.smoke.numerics.case import LIMITS, Case
from kernel_depot.smoke.numerics.references import layer_normalised, rms_normalised
from kernel_depot.smoke.numerics.verdict import Distance, near, repeated

EPS: Final = 1e-3
SPREAD: Final = 0.05
"""Standard deviation of the input: its mean square is 2.5e-3, of which EPS is a good part."""

SHAPES: Final = ((1, 128), (7, 4096), (33, 1536), (5, 333))
HEADS: Final = ((1, 1, 64), (5, 8, 128))
_FUNCTIONS: Final = {
    "rmsnorm": norm.rmsnorm,
    "gemma_rmsnorm": norm.gemma_rmsnorm,
    "fused_add_rmsnorm": norm.fused_add_rmsnorm,
    "gemma_fused_add_rmsnorm": norm.gemma_fused_add_rmsnorm,
}


def cases() -> Iterator[Case]:
    """Yield the module's cases."""
    for dtype in LIMITS:
        for name in _FUNCTIONS:
            run = _added if "fused" in name else _normalised
            for shape in (*SHAPES, *(HEADS if name == "rmsnorm" else ())):
                size = "x".join(map(str, shape))
                yield Case(f"{name} {dtype} {size}", partial(run, name=name, dtype=dtype, shape=shape))
    for rows, hidden in SHAPES[:3]:
        yield Case(f"layernorm bf16 {rows}x{hidden}", partial(_layer, rows=rows, hidden=hidden))


def _normalised(bench: Bench, *, name: str, dtype: str, shape: tuple[int, ...]) -> list[Distance]:
    x = bench.normal(dtype, *shape, scale=SPREAD)
    weight = bench.normal(dtype, shape[-1])
    out, again = bench.output(dtype, *shape), bench.output(dtype, *shape)
    for target in (out, again):
        _FUNCTIONS[name](target.tensor, x.tensor, weight.tensor, eps=EPS, runtime=bench.runtime)
    reference = rms_normalised(x.exact, weight.exact + name.startswith("gemma"), eps=EPS)
    distance = near("out", out, reference, limit=LIMITS[dtype])
    repeated("out", out, again)
    return [distance]


def _added(bench: Bench, *, name: str, dtype: str, shape: tuple[int, ...]) -> list[Distance]:
    x, residual = (bench.normal(dtype, *shape, scale=SPREAD) for _ in range(2))
    weight = bench.normal(dtype, shape[-1])
    rounds = []
    for _ in range(2):
        sent = bench.output(dtype, *shape, bits=x.bits), bench.output(dtype, *shape, bits=residual.bits)
        _FUNCTIONS[name](sent[0].tensor, sent[1].tensor, weight.tensor, eps=EPS, runtime=bench.runtime)
        rounds.append(sent)
    total = x.exact + residual.exact
    reference = rms_normalised(total, weight.exact + name.startswith("gemma"), eps=EPS)
    (out, added), again = rounds
    distances = [
        near("residual", added, total, limit=LIMITS[dtype]),
        near("x", out, reference, limit=LIMITS[dtype]),
    ]
    repeated("x", out, again[0])
    repeated("residual", added, again[1])
    return distances


def _layer(bench: Bench, *, rows: int, hidden: int) -> list[Distance]:
    x = bench.normal("bf16", rows, hidden, scale=SPREAD)
    gamma, beta = (bench.normal("f32", hidden) for _ in range(2))
    out, again = (bench.output("bf16", rows, hidden) for _ in range(2))
    for target in (out, again):
        norm.layernorm(target.tensor, x.tensor, gamma.tensor, beta.tensor, eps=EPS, runtime=bench.runtime)
    reference = layer_normalised(x.exact, gamma.exact, beta.exact, eps=EPS)
    distance = near("out", out, reference, limit=LIMITS["bf16"])
    repeated("out", out, again)
    return [distance]
