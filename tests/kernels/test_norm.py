"""The norms: their argument lists in every release, and what is refused before a kernel reads it wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels import norm
from kernel_depot.kernels.errors import InvalidArgument, KernelCallFailed

RELEASES = [(0, 6, 3), (0, 6, 18), (0, 7, 4)]
Norm = Callable[..., None]
PLAIN = [norm.rmsnorm, norm.gemma_rmsnorm]
FUSED = [norm.fused_add_rmsnorm, norm.gemma_fused_add_rmsnorm]


def half(*shape: int) -> Any:
    return np.zeros(shape, np.float16)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("function", [*PLAIN, *FUSED])
def test_all_is_sent_in_its_place(stand_ins: Any, release: tuple[int, ...], function: Norm) -> None:
    stand_ins.add("norm", "norm", release)
    first, second, weight = half(3, 64), half(3, 64), half(64)
    function(first, second, weight, eps=1e-4, enable_pdl=True, runtime=stand_ins.runtime(release))
    (call,) = stand_ins.calls("norm")
    assert call.function == function.__name__
    assert call.shapes == [[3, 64], [3, 64], [64], 1e-4, True]
    sent = [part["address"] for part in call.arguments[:3]]
    assert sent == [array.ctypes.data for array in (first, second, weight)]


@pytest.mark.parametrize("release", RELEASES)
def test_layernorm_has_its_own_list_and_dtypes(stand_ins: Any, tensor: Any, release: tuple[int, ...]) -> None:
    stand_ins.add("norm", "norm", release)
    runtime = stand_ins.runtime(release)
    out, x, gamma, beta = tensor("bf16", 3, 64), tensor("bf16", 3, 64), tensor("f32", 64), tensor("f32", 64)
    norm.layernorm(out, x, gamma, beta, eps=1e-3, runtime=runtime)
    (call,) = stand_ins.calls("norm")
    assert (call.function, call.shapes) == ("layernorm", [[3, 64], [3, 64], [64], [64], 1e-3])
    for name, wrong in (
        ("out", (half(3, 64), x, gamma, beta)),
        ("x", (out, half(3, 64), gamma, beta)),
        ("gamma", (out, x, tensor("bf16", 64), beta)),
        ("beta", (out, x, gamma, tensor("f32", 32))),
        ("out", (tensor("bf16", 2, 64), x, gamma, beta)),
    ):
        with pytest.raises(InvalidArgument) as caught:
            norm.layernorm(*wrong, runtime=runtime)
        assert caught.value.name == name
    assert stand_ins.calls("norm") == []


def test_queries_and_keys_are_normalised_by_head(stand_ins: Any) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    runtime = stand_ins.runtime((0, 6, 3))
    norm.rmsnorm(half(5, 8, 128), half(5, 8, 128), half(128), runtime=runtime)
    assert stand_ins.calls("norm")[0].shapes[:3] == [[5, 8, 128], [5, 8, 128], [128]]
    for function in (norm.gemma_rmsnorm, *FUSED):
        with pytest.raises(InvalidArgument, match="2 dimensions"):
            function(half(5, 8, 128), half(5, 8, 128), half(128), runtime=runtime)
    assert stand_ins.calls("norm") == []


def test_rows_may_lie_apart(stand_ins: Any) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    x = half(6, 128)[::2, :64]
    norm.rmsnorm(half(3, 64), x, half(64), runtime=stand_ins.runtime((0, 6, 3)))
    assert stand_ins.calls("norm")[0].arguments[1]["strides"] == [256, 1]


@pytest.mark.parametrize("function", [*PLAIN, *FUSED])
@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (0, np.zeros((3, 64), np.float32)),
        (0, np.zeros(64, np.float16)),
        (0, np.zeros((0, 64), np.float16)),
        (0, np.zeros((3, 128), np.float16)[:, ::2]),
        (0, "no tensor"),
        (1, np.zeros((4, 64), np.float16)),
        (1, np.zeros((3, 64), np.float32)),
        (1, np.zeros((3, 128), np.float16)[:, ::2]),
        (2, np.zeros(32, np.float16)),
        (2, np.zeros(64, np.float32)),
        (2, np.zeros(128, np.float16)[::2]),
        (2, np.zeros((1, 64), np.float16)),
    ],
)
def test_a_wrong_tensor_is_refused_and_nothing_is_sent(
    stand_ins: Any, function: Norm, at: int, wrong: Any
) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    given = [half(3, 64), half(3, 64), half(64)]
    given[at] = wrong
    with pytest.raises(InvalidArgument) as caught:
        function(*given, runtime=stand_ins.runtime((0, 6, 3)))
    names = ("x", "residual", "weight") if function in FUSED else ("out", "x", "weight")
    assert caught.value.name in names
    assert stand_ins.calls("norm") == []


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf, None, "small"])
def test_a_wrong_eps_is_refused(stand_ins: Any, eps: Any) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    with pytest.raises(InvalidArgument, match="eps"):
        norm.rmsnorm(half(3, 64), half(3, 64), half(64), eps=eps, runtime=stand_ins.runtime((0, 6, 3)))


def test_the_kernels_own_text_arrives(stand_ins: Any) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    stand_ins.fail_next("norm", "RMSNorm failed with error code invalid argument")
    with pytest.raises(KernelCallFailed, match="RMSNorm failed with error code invalid argument"):
        norm.rmsnorm(half(3, 64), half(3, 64), half(64), runtime=stand_ins.runtime((0, 6, 3)))
