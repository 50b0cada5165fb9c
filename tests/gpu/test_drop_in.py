"""An unmodified flashinfer-python 0.6.3 on the synced view, compiling nothing, gives the typed calls' bits.

`KERNEL_DEPOT_GPU_CACHE` names a node's cache whose bundle has modules of 0.6.3; flashinfer-python 0.6.3 must
be installed beside torch. Otherwise this skips.
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
from kernel_depot.worker.environment import environment

PROGRAM = Path(__file__).with_name("drop_in_program.py")


@pytest.mark.gpu
def test_flashinfer_calls_the_depots_modules_and_compiles_nothing(torch: Any, tmp_path: Path) -> None:
    if "KERNEL_DEPOT_GPU_CACHE" not in os.environ:
        pytest.skip("KERNEL_DEPOT_GPU_CACHE names no cache")
    if importlib.util.find_spec("flashinfer") is None or metadata.version("flashinfer-python") != "0.6.3":
        pytest.skip("flashinfer-python 0.6.3 is not installed")
    cache = Path(os.environ["KERNEL_DEPOT_GPU_CACHE"])
    given = environment(Cache(cache))
    kept = {key: value for key, value in os.environ.items() if key.startswith(("LD_", "CUDA_", "HOME"))}
    empty = tmp_path / "bin"
    empty.mkdir()
    variables = {
        **kept,
        **given.variables,
        "PYTHONPATH": os.pathsep.join([*given.python_path, *filter(None, sys.path)]),
        "PATH": str(empty),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "KERNEL_DEPOT_CACHE": str(cache),
    }
    done = subprocess.run(
        [sys.executable, PROGRAM], env=variables, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.split("\n")
    assert [line for line in lines if line.startswith("differs")] == [], done.stdout
    assert sum(line.startswith("same bits") for line in lines) == 7, done.stdout
    assert not list(tmp_path.rglob("*.so"))
