"""How long importing the worker's client takes, against importing fastapi; fresh interpreters, interleaved.

python benchmarks/worker_import.py [--rounds N] [--json] [--check]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

GOAL = 0.3
MODULES = ("kernel_depot.worker.client", "fastapi")
CODE = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def measure(module: str) -> float:
    """Return the seconds that the import takes in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(module)], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {GOAL}")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {module: [] for module in MODULES}
    for number in range(arguments.rounds + 1):
        for module in MODULES:
            taken = measure(module)
            if number:  # the first round only warms the page cache and writes bytecode
                seconds[module].append(taken)
    medians = {module: statistics.median(values) for module, values in seconds.items()}
    ratio = medians[MODULES[0]] / medians[MODULES[1]]
    if arguments.json:
        print(json.dumps({"seconds": seconds, "medians": medians, "ratio": ratio, "goal": GOAL}))
    else:
        for module in MODULES:
            values = seconds[module]
            print(
                f"import {module:<28}{medians[module] * 1e3:>8.0f} ms  (min {min(values) * 1e3:.0f}, "
                f"max {max(values) * 1e3:.0f})"
            )
        print(f"ratio {ratio:.2f} (goal: below {GOAL})")
    if arguments.check and ratio >= GOAL:
        sys.exit(1)


if __name__ == "__main__":
    main()
