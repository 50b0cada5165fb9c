"""Gated delta rule prefill on a Hopper GPU against float64, token by token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels.gdn import gdn_prefill
from kernel_depot.kernels.runtime import Runtime
from kernel_depot.smoke.numerics.gdn import LIMITS
from kernel_depot.smoke.numerics.references import delta_rule

pytestmark = pytest.mark.gpu

LENGTHS = [1, 64, 129, 37]
DIM = 128


def exact(tensor: Any) -> Any:
    return tensor.double().cpu().numpy()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 1, 1), (2, 2, 8)], ids=["mha", "gqa", "gva"])
@pytest.mark.parametrize("gated", [False, True])
def test_gdn_prefill(
    torch: Any, runtime: Runtime, make: Any, meter: Any, dtype: str, heads: tuple[int, int, int], gated: bool
) -> None:
    if "gdn_prefill_sm90" not in runtime.files:
        pytest.skip("not among the modules: gdn_prefill_sm90")
    tokens, most = sum(LENGTHS), max(heads)
    q, k, v = (make.normal(dtype, tokens, count, DIM) for count in heads)
    k = torch.nn.functional.normalize(k.float(), dim=-1).to(k.dtype)
    starts = np.array([0, *np.cumsum(LENGTHS)], np.int64)
    gates: dict[str, Any] = {}
    first = torch.zeros(len(LENGTHS), most, DIM, DIM, device="cuda")
    if gated:
        gates = {
            "alpha": 0.9 + 0.1 * torch.rand(tokens, most, device="cuda"),
            "beta": torch.rand(tokens, most, device="cuda"),
            "state": torch.randn(len(LENGTHS), most, DIM, DIM, device="cuda") * 0.1,
        }
        first = gates["state"]
    out = make.poisoned(dtype, tokens, most, DIM)
    last = make.poisoned("f32", len(LENGTHS), most, DIM, DIM)
    gdn_prefill(out, last, q, k, v, make.device(starts), **gates, runtime=runtime)
    ones = np.ones((tokens, most))
    alpha, beta = (exact(gates[name]) if gated else ones for name in ("alpha", "beta"))
    outs, states = [], []
    for number, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        part = slice(start, end)
        one = delta_rule(
            exact(q)[part], exact(k)[part], exact(v)[part], exact(first)[number], alpha[part], beta[part],
            scale=1 / math.sqrt(DIM),
        )  # fmt: skip
        outs.append(one[0])
        states.append(one[1])
    limit = LIMITS[dtype]
    meter("gdn_prefill", out, np.concatenate(outs), limit=limit)
    meter("gdn_prefill, state", last, np.stack(states), limit=limit)
