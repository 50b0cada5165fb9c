"""What the builder costs over running ninja by hand on the same modules, and what a second build takes.

    python benchmarks/build.py [--plan small] [--modules page] [--jobs 2] [--scaling] [--cache DIR]

Each run starts from a cache that holds the downloads and nothing else. By hand means: the same rules, laid
out beforehand, one ninja for each module after the other with all the jobs. Needs the plan's CUDA; with
`--cache` the downloads (cublas has 400 MB) are taken from a builder's cache and kept there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from kernel_depot.builder.toolchain import HOST_PATH, find_ninja


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="small")
    parser.add_argument("--modules", default="page")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scaling", action="store_true", help="also build with one job, and print the ratio")
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="depot-build-") as name:
        base = Path(name)
        downloads = options.cache or base / "downloads"
        run(options, downloads, base / "out", options.jobs, "--dry-run")
        cache = base / "cache"
        seed(downloads, cache)
        first = run(options, cache, base / "out", options.jobs)
        second = run(options, cache, base / "out", options.jobs)
        hand = by_hand(cache, base / "hand", options.jobs)
        print(f"ninja by hand          {hand:8.2f} s")
        print(f"kernel-depot build     {first:8.2f} s   {first / hand:.3f} x (at most 1.05 wanted)")
        print(f"the same build again   {second:8.2f} s   (at most 3 wanted)")
        if options.scaling:
            alone = base / "alone"
            seed(downloads, alone)
            single = run(options, alone, base / "out", 1)
            print(
                f"with one job           {single:8.2f} s   {single / first:.2f} x faster with {options.jobs}"
            )


def seed(downloads: Path, cache: Path) -> None:
    """Start a cache with what was downloaded and put together, but nothing of any module."""
    for kind in ("wheels", "toolchains", "probes"):
        if (downloads / kind).is_dir():
            shutil.copytree(downloads / kind, cache / kind, symlinks=True, copy_function=os.link)


def run(options: argparse.Namespace, cache: Path, out: Path, jobs: int, *more: str) -> float:
    command = [sys.executable, "-m", "kernel_depot.cli.main", "build", options.plan, "--jobs", str(jobs)]
    command += ["--modules", options.modules, "--cache", str(cache), "--out", str(out), *more]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def by_hand(cache: Path, base: Path, jobs: int) -> float:
    """Run ninja on the rules of every module that the cache has built; return the seconds it took."""
    built = {
        json.loads(path.read_text())["recipe"]: json.loads(path.read_text())
        for path in cache.glob("modules/*/module.json")
    }
    tvm_ffi = importlib.util.find_spec("tvm_ffi")
    assert tvm_ffi is not None
    assert tvm_ffi.submodule_search_locations is not None
    [source] = (cache / "sources").iterdir()
    extras = list((cache / "toolchains").glob("*"))
    places = []
    for path in sorted(cache.glob("recipes/*/recipe.json")):
        recipe = json.loads(path.read_text())
        if recipe["digest"] not in built:
            continue
        place = base / recipe["uri"]
        shutil.copytree(path.parent / "gen", place / "gen")
        for name in ("out", "tmp", "lib"):
            (place / name).mkdir()
        links = {
            "src": source,
            "cuda": cuda_home(),
            "tvm_ffi": Path(tvm_ffi.submodule_search_locations[0]),
            "python": Path(sysconfig.get_path("include")),
            **({"extra": extras[0]} if extras else {}),
        }
        for name, target in links.items():
            (place / name).symlink_to(target)
        (place / "build.ninja").write_text(recipe["ninja"])
        stub = [
            "c++",
            "-shared",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            str(place / "lib/libcuda.so"),
            "-x",
            "c++",
        ]
        subprocess.run([*stub, os.devnull], check=True)
        places.append(place)
    ninja = find_ninja()
    started = time.perf_counter()
    for place in places:
        environment = {"PATH": HOST_PATH, "TMPDIR": str(place / "tmp"), "CPATH": "extra/include"}
        subprocess.run(
            [ninja, "-j", str(jobs), "--quiet"],
            cwd=place,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return time.perf_counter() - started


def cuda_home() -> Path:
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(named or "/usr/local/cuda").resolve()


if __name__ == "__main__":
    main()
