"""How long a wheel takes from a local file into the depot, against uv and pip installing the same file.

    python benchmarks/ingest.py [WHEEL] [--rounds N] [--json] [--check]

The depot verifies the wheel, each member against RECORD, and publishes and records all; uv and pip unpack.
Whole processes are timed, interleaved, in the same run. Without WHEEL, pip downloads the cubin wheel that
the shipped pin set names. `--check` exits 1 above one of the ratios asked for.

Each run writes into a directory of its own and nothing is removed before the end: ext4 passes over inodes
that were freed moments ago, so removing thousands of files makes the creations that follow several times
slower. Dirty pages are written out before each run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from kernel_depot.digest import sha256_file
from kernel_depot.pins.document import read_pin_set
from kernel_depot.shipped import shipped_dir

GOALS = {"uv": 0.8, "pip": 0.5}
PIN_SET = "flashinfer-cubin-0.6.3.toml"
SCRIPTS = Path(sysconfig.get_path("scripts"))


def download(folder: Path) -> Path:
    """Let pip fetch the wheel that the shipped pin set names, and check it against its pin."""
    pin = read_pin_set(shipped_dir("pins") / PIN_SET).pins[0]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", folder,
         f"{pin.project}=={pin.version}"],
        check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    wheel = folder / pin.filename
    if sha256_file(wheel) != pin.sha256:
        raise SystemExit(f"{wheel.name} is not the pinned file")
    return wheel


def write_pins(wheel: Path, folder: Path) -> Path:
    """Pin the local file for one platform."""
    project, version = wheel.name.split("-")[:2]
    pins = folder / f"{project}-{version}.toml"
    pins.write_text(
        f"[{project}.cu130.x86_64]\n"
        f'filename = "{wheel.name}"\nurl = "{wheel.resolve().as_uri()}"\nsha256 = "{sha256_file(wheel)}"\n'
    )
    return pins


def commands(wheel: Path, pins: Path, target: Path) -> dict[str, list[str]]:
    """Return what is compared; each fills its own directory under `target`."""
    depot = f"{SCRIPTS}/kernel-depot materialize {pins} --allow-file-urls --json"
    uv = f"{SCRIPTS}/uv pip install --no-deps --no-cache --offline --python {sys.executable}"
    pip = f"{sys.executable} -m pip install --no-deps --no-compile --no-index --disable-pip-version-check"
    return {
        "kernel-depot": [*depot.split(), "--data-dir", str(target / "kernel-depot")],
        "uv": [*uv.split(), "--target", str(target / "uv"), str(wheel)],
        "pip": [*pip.split(), "--target", str(target / "pip"), str(wheel)],
    }


def measure(command: list[str]) -> tuple[float, float]:
    """Run one whole process; return its wall and CPU seconds."""
    os.sync()
    before = os.times()
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - started
    after = os.times()
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, cpu


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path, nargs="?", metavar="WHEEL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit 1 above a goal")
    arguments = parser.parse_args()
    walls: dict[str, list[float]] = {}
    cpus: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ingest-") as name:
        folder = Path(name)
        wheel = arguments.wheel or download(folder)
        pins = write_pins(wheel, folder)
        for number in range(arguments.rounds):
            runs = list(commands(wheel, pins, folder / str(number)).items())
            turn = number % len(runs)
            for tool, command in [*runs[turn:], *runs[:turn]]:
                wall, cpu = measure(command)
                walls.setdefault(tool, []).append(wall)
                cpus.setdefault(tool, []).append(cpu)
    medians = {tool: statistics.median(values) for tool, values in walls.items()}
    ratios = {tool: medians["kernel-depot"] / medians[tool] for tool in GOALS}
    if arguments.json:
        print(
            json.dumps({"seconds": walls, "cpu": cpus, "medians": medians, "ratios": ratios, "goals": GOALS})
        )
    else:
        print(f"{wheel.name} from a local file, {arguments.rounds} rounds interleaved, whole processes\n")
        print(f"{'tool':<14}{'median s':>10}{'min':>8}{'max':>8}{'cpu s':>8}{'depot / tool':>14}{'goal':>8}")
        for tool in ("kernel-depot", "uv", "pip"):
            line = f"{tool:<14}{medians[tool]:>10.2f}{min(walls[tool]):>8.2f}{max(walls[tool]):>8.2f}"
            line += f"{statistics.median(cpus[tool]):>8.2f}"
            if tool in GOALS:
                line += f"{ratios[tool]:>14.2f}{GOALS[tool]:>8.1f}"
            print(line)
    if arguments.check and any(ratios[tool] > goal for tool, goal in GOALS.items()):
        sys.exit(1)


if __name__ == "__main__":
    main()
