"""The side of numeric cases that may die: runs the cases of many modules, a line of JSON for each.

Run as `python -m kernel_depot.smoke.numerics.child`, with the job as JSON on standard input. Lines: `ready`,
once the runtime and the device work; `begin` and `end` of each case, `done` after a module's; `fatal` when
none can run. A case that leaves the device unusable ends the process, and whoever started it starts another
for the rest.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernel_depot.errors import DepotError
from kernel_depot.kernels.errors import KernelError, ModuleUnloadable, NoCodeForGpu
from kernel_depot.kernels.memory import CudaCallFailed, Device, cuda_runtime
from kernel_depot.kernels.moe import HeadersMissing
from kernel_depot.kernels.runtime import Runtime
from kernel_depot.smoke.numerics.bench import Bench, Workspaces
from kernel_depot.smoke.numerics.case import Case, Skipped
from kernel_depot.smoke.numerics.families import cases_of, parameters_of
from kernel_depot.smoke.numerics.session import DEVICE_LOST
from kernel_depot.smoke.numerics.verdict import Wrong

Say = Callable[[dict[str, Any]], None]


class DeviceLost(Exception):
    """A case after which the device refuses every call of this process; its outcome is told."""


def run_case(case: Case, bench: Bench) -> dict[str, Any]:
    """Run one case and return its outcome. Raise DeviceLost, with the outcome, when the device is lost."""
    outcome: dict[str, Any]
    try:
        distances = case.run(bench)
        worst = max(distances, key=lambda distance: distance.share)
        outcome = {
            "status": "pass",
            "detail": f"{worst.of} {worst.error:.1e} of {worst.limit:.0e}" if worst.limit else "exact",
            "error": worst.error,
            "limit": worst.limit,
        }
    except Wrong as error:
        outcome = {
            "status": "fail",
            "detail": error.what,
            "expected": error.expected,
            "found": error.found,
        }
    except (Skipped, HeadersMissing) as error:
        outcome = {"status": "skipped", "detail": str(error)}
    except (ModuleUnloadable, NoCodeForGpu) as error:
        outcome = {"status": "refused", "detail": str(error)}
    except KernelError as error:
        outcome = {"status": "fail", "detail": str(error)}
    except MemoryError as error:
        outcome = {"status": "fail", "detail": f"out of host memory: {error}"}
    if bench.device.is_cuda and outcome["status"] != "pass":
        try:
            cuda_runtime().synchronize()
        except CudaCallFailed as error:
            raise DeviceLost({**outcome, "status": "crashed", "detail": str(error)}) from error
    return outcome


def run_job(job: dict[str, Any], say: Say) -> None:
    """Run the job's modules: `cache`, `bundle`, `device`, `modules` of (name, number of the first case)."""
    runtime = Runtime.open(Path(job["cache"]), bundle=job["bundle"])
    device = Device(*job["device"])
    if device.is_cuda:
        cuda_runtime().synchronize()
    workspaces = Workspaces()
    say({"event": "ready"})
    for uri, first in job["modules"]:
        # Only this module: a case must not pass by calling another one.
        alone = Runtime(
            {uri: runtime.files[uri]},
            release=runtime.release,
            where=runtime.where,
            headers=runtime.headers,
        )
        cases = list(cases_of(parameters_of(uri, runtime.release)))
        for case in cases[first:]:
            say({"event": "begin", "module": uri, "case": case.name})
            started = time.monotonic()
            seed = zlib.crc32(f"{uri} {case.name}".encode())
            try:
                outcome = run_case(case, Bench(alone, device, seed=seed, workspaces=workspaces))
            except DeviceLost as lost:
                say({"event": "end", **lost.args[0], "seconds": time.monotonic() - started})
                raise
            say({"event": "end", **outcome, "seconds": time.monotonic() - started})
        say({"event": "done", "module": uri})


def main() -> None:
    """Run the job on standard input; what it says goes to what was standard output, and nothing else does."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # native code may print

    def say(members: dict[str, Any]) -> None:
        answer.write(json.dumps(members) + "\n")
        answer.flush()

    status = 0
    try:
        run_job(json.load(sys.stdin), say)
    except DeviceLost:
        status = DEVICE_LOST
    except (DepotError, Skipped) as error:
        say({"event": "fatal", "detail": str(error)})
    # Native libraries may crash in their finalizers; the cases are over.
    os._exit(status)


if __name__ == "__main__":
    main()
