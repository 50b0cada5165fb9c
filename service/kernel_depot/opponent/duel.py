"""One shape, both sides: correctness first, then time, in turns over the same inputs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kernel_depot.errors import DepotError
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
    """Measure both sides; return the SM clocks (MHz) that were seen meanwhile too."""
    batches = [_batch(torch, shape, number) for number in range(_INPUT_SETS)]
    wanted = reference(
        torch,
        batches[0].q,
        batches[0].k,
        batches[0].v,
        batches[0].indptr,
        causal=shape.causal,
        sm_scale=batches[0].sm_scale,
    )
    judged = [_judge(torch, side, batches[0], wanted) for side in (first, second)]
    del wanted
    right = [side for side, (_, problem) in zip((first, second), judged, strict=True) if problem is None]
    hide = not any(side.host_counts for side in (first, second))
    timings, clocks = _time(torch, right, batches, hide_host=hide)
    outcomes = [
        Outcome(side, error, timings.get(side.name), problem)
        for side, (error, problem) in zip((first, second), judged, strict=True)
    ]
    return outcomes[0], outcomes[1], clocks


def matmul_ceiling(torch: Any) -> float:
    """Return the TFLOP/s that a bf16 product of 8192 x 8192 matrices reaches on this GPU."""
    n = 8192
    left, right = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.matmul(left, right, out=out)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(2 * n**3 / statistics.median(times[5:]) / 1e9)


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


def _judge(torch: Any, side: Side, batch: Batch, wanted: Any) -> tuple[float | None, str | None]:
    batch.out.fill_(math.nan)
    try:
        given = side.call(batch)
        torch.cuda.synchronize()
    except (DepotError, RuntimeError, TypeError, ValueError) as failure:
        return None, f"{type(failure).__name__}: {failure}"
    error = relative_error(torch, batch.out if given is None else given, wanted)
    if error <= TOLERANCE:
        return error, None
    return error, f"wrong: {error:.2e} from float64, allowed {TOLERANCE:.0e}"


def _time(
    torch: Any, sides: list[Side], batches: list[Batch], *, hide_host: bool
) -> tuple[dict[str, Timing], list[int]]:
    """Call the sides in turns, each time on the next inputs, their output poisoned before."""
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    clocks: list[int] = []
    until = time.monotonic() + _SECONDS * max(len(sides), 1)
    for number in range(_MOST_ROUNDS if sides else 0):
        if number >= _FEWEST_ROUNDS and time.monotonic() > until:
            break
        for side in sides:
            batch = batches[number % len(batches)]
            batch.out.fill_(math.nan)
            if hide_host:
                torch.cuda._sleep(_HIDE_HOST_CYCLES)
            else:
                torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            side.call(batch)
            end.record()
            end.synchronize()
            if number >= 2:  # the first two warm up
                times[side.name].append(start.elapsed_time(end))
        clocks += _clocks()
    return {name: _timing(values) for name, values in times.items() if values}, clocks


def _timing(values: list[float]) -> Timing:
    quartiles = statistics.quantiles(values, n=4)
    return Timing(statistics.median(values), quartiles[2] - quartiles[0], len(values))


def _clocks() -> Iterator[int]:
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        yield int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
    except pynvml.NVMLError:
        return
