"""The real flashinfer-python 0.6.3 and 0.7.4 find what the view has, and compile nothing it lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.builder.plan import parse_plan
from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.coverage import Asked, read_record
from kernel_depot.worker.environment import environment
from kernel_depot.worker.sync import SyncRequest, sync

PROGRAM = Path(__file__).with_name("flashinfer_program.py")
PLATFORM = Platform(CudaTag(13, 0), Arch.X86_64, Sm(9, 0, "a"))


@pytest.fixture(scope="module")
def flashinfer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that flashinfer-python was installed into, without what it depends on.

    `KERNEL_DEPOT_FLASHINFER_<version>` may name one, such as ..._0_6_3; otherwise it is downloaded.
    """
    version = request.param
    if given := os.environ.get(f"KERNEL_DEPOT_FLASHINFER_{version.replace('.', '_')}"):
        return Path(given)
    directory = tmp_path_factory.mktemp("flashinfer")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target"]
    done = subprocess.run(
        [*command, str(directory), f"flashinfer-python=={version}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"flashinfer-python {version} cannot be had from the package index: {done.stderr[-300:]}")
    return directory


@pytest.fixture
def cache(upstream: Any, make_bundle: Any, tmp_path: Path, stand_in_module: bytes) -> Any:
    def synced(version: str) -> Cache:
        files = {"flashinfer_jit_cache/jit_cache/norm/norm.so": stand_in_module}
        upstream.publish(make_bundle(upstream, files, wheels=[("flashinfer_jit_cache", f"{version}+cu130")]))
        cache = Cache(tmp_path / version)
        sync(SyncRequest(), endpoint=upstream.endpoint(), platform=PLATFORM, cache=cache)
        return cache

    return synced


@pytest.fixture
def stand_in_module(tmp_path: Path) -> bytes:
    """A module that loads: real TVM-FFI code with one function."""
    import tvm_ffi.cpp

    source = "int64_t one() { return 1; }"
    built = tvm_ffi.cpp.build_inline(
        "norm", cpp_sources=source, functions=["one"], build_directory=str(tmp_path)
    )
    return Path(built).read_bytes()


def ask(cache: Cache, flashinfer: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    empty = tmp_path / "bin"
    empty.mkdir(exist_ok=True)
    before = {
        "PYTHONPATH": os.pathsep.join([str(flashinfer), *filter(None, sys.path)]),
        "PATH": str(empty),
        "HOME": str(tmp_path),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    }
    return subprocess.run(
        [sys.executable, "-B", str(PROGRAM)],
        env=environment(cache, record=tmp_path / "record").over(before),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.network
@pytest.mark.parametrize("flashinfer", ["0.6.3", "0.7.4"], indirect=True, ids=str)
def test_flashinfer_takes_the_views_modules_and_misses_the_others(
    flashinfer: Path, cache: Any, tmp_path: Path
) -> None:
    (info,) = flashinfer.glob("flashinfer_python-*.dist-info")
    version = info.name.split("-")[1].removesuffix(".dist")
    here = cache(version)
    done = ask(here, flashinfer, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    view = here.view_dir(str(here.current_digest())).resolve() / "flashinfer/flashinfer_jit_cache/jit_cache"
    assert answer["flashinfer"] == version
    assert answer["installed"] == f"{version}+cu130"
    assert answer["norm"] == [True, str(view / "norm/norm.so")]
    assert answer["norm loads"] is True
    assert answer["page"] == [False]
    assert answer["page loads"] == "MissingJITCacheError"
    if version == "0.7.4":
        assert answer["providers"] == [
            ["kernel-depot-jit_cache-sm90a", "0.7.4+cu130", ["sm90a"], ["norm"]],
        ]
    assert not list((here.root / "workspace").rglob("*.so"))
    assert read_record(tmp_path / "record") == [
        Asked("norm", version, found=True),
        Asked("page", version, found=False),
    ]
    coverage = [sys.executable, "-m", "kernel_depot.cli.main", "coverage", "--cache", str(here.root)]
    plan = subprocess.run(
        [*coverage, "--record", str(tmp_path / "record")], capture_output=True, text=True, check=True
    ).stdout
    assert [request.uri for request in parse_plan(plan, where="stdout").requests] == ["page"]


@pytest.mark.network
@pytest.mark.parametrize("flashinfer", ["0.6.3"], indirect=True, ids=str)
def test_flashinfer_is_refused_modules_of_a_version_that_begins_like_its_own(
    flashinfer: Path, cache: Any, tmp_path: Path
) -> None:
    done = ask(cache("0.6.30"), flashinfer, tmp_path)
    assert done.returncode == 1
    assert "synced modules of FlashInfer 0.6.30+cu130, but flashinfer-python is 0.6.3" in done.stderr
