"""How sides are judged and timed: on numpy, under the few names of torch that are used."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernel_depot.opponent import duel as module
from kernel_depot.opponent.duel import duel, judge, measure
from kernel_depot.opponent.errors import BenchmarkStopped
from kernel_depot.opponent.shapes import Shape
from kernel_depot.opponent.sides import Batch, Side

SHAPE = Shape(2, 8, 128, 2, 2, causal=False)


class HostTensor(np.ndarray):
    """An array with the methods of torch's tensors that judging and timing call."""

    def clone(self) -> Any:
        return self.copy()

    def copy_(self, other: Any) -> None:
        self[...] = other

    def fill_(self, value: float) -> None:
        self[...] = value

    def double(self) -> Any:
        return self.astype(np.float64)


class HostEvent:
    """A CUDA event that says each call took a millisecond."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return 1.0


TORCH = SimpleNamespace(
    Tensor=HostTensor,
    equal=np.array_equal,
    isfinite=np.isfinite,
    linalg=SimpleNamespace(vector_norm=np.linalg.norm),
    cuda=SimpleNamespace(
        synchronize=lambda: None, _sleep=lambda cycles: None, Event=HostEvent, clock_rate=lambda: 1980
    ),
)


def random(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((8, 2, 128)).astype(np.float32).view(HostTensor)


def batch_of(seed: int = 0) -> Batch:
    q, k, v = random(seed), random(seed + 1), random(seed + 2)
    return Batch(SHAPE, q, k, v, random(9), [0, 4, 8], None, 4, 1.0)


def wanted(batch: Batch) -> Any:
    return batch.q.double() + batch.v


def right(batch: Batch) -> None:
    batch.out[...] = batch.q + batch.v


def side(call: Callable[[Batch], Any], name: str = "mine:kernel") -> Side:
    return Side(name, "1", call)


def raising(error: BaseException) -> Callable[[Batch], Any]:
    def call(batch: Batch) -> None:
        raise error

    return call


def changing(batch: Batch) -> None:
    right(batch)
    batch.k[...] = 0.0


def partly(batch: Batch) -> None:
    batch.out[:4] = (batch.q + batch.v)[:4]


@pytest.mark.parametrize("call", [right, lambda batch: batch.q + batch.v])
def test_a_side_that_fills_out_or_gives_its_result_back_is_right(call: Any) -> None:
    batch = batch_of()
    verdict = judge(TORCH, side(call), batch, wanted(batch))
    assert verdict.problem is None
    assert verdict.relative_error is not None
    assert verdict.relative_error < 1e-6


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (raising(AssertionError()), "AssertionError"),
        (raising(KeyError("block")), "KeyError: 'block'"),
        (raising(LookupError("no GQA")), "LookupError: no GQA"),
        (lambda batch: (batch.out, None), "gave back a tuple"),
        (lambda batch: batch.q[:3] + batch.v[:3], "shape (3, 2, 128)"),
        (partly, "not finite"),
        (lambda batch: None, "not finite"),
        (changing, "changes its inputs"),
        (lambda batch: (batch.q + batch.v) * 1.02, "wrong: 2.00e-02 from float64"),
    ],
)
def test_a_side_that_fails_is_told_and_stops_nothing(call: Any, problem: str) -> None:
    batch = batch_of()
    verdict = judge(TORCH, side(call), batch, wanted(batch))
    assert problem in str(verdict.problem)
    assert verdict.relative_error is None or math.isfinite(verdict.relative_error)
    assert judge(TORCH, side(right), batch, wanted(batch_of())).problem is None


def test_an_interrupt_is_no_failure_of_a_side() -> None:
    batch = batch_of()
    with pytest.raises(KeyboardInterrupt):
        judge(TORCH, side(raising(KeyboardInterrupt())), batch, wanted(batch))


def test_sides_take_turns_over_rotating_inputs_and_poisoned_outputs() -> None:
    batches = [batch_of(seed) for seed in range(3)]
    seen: list[tuple[str, int]] = []

    def call_of(name: str) -> Callable[[Batch], None]:
        def call(batch: Batch) -> None:
            assert np.isnan(batch.out).all()
            seen.append((name, [one is batch for one in batches].index(True)))
            right(batch)

        return call

    sides = [side(call_of(name), name) for name in "AB"]
    outcomes, clocks = measure(TORCH, sides, batches, hide_host=True)
    assert seen[:8] == [("A", 0), ("B", 0), ("A", 1), ("B", 1), ("A", 2), ("B", 2), ("A", 0), ("B", 0)]
    for outcome in outcomes:
        assert outcome.timing is not None
        assert outcome.timing.median == 1.0
        assert outcome.timing.rounds == len(seen) // 2 - 2 >= 8
    assert set(clocks) == {1980}


@pytest.mark.parametrize("failing", [raising(RuntimeError("CUDA error")), lambda batch: None])
def test_a_side_that_fails_at_a_later_turn_gets_no_time_and_the_other_does(failing: Any) -> None:
    turns = iter(range(100))

    def late(batch: Batch) -> Any:
        return right(batch) if next(turns) < 5 else failing(batch)

    sides = [side(right, "A"), side(late, "B")]
    (good, bad), _ = measure(TORCH, sides, [batch_of()], hide_host=False)
    assert good.timing is not None
    assert bad.timing is None
    assert bad.problem


def test_nothing_right_is_nothing_timed() -> None:
    assert measure(TORCH, [], [batch_of()], hide_host=True) == ([], [])


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_batch", lambda torch, shape, number: batch_of(number))
    monkeypatch.setattr(
        module, "reference", lambda torch, q, k, v, indptr, *, causal, sm_scale: q.double() + v
    )


@pytest.mark.usefixtures("on_host")
def test_a_duel_gives_each_side_its_error_time_or_problem() -> None:
    first, second, clocks = duel(TORCH, SHAPE, side(right, "A"), side(partly, "B"))
    assert first.problem is None
    assert first.relative_error is not None
    assert first.timing is not None
    assert (second.relative_error, second.timing) == (None, None)
    assert "not finite" in str(second.problem)
    assert clocks


@pytest.mark.usefixtures("on_host")
def test_a_gpu_that_gives_no_inputs_stops_the_benchmark_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(module, "_batch", broken)
    with pytest.raises(BenchmarkStopped) as caught:
        duel(TORCH, SHAPE, side(right, "A"), side(right, "B"))
    assert caught.value.where == str(SHAPE)
    assert "illegal memory access" in str(caught.value.found)
