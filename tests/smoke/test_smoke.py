from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_depot.bundle import ArtifactKind
from kernel_depot.platform import Arch, Sm
from kernel_depot.smoke.cases import Host, Limits, ModuleAbsent, smoke
from kernel_depot.smoke.elf import EM_CUDA, read_header, read_library
from kernel_depot.smoke.errors import ElfRefused
from kernel_depot.smoke.process import run_child
from kernel_depot.smoke.report import SmokeReport, Status
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.errors import CacheEmpty

ARCH = Arch.parse(os.uname().machine)
HOST = Host(ARCH)

MODULE = r"""
#include <stdint.h>
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
int __tvm_ffi_rmsnorm(void* self, const void* args, int32_t count, void* result) {
  TVMFFIErrorSetRaisedFromCStr("TypeError", "Expected: rmsnorm(0: DLTensor*, 1: DLTensor*) -> void");
  return -1;
}
"""
CRASHES = r"""
#include <signal.h>
__attribute__((constructor)) static void die(void) { raise(SIGSEGV); }
int __tvm_ffi_run(void* self, const void* args, int count, void* result) { return 0; }
"""
SLEEPS = r"""
#include <unistd.h>
__attribute__((constructor)) static void wait_long(void) { sleep(60); }
int __tvm_ffi_run(void* self, const void* args, int count, void* result) { return 0; }
"""
SILENT = "int __tvm_ffi_run(void* self, const void* args, int count, void* result) { return 0; }"
PLAIN = "int answer(void) { return 42; }"


def by(report: SmokeReport, check: str) -> dict[str, tuple[Status, str]]:
    return {o.subject: (o.status, o.detail) for o in report.outcomes if o.check == check}


def test_the_runtime_loads_and_carries_errors_and_calls(node: Any, libtvm_ffi: bytes) -> None:
    node.runtime(libtvm_ffi)
    report = node.smoke()
    status, detail = by(report, "tvm-ffi")["tvm_ffi/lib/libtvm_ffi.so"]
    assert (status, detail.split(".")[:2]) == (Status.PASS, ["0", "1"])
    assert report.ok


def test_a_module_is_loaded_and_tells_its_signature(node: Any, libtvm_ffi: bytes, compiled: Any) -> None:
    node.runtime(libtvm_ffi)
    node.module("norm", compiled(MODULE))
    report = node.smoke()
    assert by(report, "module file")["norm"] == (Status.PASS, "1 functions")
    status, detail = by(report, "module load")["norm"]
    assert status is Status.PASS
    assert "rmsnorm(0: DLTensor*" in detail
    assert report.ok


def test_a_crash_is_an_outcome(node: Any, libtvm_ffi: bytes, compiled: Any) -> None:
    node.runtime(libtvm_ffi)
    node.module("norm", compiled(MODULE))
    node.module("bad", compiled(CRASHES))
    report = node.smoke()
    status, detail = by(report, "module load")["bad"]
    assert (status, detail.split(":")[0]) == (Status.CRASHED, "SIGSEGV")
    assert by(report, "module load")["norm"][0] is Status.PASS
    assert not report.ok


def test_a_hang_is_a_crash(node: Any, libtvm_ffi: bytes, compiled: Any) -> None:
    node.runtime(libtvm_ffi)
    node.module("slow", compiled(SLEEPS))
    report = node.smoke(limits=Limits(timeout=3))
    assert by(report, "module load")["slow"] == (Status.CRASHED, "no answer in 3 s")


def test_a_function_that_accepts_anything_is_a_failure(node: Any, libtvm_ffi: bytes, compiled: Any) -> None:
    node.runtime(libtvm_ffi)
    node.module("silent", compiled(SILENT))
    status, detail = by(node.smoke(), "module load")["silent"]
    assert (status, "without arguments" in detail) == (Status.FAIL, True)


