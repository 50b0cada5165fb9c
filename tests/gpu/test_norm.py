"""The norms on a GPU against float64: odd sizes, rows apart, heads, and a second launch's bits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kernel_depot.kernels import norm
from kernel_depot.kernels.runtime import Runtime
from kernel_depot.smoke.numerics.case import LIMITS
from kernel_depot.smoke.numerics.references import layer_normalised, rms_normalised

pytestmark = pytest.mark.gpu

EPS = 1e-5


def exact(tensor: Any) -> Any:
    return tensor.double().cpu().numpy()


@pytest.fixture
def modules(runtime: Runtime) -> Runtime:
    if "norm" not in runtime.files:
        pytest.skip("not among the modules: norm")
    return runtime


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 128), (7, 4096), (99, 3584), (513, 8192), (5, 8, 128), (31, 3, 64)])
@pytest.mark.parametrize("gemma", [False, True])
def test_rmsnorm(
    torch: Any, modules: Runtime, make: Any, meter: Any, dtype: str, shape: tuple[int, ...], gemma: bool
) -> None:
    if gemma and len(shape) == 3:
        pytest.skip("only rmsnorm takes heads")
    x, weight = make.normal(dtype, *shape), make.normal(dtype, shape[-1])
    out, again = make.poisoned(dtype, *shape), make.poisoned(dtype, *shape)
    function = norm.gemma_rmsnorm if gemma else norm.rmsnorm
    for target in (out, again):
        function(target, x, weight, eps=EPS, runtime=modules)
    reference = rms_normalised(exact(x), exact(weight) + (1.0 if gemma else 0.0), eps=EPS)
    meter(function.__name__, out, reference, limit=LIMITS[dtype])
    assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_rows_apart(torch: Any, modules: Runtime, make: Any, meter: Any, dtype: str) -> None:
    wide, weight = make.normal(dtype, 9, 2048), make.normal(dtype, 1024)
    out = make.poisoned(dtype, 9, 1024)
    norm.rmsnorm(out, wide[:, 1024:], weight, eps=EPS, runtime=modules)
    meter("rmsnorm", out, rms_normalised(exact(wide)[:, 1024:], exact(weight), eps=EPS), limit=LIMITS[dtype])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 128), (17, 4096), (130, 5120)])
@pytest.mark.parametrize("gemma", [False, True])
def test_fused_add_rmsnorm(
    torch: Any, modules: Runtime, make: Any, meter: Any, dtype: str, shape: tuple[int, int], gemma: bool
) -> None:
    x, residual, weight = make.normal(dtype, *shape), make.normal(dtype, *shape), make.normal(dtype, shape[1])
    total = exact(x) + exact(residual)
    function = norm.gemma_fused_add_rmsnorm if gemma else norm.fused_add_rmsnorm
    function(x, residual, weight, eps=EPS, runtime=modules)
    meter(f"{function.__name__}, residual", residual, total, limit=LIMITS[dtype])
    reference = rms_normalised(total, exact(weight) + (1.0 if gemma else 0.0), eps=EPS)
    meter(function.__name__, x, reference, limit=LIMITS[dtype])


@pytest.mark.parametrize("shape", [(1, 128), (17, 4096), (130, 5120)])
def test_layernorm(torch: Any, modules: Runtime, make: Any, meter: Any, shape: tuple[int, int]) -> None:
    x, out = make.normal("bf16", *shape), make.poisoned("bf16", *shape)
    gamma, beta = (torch.randn(shape[1], device="cuda") for _ in range(2))
    norm.layernorm(out, x, gamma, beta, eps=EPS, runtime=modules)
    reference = layer_normalised(exact(x), exact(gamma), exact(beta), eps=EPS)
    meter("layernorm", out, reference, limit=LIMITS["bf16"])


def test_a_side_stream_gets_the_work(torch: Any, modules: Runtime, make: Any, meter: Any) -> None:
    x, weight = make.normal("f16", 64, 4096), make.normal("f16", 4096)
    reference = rms_normalised(exact(x), exact(weight), eps=EPS)
    outs = [make.poisoned("f16", 64, 4096) for _ in range(3)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    norm.rmsnorm(outs[0], x, weight, eps=EPS, stream=side, runtime=modules)
    with torch.cuda.stream(side):
        for out in outs[1:]:
            norm.rmsnorm(out, x, weight, eps=EPS, runtime=modules)
    side.synchronize()
    for out in outs:
        assert not math.isnan(float(out.sum()))
        meter("rmsnorm on a stream", out, reference, limit=LIMITS["f16"])
