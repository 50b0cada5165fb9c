"""Cases of CUTLASS's fused mixture of experts: half precision, FP8 with scales of experts, DeepSeek's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.moe import BLOCK, BlockScales, Fp8Scales, FusedMoe, Precision, Weights
from kernel_depot.kernels.runtime import device_sm
from kernel_depot.kernels.uri import fused_moe_uri
from kernel_depot.smoke.numerics.bench import Bench
from kernel_depot.smoke.numerics.case import Case, Skipped
from kernel_depot.smoke.numerics.references import mixed_experts
from kernel_depot.smoke.numerics.verdict import Distance, near

EXPERTS: Final = 8
OF_A_TOKEN: Final = 2
HIDDEN: Final = 256
INTER: Final = 384
TOKENS: Final = (1, 33)

LIMITS: Final = {
    (Precision.HALF, "f16"): 2e-3,
    (Precision.HALF, "bf16"): 1.6e-2,
    (Precision.FP8, "f16"): 8e-2,
    (Precision.FP8, "bf16"): 8e-2,
    (Precision.DEEPSEEK, "bf16"): 8e-2,
}
"""What lies between the two products is rounded too; FlashInfer's tests allow 1e-2 and 1e-1 an element."""


def cases(uri: str) -> Iterator[Case]:
    """Yield the module's cases."""
    for precision, dtype in LIMITS:
        for tokens in TOKENS:
            name = f"{precision.value} {dtype} {tokens} tokens"
            yield Case(name, partial(_mix, uri=uri, precision=precision, dtype=dtype, tokens=tokens))


def _mix(bench: Bench, *, uri: str, precision: Precision, dtype: str, tokens: int) -> list[Distance]:
    sm = device_sm(bench.device)
    try:
        serves = sm is not None and fused_moe_uri(str(sm)) == uri
    except InvalidArgument:
        serves = False
    if sm is None or not serves:
        raise Skipped(f"kernel-depot calls {uri} on the GPUs that it is for, not on {sm or bench.device}")
    if precision is Precision.DEEPSEEK and (sm.major, sm.minor) != (9, 0):
        raise Skipped("DeepSeek's block scales need sm90")
    moe = FusedMoe(dtype=dtype, device=bench.device, precision=precision, runtime=bench.runtime)
    chosen = np.argsort(bench.random.random((tokens, EXPERTS)), axis=1)[:, :OF_A_TOKEN].astype(np.int32)
    gates = bench.uniform("f32", tokens, OF_A_TOKEN, low=0.2)
    x = bench.normal(moe.dtype_input, tokens, HIDDEN)
    fc1 = bench.normal(moe.dtype_weight, EXPERTS, 2 * INTER, HIDDEN, scale=_spread(precision, HIDDEN))
    fc2 = bench.normal(moe.dtype_weight, EXPERTS, HIDDEN, INTER, scale=_spread(precision, INTER))
    first, second = fc1.exact, fc2.exact
    scales: Fp8Scales | BlockScales | None = None
    if precision is Precision.FP8:
        one = bench.uniform("f32", EXPERTS, low=0.5 * HIDDEN**-0.5, high=HIDDEN**-0.5)
        two = bench.uniform("f32", EXPERTS, low=0.5 * INTER**-0.5, high=INTER**-0.5)
        # The activations are multiplied by `quant` before they become FP8, the second product divided by it.
        quant = bench.operand("f32", np.full(EXPERTS, 8.0))
        scales = Fp8Scales(
            fc1_dequant=one.tensor,
            fc2_quant=quant.tensor,
            fc2_dequant=bench.operand("f32", two.exact / quant.exact).tensor,
            fc1_input_dequant=bench.operand("f32", np.array(1.0)).tensor,
        )
        first = first * one.exact[:, None, None]
        second = second * two.exact[:, None, None]
    elif precision is Precision.DEEPSEEK:
        blocks = [
            bench.uniform(
                "f32", EXPERTS, rows // BLOCK, columns // BLOCK, low=0.5 * columns**-0.5, high=columns**-0.5
            )
            for rows, columns in ((2 * INTER, HIDDEN), (HIDDEN, INTER))
        ]
        scales = BlockScales(blocks[0].tensor, blocks[1].tensor)
        first, second = (
            weight * np.repeat(np.repeat(block.exact, BLOCK, axis=1), BLOCK, axis=2)
            for weight, block in zip((first, second), blocks, strict=True)
        )
    out = bench.output(dtype, tokens, HIDDEN)
    moe.run(
        x.tensor,
        bench.place("i32", chosen),
        Weights(fc1.tensor, fc2.tensor, scales=scales),
        out.tensor,
        expert_scales=gates.tensor,
    )
    reference = mixed_experts(x.exact, chosen, gates.exact, first, second)
    return [near("out", out, reference, limit=LIMITS[precision, dtype])]


def _spread(precision: Precision, columns: int) -> float:
    """Return the weights' standard deviation: products stay near 1, by the weights or by their scales."""
    return columns**-0.5 if precision is Precision.HALF else 1.0
