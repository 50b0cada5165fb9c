"""One shape, both sides: correctness first, then time, in turns over the same inputs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kernel_depot.opponent.errors import BenchmarkStopped
from kernel_depot.opponent.reference import reference, relative_error
from kernel_depot.opponent.shapes import Shape
from kernel_depot.opponent.sides import Batch, Side

TOLERANCE: Final = 1e-2
"""Of ||out - reference|| / ||reference||, for bf16."""

_INPUT_SETS: Final = 3
_FEWEST_ROUNDS: Final = 10
_MOST_ROUNDS: Final = 60
_SECONDS: Final = 0.25
_HIDE_HOST_CYCLES: Final = 4_000_000
"""What a GPU waits before a timed call, so that the host has issued all of it by then: some 2 ms."""

_UNFINISHED: Final = "wrong: numbers that are not finite, as in an output that was not all written"


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, and the distance between the quartiles."""

    median: float
    spread: float
    rounds: int


@dataclass(frozen=True)
class Outcome:
    """One side of a shape: its error, and its time where it was right; else `problem` says why not."""

    side: Side
    relative_error: float | None
    timing: Timing | None
    problem: str | None = None


def duel(torch: Any, shape: Shape, first: Side, second: Side) -> tuple[Outcome, Outcome, list[int]]:
    """Measure both sides; return the SM clocks (MHz) that were seen meanwhile too.

    Raise BenchmarkStopped when the GPU does not give the inputs and their reference.
    """
    try:
        batches = [_batch(torch, shape, number) for number in range(_INPUT_SETS)]
        one = batches[0]
        wanted = reference(torch, one.q, one.k, one.v, one.indptr, causal=shape.causal, sm_scale=one.sm_scale)
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise BenchmarkStopped(
            "the GPU did not give a shape's inputs and reference",
            where=str(shape),
            found=str(error).split("\n")[0],
            remedy="leave the shape out where memory is short; else look at the kernels called before it",
        ) from error
    judged = [judge(torch, side, one, wanted) for side in (first, second)]
    del wanted
    right = [side for side, verdict in zip((first, second), judged, strict=True) if verdict.problem is None]
    timed, clocks = measure(torch, right, batches, hide_host=not (first.host_counts or second.host_counts))
    found = {outcome.side.name: outcome for outcome in timed}
    outcomes = [
        Outcome(side, verdict.relative_error, None, verdict.problem)
        if side.name not in found
        else replace(found[side.name], relative_error=verdict.relative_error)
        for side, verdict in zip((first, second), judged, strict=True)
    ]
    return outcomes[0], outcomes[1], clocks


def matmul_ceiling(torch: Any) -> float:
    """Return the most TFLOP/s that a bf16 product of large square matrices reaches on this GPU."""
    best = 0.0
    for n in (4096, 8192, 16384):
        left, right = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(left)
        for number in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.matmul(left, right, out=out)
            end.record()
            end.synchronize()
            if number >= 2:  # the first two warm up
                best = max(best, 2 * n**3 / start.elapsed_time(end) / 1e9)
    return float(best)


@dataclass(frozen=True)
class Verdict:
    """How far a side is from the reference, and why it is not timed; None where it is right."""

    relative_error: float | None
    problem: str | None


def judge(torch: Any, side: Side, batch: Batch, wanted: Any) -> Verdict:
    """Call a side once over a poisoned output and compare; whatever it raises is its own failure.

    A side that changes its inputs is wrong; the inputs are put back for the other.
    """
    inputs = (batch.q, batch.k, batch.v)
    before = [tensor.clone() for tensor in inputs]
    batch.out.fill_(math.nan)
    try:
        result = _result(torch, side.call(batch), batch)
        torch.cuda.synchronize()
        changed = [not torch.equal(new, old) for new, old in zip(inputs, before, strict=True)]
        error = relative_error(torch, result, wanted)
    except Exception as failure:  # a challenger is anyone's code
        return Verdict(None, _told(failure))
    if any(changed):
        for new, old in zip(inputs, before, strict=True):
            new.copy_(old)
        return Verdict(None, "wrong: it changes its inputs")
    if not math.isfinite(error):
        return Verdict(None, _UNFINISHED)
    if error > TOLERANCE:
        return Verdict(error, f"wrong: {error:.2e} from float64, allowed {TOLERANCE:.0e}")
    return Verdict(error, None)


def measure(
    torch: Any, sides: Sequence[Side], batches: Sequence[Batch], *, hide_host: bool
) -> tuple[list[Outcome], list[int]]:
    """Call the sides in turns, each time on the next inputs, their output poisoned before and read after.

    A side that fails at any turn gets no timing. Return the SM clocks (MHz) seen between turns too.
    """
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    problems: dict[str, str] = {}
    clocks: list[int] = []
    until = time.monotonic() + _SECONDS * len(sides)
    for number in range(_MOST_ROUNDS):
        turn = [side for side in sides if side.name not in problems]
        if not turn or (number >= _FEWEST_ROUNDS and time.monotonic() > until):
            break
        for side in turn:
            try:
                elapsed = _run(torch, side, batches[number % len(batches)], hide_host=hide_host)
            except Exception as failure:  # a challenger is anyone's code
                problems[side.name] = _told(failure)
                continue
            if elapsed is None:
                problems[side.name] = _UNFINISHED
            elif number >= 2:  # the first two warm up
                times[side.name].append(elapsed)
        clocks += _clock(torch)
    return [
        Outcome(side, None, None, problems[side.name])
        if side.name in problems
        else Outcome(side, None, _timing(times[side.name]))
        for side in sides
    ], clocks


def _run(torch: Any, side: Side, batch: Batch, *, hide_host: bool) -> float | None:
    """Return one call's milliseconds; None when it left numbers that are not finite."""
    batch.out.fill_(math.nan)
    if hide_host:
        torch.cuda._sleep(_HIDE_HOST_CYCLES)
    else:
        torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    given = side.call(batch)
    end.record()
    end.synchronize()
    finite = bool(torch.isfinite(_result(torch, given, batch)).all())
    return float(start.elapsed_time(end)) if finite else None


def _result(torch: Any, given: Any, batch: Batch) -> Any:
    """Return what a side computed: what it gave back, else `out`. Raise ValueError for anything else."""
    if given is None:
        return batch.out
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"it gave back a {type(given).__name__}, not a tensor like q")
    if given.shape != batch.q.shape:
        raise ValueError(f"it gave back a tensor of shape {tuple(given.shape)}, not {tuple(batch.q.shape)}")
    return given


def _told(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".rstrip(": ")


def _batch(torch: Any, shape: Shape, number: int) -> Batch:
    generator = torch.Generator(device="cuda").manual_seed(shape.seed * 1000 + number)

    def random(heads: int) -> Any:
        size = (shape.rows, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v = random(shape.num_qo_heads), random(shape.num_kv_heads), random(shape.num_kv_heads)
    indptr = shape.indptr()
    on_device = torch.tensor(indptr, dtype=torch.int32, device="cuda")
    scale = 1.0 / math.sqrt(shape.head_dim)
    return Batch(shape, q, k, v, torch.empty_like(q), indptr, on_device, max(shape.lengths()), scale)


def _timing(values: list[float]) -> Timing:
    quartiles = statistics.quantiles(values, n=4)
    return Timing(statistics.median(values), quartiles[2] - quartiles[0], len(values))


def _clock(torch: Any) -> list[int]:
    """Return the SM clock of the GPU that is measured, which torch finds among those made visible."""
    import pynvml

    try:
        return [int(torch.cuda.clock_rate())]
    except (pynvml.NVMLError, RuntimeError, ValueError):
        return []
