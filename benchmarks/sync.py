"""How fast a node syncs over loopback: verified blobs against plain curl, the cubin bundle against uv.

    python benchmarks/sync.py [WHEEL] [--rounds N] [--only blobs|cubins] [--json] [--check]

blobs   64 blobs of 4 MiB and one of 256 MiB, random bytes: `kernel-depot sync` resolves, fetches, verifies
        each SHA-256, publishes and builds views; `curl -o` only stores what comes. Same server, same blobs.
cubins  flashinfer_cubin 0.6.3: `kernel-depot sync` of its 5,376 blobs, against `uv pip install` of the wheel
        from nginx over loopback. Without WHEEL, pip downloads the wheel that the shipped pin set names.

Whole processes are timed, interleaved, in one run, each into a directory of its own; nothing is removed
before the end (see ingest.py). SHA-256 on all cores is printed beside, since no verified sync is faster:
without SHA instructions that bound can lie below curl. `--check` exits 1 beyond a goal.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sqlalchemy import text

from ingest import download, measure, write_pins
from kernel_depot.jobs.depot import open_depot
from kernel_depot.settings import load_settings
from serve import depot_server, nginx_server

SCRIPTS = Path(sysconfig.get_path("scripts"))
GOALS = {"blobs": 1.0, "cubins": 0.8}
SIZES = [4 << 20] * 64 + [256 << 20]


def random_wheel(folder: Path) -> Path:
    """Write a wheel of random bytes in places where a cubin wheel keeps files that are not inspected."""
    wheel = folder / "flashinfer_cubin-0.0.1-py3-none-any.whl"
    info = "flashinfer_cubin-0.0.1.dist-info"
    record = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, data: bytes) -> None:
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")

        for number, size in enumerate(SIZES):
            add(f"flashinfer_cubin/cubins/{number:03}/checksums.txt", os.urandom(size))
        add(f"{info}/METADATA", b"Metadata-Version: 2.1\nName: flashinfer-cubin\nVersion: 0.0.1\n")
        add(f"{info}/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "".join(record) + f"{info}/RECORD,,\n")
    return wheel


def fill_depot(wheel: Path, folder: Path) -> Path:
    """Materialize a wheel into a depot of its own."""
    folder.mkdir()
    pins = write_pins(wheel, folder)
    command = [
        SCRIPTS / "kernel-depot",
        "materialize",
        pins,
        "--allow-file-urls",
        "--data-dir",
        folder / "depot",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder / "depot"


def wait_for_zstd(data_dir: Path) -> None:
    """Wait until the server has made the zstd forms, so that runs are alike."""
    depot = open_depot(load_settings(data_dir=data_dir))
    query = text("select count(*) from blob where zstd_state = 'pending'")
    try:
        while True:
            with depot.engine.connect() as connection:
                if not connection.execute(query).scalar():
                    return
            time.sleep(1)
    finally:
        depot.close()


def manifest(server: str) -> dict[str, Any]:
    """Read the bundle that the benchmark's platform gets."""
    with urllib.request.urlopen(f"{server}/v1/resolve?cuda=cu130&arch=x86_64") as answer:
        digest = json.load(answer)["digest"]
    with urllib.request.urlopen(f"{server}/v1/bundles/{digest}") as answer:
        return dict(json.load(answer))


def sync_command(server: str, cache: Path) -> list[str | Path]:
    """Return the sync of a bare node."""
    return [
        SCRIPTS / "kernel-depot", "sync", "--server", server, "--cache", cache,
        "--cuda", "cu130", "--arch", "x86_64", "--sm", "none", "--json",
    ]  # fmt: skip


def curl_command(server: str, sha256s: list[str], folder: Path) -> list[str | Path]:
    """Return one curl that stores every blob, over one connection."""
    folder.mkdir()
    command: list[str | Path] = ["curl", "-sS", "-f"]
    for sha256 in sha256s:
        command += ["-o", folder / sha256, f"{server}/v1/blobs/sha256/{sha256}"]
    return command


def uv_command(index: str, wheel: Path, target: Path) -> list[str | Path]:
    """Return the installation of the wheel from an index."""
    project, version = wheel.name.split("-")[:2]
    return [
        SCRIPTS / "uv", "pip", "install", "--no-deps", "--no-cache", "--python", sys.executable,
        "--target", target, "--default-index", f"{index}/simple/", f"{project}=={version}",
    ]  # fmt: skip


def write_index(wheel: Path, root: Path) -> None:
    """Lay out an index of one wheel (PEP 503)."""
    project = wheel.name.split("-")[0].replace("_", "-")
    page = root / "simple" / project / "index.html"
    page.parent.mkdir(parents=True)
    os.link(wheel, root / wheel.name)
    page.write_text(f'<!DOCTYPE html><html><body><a href="/{wheel.name}">{wheel.name}</a></body></html>')


def check_cache(cache: Path, bundle: dict[str, Any]) -> None:
    """See that what a sync left is the bundle."""
    sizes = {item["sha256"]: item["size"] for item in bundle["artifacts"]}
    for sha256, size in sizes.items():
        if (cache / "blobs" / "sha256" / sha256[:2] / sha256).stat().st_size != size:
            raise SystemExit(f"{sha256} is not whole")
    if not (cache / "current" / "files").is_dir():
        raise SystemExit("no view was built")