def test_files_unfit_to_load_are_refused(node: Any, libtvm_ffi: bytes, compiled: Any) -> None:
    whole = compiled(MODULE)
    other = bytearray(whole)
    struct.pack_into("<H", other, 18, 183 if ARCH is Arch.X86_64 else 62)
    node.runtime(libtvm_ffi[:5000])
    node.module("cut", whole[: len(whole) // 2])
    node.module("arch", bytes(other))
    node.module("text", b"not a library at all" * 10)
    node.module("empty", b"")
    node.module("plain", compiled(PLAIN))
    report = node.smoke()
    assert by(report, "tvm-ffi")["tvm_ffi/lib/libtvm_ffi.so"][0] is Status.REFUSED
    outcomes = by(report, "module file")
    assert {status for status, _ in outcomes.values()} == {Status.REFUSED}
    assert "cut off" in outcomes["cut"][1]
    assert "another machine" in outcomes["arch"][1]
    assert "no ELF" in outcomes["text"][1]
    assert "exports no" in outcomes["plain"][1]
    assert by(report, "module load") == {}
    assert not report.ok


def test_a_needed_library_that_is_nowhere_is_named(
    node: Any, libtvm_ffi: bytes, compiled: Any, tmp_path: Path
) -> None:
    stub = tmp_path / "libnowhere.so.7"
    stub.write_bytes(compiled(PLAIN, "-Wl,-soname,libnowhere.so.7"))
    node.runtime(libtvm_ffi)
    node.module("needy", compiled(MODULE, "-Wl,--no-as-needed", str(stub)))
    report = node.smoke()
    assert by(report, "library")["libnowhere.so.7"][0] is Status.FAIL
    assert by(report, "module file")["needy"] == (Status.FAIL, "needs libnowhere.so.7; see doctor")
    assert by(report, "module load") == {}


def test_without_a_gpu_what_needs_one_is_skipped(
    node: Any, libtvm_ffi: bytes, compiled: Any, tmp_path: Path
) -> None:
    driver = tmp_path / "libcuda.so.1"
    driver.write_bytes(compiled(PLAIN, "-Wl,-soname,libcuda.so.1"))
    node.runtime(libtvm_ffi)
    node.module("norm", compiled(MODULE, "-Wl,--no-as-needed", str(driver)))
    node.add("flashinfer_cubin/cubins/a.cubin", cubin(), ArtifactKind.CUBIN, sms=("sm_90a",))
    report = node.smoke()
    assert by(report, "module file")["norm"][0] is Status.PASS
    assert by(report, "module load")["norm"] == (Status.SKIPPED, "no GPU")
    assert by(report, "cubin load")["cubins"] == (Status.SKIPPED, "no GPU")
    assert report.ok
    assert ("module load", "norm", "skipped: no GPU", "") in report.rows()


def test_a_module_without_code_for_the_gpu_is_refused_before_it_is_loaded(
    node: Any, libtvm_ffi: bytes, compiled: Any
) -> None:
    node.runtime(libtvm_ffi)
    node.module("norm", compiled(MODULE), sms=("sm_100a",))
    report = node.smoke(Host(ARCH, Sm(9, 0), "a GPU"))
    status, detail = by(report, "module file")["norm"]
    assert (status, detail) == (Status.REFUSED, "no code for sm_90; it holds sm_100a")
    assert by(report, "module load") == {}


def cubin(size: int = 200) -> bytes:
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01\x33", 2, EM_CUDA, 1, 0, 0, 64, 0, 64, 56, 0, 64, 2, 1
    )
    return (header + bytes(size))[: 64 + size]


def test_cubins_are_judged_by_their_headers(node: Any) -> None:
    for index in range(6):
        node.add(f"c/{index}.cubin", cubin() + bytes([index]), ArtifactKind.CUBIN, sms=("sm_90a",))
    node.add("c/cut.cubin", cubin()[:100], ArtifactKind.CUBIN, sms=("sm_90a",))
    node.add("c/empty.cubin", b"", ArtifactKind.CUBIN)
    outcomes = by(node.smoke(), "cubin file")
    assert outcomes["c/cut.cubin"][0] is Status.REFUSED
    assert outcomes["c/empty.cubin"][0] is Status.REFUSED
    assert outcomes["6 cubins"][0] is Status.PASS


def test_named_modules_alone_are_checked(node: Any, libtvm_ffi: bytes, compiled: Any) -> None:
    node.runtime(libtvm_ffi)
    node.module("norm", compiled(MODULE))
    node.module("bad", b"nothing")
    assert node.smoke(modules=["norm"]).ok
    with pytest.raises(ModuleAbsent, match="norm"):
        node.smoke(modules=["norn"])


def test_an_empty_cache_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CacheEmpty, match="kernel-depot sync"):
        smoke(Cache(tmp_path), host=HOST)


def test_an_unforeseen_error_in_the_child_is_a_failure_with_its_name() -> None:
    outcome = run_child({"check": "nonesuch"}, check="x", subject="y", timeout=30)
    assert (outcome.status, outcome.detail) == (Status.FAIL, "KeyError: 'nonesuch'")


def test_rows_fold_what_is_alike() -> None:
    from kernel_depot.smoke.report import Outcome

    outcomes = [Outcome("module load", str(n), Status.SKIPPED, "no GPU") for n in range(9)]
    outcomes.append(Outcome("module load", "bad", Status.CRASHED, "SIGSEGV"))
    report = SmokeReport("d", "p", None, tuple(outcomes))
    assert report.rows() == [
        ("module load", "9 of them", "skipped: no GPU", ""),
        ("module load", "bad", "crashed", "SIGSEGV"),
    ]


def test_a_real_library_is_read(libtvm_ffi: bytes, tmp_path: Path) -> None:
    path = tmp_path / "libtvm_ffi.so"
    path.write_bytes(libtvm_ffi)
    elf = read_library(path, arch=ARCH)
    assert "libc.so.6" in elf.needed
    assert {"TVMFFIGetVersion", "TVMFFIErrorMoveFromRaised"} <= elf.defined
    assert "TVMFFIGetVersion" not in elf.undefined


@given(st.binary(max_size=200), st.integers(0, 1 << 40))
def test_no_header_makes_the_reader_fail_otherwise(data: bytes, size: int) -> None:
    for prefix in (b"", b"\x7fELF\x02\x01\x01", cubin()[:64]):
        with contextlib.suppress(ElfRefused):
            read_header(prefix + data, size=size, machine=EM_CUDA, where="x")


@settings(max_examples=40)
@given(at=st.integers(0, 1 << 20), junk=st.binary(min_size=1, max_size=64))
def test_no_damage_makes_the_library_reader_fail_otherwise(
    libtvm_ffi: bytes, tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.so"
    data = bytearray(libtvm_ffi)
    at %= len(data)
    data[at : at + len(junk)] = junk
    # Headers are where damage can mislead the reader, so hit them as often as everything else.
    struct.pack_into("<Q", data, 40, at) if at % 2 else None
    path.write_bytes(data)
    with contextlib.suppress(ElfRefused):
        read_library(path, arch=ARCH)
