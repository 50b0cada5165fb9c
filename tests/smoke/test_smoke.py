from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_depot.bundle import ArtifactKind, Bundle, BundleArtifact, BundleWheel
from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.smoke.cases import Host, Limits, ModuleAbsent, run_child, smoke
from kernel_depot.smoke.elf import EM_CUDA, read_header, read_library
from kernel_depot.smoke.errors import ElfRefused
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


@pytest.fixture(scope="session")
def libtvm_ffi() -> bytes:
    """The runtime of the installed apache-tvm-ffi, found without importing it."""
    spec = importlib.util.find_spec("tvm_ffi")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], "lib", "libtvm_ffi.so").read_bytes()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make modules with")
    directory = tmp_path_factory.mktemp("modules")

    def build(source: str, *options: str) -> bytes:
        name = hashlib.sha256((source + "".join(options)).encode()).hexdigest()[:12]
        target = directory / f"{name}.so"
        if not target.exists():
            code = directory / f"{name}.c"
            code.write_text(source)
            subprocess.run([compiler, "-shared", "-fPIC", "-o", str(target), str(code), *options], check=True)
        return target.read_bytes()

    return build


class Node:
    """A cache filled by hand: blobs, a manifest, `current`."""

    def __init__(self, root: Path) -> None:
        self.cache = Cache(root)
        self.cache.prepare()
        self.artifacts: list[BundleArtifact] = []

    def add(
        self,
        path: str,
        data: bytes,
        kind: ArtifactKind,
        *,
        module: str | None = None,
        sms: tuple[str, ...] = (),
    ) -> None:
        sha256 = hashlib.sha256(data).hexdigest()
        self.cache.fan_out([sha256])
        self.cache.blob_path(sha256).write_bytes(data)
        self.artifacts.append(BundleArtifact(path, kind, sha256, len(data), "a" * 64, module, sms=sms))

    def module(self, name: str, data: bytes, *, sms: tuple[str, ...] = ()) -> None:
        path = f"flashinfer_jit_cache/jit_cache/{name}/{name}.so"
        self.add(path, data, ArtifactKind.MODULE, module=name, sms=sms)

    def runtime(self, data: bytes) -> None:
        self.add("tvm_ffi/lib/libtvm_ffi.so", data, ArtifactKind.TVM_FFI)

    def publish(self) -> None:
        wheel = BundleWheel("flashinfer_jit_cache", "0.6.3", "x.whl", "a" * 64, 1, "cu130")
        bundle = Bundle((), Platform(CudaTag(13, 0), ARCH), (wheel,), tuple(self.artifacts))
        data = json.dumps(bundle.to_json(), sort_keys=True).encode()
        digest = hashlib.sha256(data).hexdigest()
        self.cache.bundle_path(digest).write_bytes(data)
        with self.cache.private() as private:
            self.cache.switch(digest, private=private)

    def smoke(self, host: Host = HOST, **options: Any) -> SmokeReport:
        self.publish()
        return smoke(self.cache, host=host, **options)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "cache")


def by(report: SmokeReport, check: str) -> dict[str, tuple[Status, str]]:
    return {o.subject: (o.status, o.detail) for o in report.outcomes if o.check == check}


def test_the_runtime_loads_and_carries_errors_and_calls(node: Node, libtvm_ffi: bytes) -> None:
    node.runtime(libtvm_ffi)
    report = node.smoke()
    status, detail = by(report, "tvm-ffi")["tvm_ffi/lib/libtvm_ffi.so"]
    assert (status, detail.split(".")[:2]) == (Status.PASS, ["0", "1"])
    assert report.ok


def test_a_module_is_loaded_and_tells_its_signature(node: Node, libtvm_ffi: bytes, compiled: Any) -> None:
    node.runtime(libtvm_ffi)
    node.module("norm", compiled(MODULE))
    report = node.smoke()
    assert by(report, "module file")["norm"] == (Status.PASS, "1 functions")
    status, detail = by(report, "module load")["norm"]
    assert status is Status.PASS
    assert "rmsnorm(0: DLTensor*" in detail
    assert report.ok


def test_a_crash_is_an_outcome(node: Node, libtvm_ffi: bytes, compiled: Any) -> None:
    node.runtime(libtvm_ffi)
    node.module("norm", compiled(MODULE))
    node.module("bad", compiled(CRASHES))
    report = node.smoke()
    status, detail = by(report, "module load")["bad"]
    assert (status, detail.split(":")[0]) == (Status.CRASHED, "SIGSEGV")
    assert by(report, "module load")["norm"][0] is Status.PASS
    assert not report.ok


def test_a_hang_is_a_failure(node: Node, libtvm_ffi: bytes, compiled: Any) -> None:
    node.runtime(libtvm_ffi)
    node.module("slow", compiled(SLEEPS))
    report = node.smoke(limits=Limits(timeout=3))
    assert by(report, "module load")["slow"] == (Status.FAIL, "no answer in 3 s")


def test_a_function_that_accepts_anything_is_a_failure(node: Node, libtvm_ffi: bytes, compiled: Any) -> None:
    node.runtime(libtvm_ffi)
    node.module("silent", compiled(SILENT))
    status, detail = by(node.smoke(), "module load")["silent"]
    assert (status, "without arguments" in detail) == (Status.FAIL, True)


def test_files_unfit_to_load_are_refused(node: Node, libtvm_ffi: bytes, compiled: Any) -> None:
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
    node: Node, libtvm_ffi: bytes, compiled: Any, tmp_path: Path
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
    node: Node, libtvm_ffi: bytes, compiled: Any, tmp_path: Path
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
    node: Node, libtvm_ffi: bytes, compiled: Any
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


def test_cubins_are_judged_by_their_headers(node: Node) -> None:
    for index in range(6):
        node.add(f"c/{index}.cubin", cubin() + bytes([index]), ArtifactKind.CUBIN, sms=("sm_90a",))
    node.add("c/cut.cubin", cubin()[:100], ArtifactKind.CUBIN, sms=("sm_90a",))
    node.add("c/empty.cubin", b"", ArtifactKind.CUBIN)
    outcomes = by(node.smoke(), "cubin file")
    assert outcomes["c/cut.cubin"][0] is Status.REFUSED
    assert outcomes["c/empty.cubin"][0] is Status.REFUSED
    assert outcomes["6 cubins"][0] is Status.PASS


def test_named_modules_alone_are_checked(node: Node, libtvm_ffi: bytes, compiled: Any) -> None:
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