def hash_speed() -> float:
    """Return bytes per second of SHA-256 on all cores together."""
    cores = len(os.sched_getaffinity(0))
    data = os.urandom(32 << 20)
    started = time.perf_counter()
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(lambda _: hashlib.sha256(data).digest(), range(cores)))
    return cores * len(data) / (time.perf_counter() - started)


def compare(runs: dict[str, Any], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Time commands in turn; each value of `runs` makes the command of a round."""
    walls: dict[str, list[float]] = {name: [] for name in runs}
    cpus: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        names = list(runs) if number % 2 else list(runs)[::-1]
        for name in names:
            wall, cpu = measure(runs[name](number))
            walls[name].append(wall)
            cpus[name].append(cpu)
    return {"wall": walls, "cpu": cpus}


def blobs(folder: Path, rounds: int) -> dict[str, Any]:
    """Compare with curl."""
    data_dir = fill_depot(random_wheel(folder), folder / "server")
    with depot_server(data_dir) as server:
        wait_for_zstd(data_dir)
        bundle = manifest(server)
        sizes = {item["sha256"]: item["size"] for item in bundle["artifacts"]}
        times = compare(
            {
                "kernel-depot": lambda number: sync_command(server, folder / f"cache-{number}"),
                "curl": lambda number: curl_command(server, list(sizes), folder / f"curl-{number}"),
            },
            rounds,
        )
        for number in range(rounds):
            check_cache(folder / f"cache-{number}", bundle)
    median = {name: statistics.median(values) for name, values in times["wall"].items()}
    total = sum(sizes.values())
    return {
        **times,
        "bytes": total,
        "median": median,
        "ratio": median["curl"] / median["kernel-depot"],
        "sha256_bound": hash_speed() / (total / median["curl"]),
    }


def cubins(folder: Path, wheel: Path, rounds: int) -> dict[str, Any]:
    """Compare with uv."""
    data_dir = fill_depot(wheel, folder / "server")
    (folder / "index").mkdir()
    write_index(wheel, folder / "index")
    with ExitStack() as stack:
        server = stack.enter_context(depot_server(data_dir))
        index = stack.enter_context(nginx_server(folder, folder / "index"))
        wait_for_zstd(data_dir)
        bundle = manifest(server)
        times = compare(
            {
                "kernel-depot": lambda number: sync_command(server, folder / f"cache-{number}"),
                "uv": lambda number: uv_command(index, wheel, folder / f"uv-{number}"),
            },
            rounds,
        )
        for number in range(rounds):
            check_cache(folder / f"cache-{number}", bundle)
    median = {name: statistics.median(values) for name, values in times["wall"].items()}
    total = sum({item["sha256"]: item["size"] for item in bundle["artifacts"]}.values())
    return {
        **times,
        "bytes": total,
        "median": median,
        "ratio": median["kernel-depot"] / median["uv"],
        "sha256_bound": total / hash_speed() / median["uv"],
    }


def show(name: str, result: dict[str, Any]) -> None:
    """Print one comparison."""
    print(f"{name}: {result['bytes'] / 1e6:.0f} MB")
    print(f"{'tool':<14}{'median s':>10}{'min':>8}{'max':>8}{'cpu s':>8}{'MB/s':>8}")
    for tool, walls in result["wall"].items():
        middle = result["median"][tool]
        cpu = statistics.median(result["cpu"][tool])
        print(
            f"{tool:<14}{middle:>10.2f}{min(walls):>8.2f}{max(walls):>8.2f}{cpu:>8.2f}"
            f"{result['bytes'] / middle / 1e6:>8.0f}"
        )
    sense = "at least" if name == "blobs" else "at most"
    what = "speed, depot / curl" if name == "blobs" else "time, depot / uv"
    print(f"{what}: {result['ratio']:.2f} (goal: {sense} {GOALS[name]})")
    print(f"what hashing alone on every core would give here: {result['sha256_bound']:.2f}\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path, nargs="?", metavar="WHEEL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["blobs", "cubins"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit 1 beyond a goal")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="sync-") as name:
        folder = Path(name)
        if arguments.only in (None, "blobs"):
            (folder / "blobs").mkdir()
            results["blobs"] = blobs(folder / "blobs", arguments.rounds)
        if arguments.only in (None, "cubins"):
            (folder / "cubins").mkdir()
            wheel = (arguments.wheel or download(folder)).resolve()
            local = folder / "cubins" / wheel.name
            local.write_bytes(wheel.read_bytes())
            results["cubins"] = cubins(folder / "cubins", local, arguments.rounds)
    if arguments.json:
        print(json.dumps({"results": results, "goals": GOALS}))
    else:
        for title, result in results.items():
            show(title, result)
    failed = [
        title
        for title, result in results.items()
        if (result["ratio"] < GOALS[title] if title == "blobs" else result["ratio"] > GOALS[title])
    ]
    if arguments.check and failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
