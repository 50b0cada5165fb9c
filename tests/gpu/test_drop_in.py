"""An unmodified flashinfer-python on the synced view, compiling nothing, gives the typed calls' bits.

`KERNEL_DEPOT_GPU_CACHE` names a node's cache whose bundle has modules of the flashinfer-python that is
installed beside torch, 0.6.3 or 0.7.4. Otherwise this skips.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.worker.cache import Cache
from kernel_depot.worker.coverage import flashinfer_version, read_record
from kernel_depot.worker.environment import current_bundle, environment

PROGRAMS = {"0.6.3": ("drop_in_program.py", 7), "0.7.4": ("drop_in_program_later.py", 5)}
"""By FlashInfer's version: what is run, and how many comparisons it makes."""


@pytest.fixture
def cache(torch: Any) -> Cache:
    """The node's cache, of modules for the flashinfer-python that is installed."""
    if "KERNEL_DEPOT_GPU_CACHE" not in os.environ:
        pytest.skip("KERNEL_DEPOT_GPU_CACHE names no cache")
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed")
    cache = Cache(Path(os.environ["KERNEL_DEPOT_GPU_CACHE"]))
    installed, synced = metadata.version("flashinfer-python"), flashinfer_version(current_bundle(cache))
    if installed not in PROGRAMS or installed != synced:
        pytest.skip(f"flashinfer-python {installed} is installed, modules of {synced} are synced")
    return cache


def variables(cache: Cache, tmp_path: Path) -> dict[str, str]:
    """What `kernel-depot run --record` gives a program, with a PATH that has no program at all."""
    kept = {key: value for key, value in os.environ.items() if key.startswith(("LD_", "CUDA_", "HOME"))}
    empty = tmp_path / "bin"
    empty.mkdir()
    before = {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": str(empty)}
    return {
        **environment(cache, record=tmp_path / "record").over(before),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "KERNEL_DEPOT_CACHE": str(cache.root),
    }


@pytest.mark.gpu
def test_flashinfer_calls_the_depots_modules_and_compiles_nothing(cache: Cache, tmp_path: Path) -> None:
    program, comparisons = PROGRAMS[metadata.version("flashinfer-python")]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(program)],
        env=variables(cache, tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.split("\n")
    assert [line for line in lines if line.startswith("differs")] == [], done.stdout
    assert sum(line.startswith("same bits") for line in lines) == comparisons, done.stdout
    assert not list(tmp_path.rglob("*.so"))
    asked = read_record(tmp_path / "record")
    assert asked
    assert [one.module for one in asked if not one.found] == []


@pytest.mark.gpu
def test_flashinfer_shows_the_depots_version(cache: Cache, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashinfer", "show-config"],
        env=variables(cache, tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    version = next(
        wheel.version for wheel in current_bundle(cache).wheels if wheel.project.startswith("flashinfer_jit")
    )
    shown = [line for line in done.stdout.splitlines() if "flashinfer-jit-cache" in line]
    assert any(version in line for line in shown), done.stdout + done.stderr[-3000:]
