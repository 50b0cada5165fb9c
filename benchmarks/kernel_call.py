"""What a typed kernel call costs the host over the bare apache-tvm-ffi call with the same tensors.

python benchmarks/kernel_call.py [--modules DIR] [--release 0.6.3] [--device cuda] [--rounds N] [--json]
                                 [--check]

Needs torch. Modules are the current bundle's, or DIR's (`<uri>/<uri>.so`); those not there are left out. It
is host time alone: calls are asynchronous, and the device is waited for between rounds, not within them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernel_depot.kernels.arguments import NO_SCALES, Extras, batch_prefill_plan_tail, batch_prefill_tail
from kernel_depot.kernels.attention import Attention, Backend
from kernel_depot.kernels.batch_prefill import BatchPrefillPlan
from kernel_depot.kernels.errors import ModuleMissing
from kernel_depot.kernels.memory import CPU, CUDA, Device
from kernel_depot.kernels.norm import rmsnorm
from kernel_depot.kernels.runtime import Runtime, default_runtime, read_release

GOAL = 1.0
CALLS = 200
"""A round; fewer than a stream takes before a launch waits."""

Call = Callable[[], object]
Pair = tuple[str, Call, Call]


def bare_module(runtime: Runtime, uri: str) -> Any:
    """Load a module as apache-tvm-ffi does, from a blob whose name has no suffix."""
    import tvm_ffi

    return tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(str(runtime.files[uri].path), "so")


def norm(runtime: Runtime, torch: Any, device: Device) -> Pair:
    """Return the bare and the typed RMSNorm of 8 rows."""
    place = "cuda" if device.is_cuda else "cpu"
    x = torch.zeros(8, 4096, dtype=torch.float16, device=place)
    out, weight = torch.empty_like(x), torch.ones(4096, dtype=torch.float16, device=place)
    rmsnorm(out, x, weight, runtime=runtime)
    bare = bare_module(runtime, "norm").rmsnorm
    return (
        "rmsnorm",
        lambda: bare(out, x, weight, 1e-6, False),
        lambda: rmsnorm(out, x, weight, runtime=runtime),
    )


def ragged(runtime: Runtime, torch: Any, device: Device) -> Pair:
    """Return the bare and the typed run of a ragged prefill, 4 requests of 8 queries and 64 keys."""
    place = "cuda" if device.is_cuda else "cpu"
    attention = Attention(
        num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, head_dim_vo=128, dtype_q="f16", dtype_kv="f16",
        dtype_o="f16",
    )  # fmt: skip
    plan = BatchPrefillPlan.ragged(attention, device=device, runtime=runtime)
    qo, kv = [0, 8, 16, 24, 32], [0, 64, 128, 192, 256]
    plan.plan(qo, kv)
    q = torch.zeros(32, 8, 128, dtype=torch.float16, device=place)
    k, v = (torch.zeros(256, 2, 128, dtype=torch.float16, device=place) for _ in range(2))
    out = torch.empty_like(q)
    plan.run(q, k, v, out)

    module = bare_module(runtime, plan.uri)
    room = {"dtype": torch.uint8}
    scratch = torch.empty(128 << 20, device=place, **room)
    plans = torch.empty(8 << 20, device=place, **room)
    pinned = torch.empty(8 << 20, pin_memory=device.is_cuda, **room)
    host = [torch.tensor(numbers, dtype=torch.int32) for numbers in (qo, kv, [64] * 4)]
    tail = batch_prefill_plan_tail(
        attention, plan.backend, runtime.release, cuda_graph=False, fixed_split_size=-1,
        disable_split_kv=False, num_colocated_ctas=0,
    )  # fmt: skip
    info = module.plan(scratch, plans, pinned, *host, 32, 4, 8, 2, 1, *tail)
    arguments = (
        scratch, plans, info, q, k, v, host[0].to(place), host[1].to(place), out, None, 0, 0, -1, False,
        *batch_prefill_tail(attention, plan.backend, runtime.release, extras=Extras(), scales=NO_SCALES),
    )  # fmt: skip
    bare = module.ragged_run
    name = "fa3" if plan.backend is Backend.FA3 else "fa2"
    return f"ragged prefill, {name}", lambda: bare(*arguments), lambda: plan.run(q, k, v, out)


def measure(pair: Pair, *, rounds: int, wait: Call) -> dict[str, float]:
    """Return the microseconds of a call, bare and typed: medians of rounds that take turns."""
    taken: dict[str, list[float]] = {"bare": [], "typed": []}
    for number in range(rounds + 1):
        for name, call in (("bare", pair[1]), ("typed", pair[2])):
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            seconds = time.perf_counter() - start
            wait()
            if number:  # the first round warms
                taken[name].append(seconds / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", type=Path)
    parser.add_argument("--release", default="0.6.3")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {GOAL} us over the bare call")
    given = parser.parse_args()
    import torch

    device = Device(CUDA if given.device == "cuda" else CPU)
    runtime = (
        default_runtime()
        if given.modules is None
        else Runtime.of_directory(given.modules, release=read_release(given.release))
    )
    wait: Call = torch.cuda.synchronize if device.is_cuda else lambda: None
    results: dict[str, dict[str, float]] = {}
    for make in (norm, ragged):
        try:
            pair = make(runtime, torch, device)
        except ModuleMissing as error:
            print(f"left out: {error.uri}", file=sys.stderr)
            continue
        figures = measure(pair, rounds=given.rounds, wait=wait)
        results[pair[0]] = {**figures, "over": figures["typed"] - figures["bare"]}
    if given.json:
        print(json.dumps({"microseconds": results, "goal": GOAL}))
    else:
        for name, one in results.items():
            figures = "   ".join(f"{word} {one[word]:>6.2f} us" for word in ("bare", "typed", "over"))
            print(f"{name:<24}{figures}")
        print(f"goal: at most {GOAL} us over the bare call")
    if not results or (given.check and any(one["over"] > GOAL for one in results.values())):
        sys.exit(1)


if __name__ == "__main__":
    main()
