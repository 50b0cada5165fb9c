"""Which toolchain is taken, and what is said when one is not complete."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.builder.cache import BuildCache
from kernel_depot.builder.errors import ToolchainMissing
from kernel_depot.builder.toolchain import (
    buildable,
    candidates,
    check_tvm_ffi,
    examine,
    open_toolchain,
    pinned,
)
from kernel_depot.platform import Arch, CudaTag

CU130 = CudaTag(13, 0)


@pytest.mark.parametrize("arch", list(Arch))
def test_every_part_of_the_pinned_cuda_is_there_for_both_cpus(arch: Arch) -> None:
    for part in ("compiler", "cublas", "curand", "nvrtc"):
        wheels = pinned(CU130, arch, {part}, roots=[])
        assert wheels
        assert all(str(arch) in wheel.filename and wheel.size for wheel in wheels)


def test_a_cuda_that_is_not_pinned(tmp_path: Path) -> None:
    with pytest.raises(ToolchainMissing, match="compiler of cu129 is neither") as caught:
        pinned(CudaTag(12, 9), Arch.X86_64, {"compiler"}, roots=[tmp_path])
    assert "--cuda-home" in str(caught.value.remedy)


def test_the_first_cuda_that_fits_is_taken(bench: Any, tmp_path: Path) -> None:
    plan = bench.plan("page")
    other = tmp_path / "other"
    assert os.system(f"cp -r {bench.cuda} {other}") == 0
    header = other / "include/cuda.h"
    header.write_text("#define CUDA_VERSION 12090\n")
    cache = BuildCache(tmp_path / "cache")
    chosen = open_toolchain(
        plan, cache=cache, roots=[tmp_path, other, bench.cuda], bring=lambda wheel: Path()
    )
    assert chosen.root == bench.cuda
    checks = examine(plan, cache=cache, roots=[tmp_path, other])
    assert checks[0].detail.endswith(f"{other} is CUDA 12.9, the plan wants 13.0")
    assert {check.name for check in checks} >= {"compiler", "C++ compiler", "ninja", "apache-tvm-ffi"}


def test_paths_leave_the_identity_and_headers_do_not(bench: Any, tmp_path: Path) -> None:
    plan = bench.plan("page")
    other = tmp_path / "other"
    assert os.system(f"cp -r {bench.cuda} {other}") == 0
    caches = [BuildCache(tmp_path / name) for name in ("one", "two")]

    def digest(root: Path, number: int) -> str:
        return open_toolchain(plan, cache=caches[number], roots=[root], bring=lambda wheel: Path()).digest

    first = digest(bench.cuda, 0)
    assert digest(other, 1) == first
    (other / "include/cuda_runtime_api.h").write_text("// another release\n")
    assert digest(other, 1) != first


def test_headers_a_plan_needs_come_from_the_cuda_that_has_them(bench: Any, tmp_path: Path) -> None:
    plan = dataclasses.replace(bench.plan("page"), needs=("curand",))
    (bench.cuda / "include/curand_kernel.h").write_text("")
    chosen = open_toolchain(
        plan, cache=BuildCache(tmp_path / "cache"), roots=[bench.cuda], bring=lambda wheel: Path("/absent")
    )
    assert chosen.extra is None
    assert chosen.identity["wheels"] == {}


def test_named_directories_come_first(tmp_path: Path) -> None:
    found = candidates(CU130, named=[tmp_path / "mine"], search_path=str(tmp_path))
    assert found[0] == tmp_path / "mine"
    assert len(set(found)) == len(found)


def test_tvm_ffi_must_be_what_the_source_asks_for() -> None:
    head = "Metadata-Version: 2.1\nName: x\nVersion: 1\n"
    check_tvm_ffi(head + "Requires-Dist: apache-tvm-ffi<0.2,>=0.1.3\nRequires-Dist: torch\n", where="x")
    with pytest.raises(ToolchainMissing) as caught:
        check_tvm_ffi(head + "Requires-Dist: apache-tvm-ffi<0.1\n", where="x")
    assert caught.value.expected == "apache-tvm-ffi<0.1"


def test_what_a_machine_can_compile_with(bench: Any, tmp_path: Path) -> None:
    assert buildable(Arch.X86_64, roots=[]) == [CU130]  # pinned
    header = bench.cuda / "include/cuda.h"
    header.write_text("#define CUDA_VERSION 12090\n")
    roots = [tmp_path / "absent", bench.cuda]
    assert buildable(Arch.AARCH64, roots=roots) == [CudaTag(12, 9), CU130]
    (bench.cuda / "bin/nvcc").unlink()
    assert buildable(Arch.AARCH64, roots=roots) == [CU130]
