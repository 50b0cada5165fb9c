from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from kernel_depot.bundle import ArtifactKind
from kernel_depot.platform import Arch, Sm, has_code_for
from kernel_depot.wheels.inspect import Inspection, inspect
from kernel_depot.wheels.inspect_problems import CubinInvalid, ElfInvalid, FatbinInvalid, WrongMachine


@pytest.fixture
def libtvm_ffi() -> Path:
    spec = find_spec("tvm_ffi")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib" / "libtvm_ffi.so"


def other(arch: Arch) -> Arch:
    return Arch.AARCH64 if arch is Arch.X86_64 else Arch.X86_64


def test_the_runtime_library(libtvm_ffi: Path) -> None:
    found = inspect(libtvm_ffi, kind=ArtifactKind.TVM_FFI, arch=None, where="wheel")
    assert found is not None
    assert found.format == "elf"
    assert found.soname == "libtvm_ffi.so"
    assert "libstdc++.so.6" in found.needed
    assert found.glibcxx is not None
    assert (found.sms, found.ptx) == ((), ())
    arch = Arch.parse(found.machine)
    assert inspect(libtvm_ffi, kind=ArtifactKind.TVM_FFI, arch=arch, where="wheel") == found
    with pytest.raises(WrongMachine) as caught:
        inspect(libtvm_ffi, kind=ArtifactKind.TVM_FFI, arch=other(arch), where="wheel")
    assert (caught.value.expected, caught.value.found) == (str(other(arch)), str(arch))


def test_bytes_views_and_maps_read_alike(libtvm_ffi: Path) -> None:
    expected = inspect(libtvm_ffi, kind=ArtifactKind.MODULE, arch=None, where="wheel")
    data = libtvm_ffi.read_bytes()
    for source in (data, memoryview(data)):
        assert inspect(source, kind=ArtifactKind.MODULE, arch=None, where="wheel") == expected
    with (
        libtvm_ffi.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
    ):
        assert inspect(mapping, kind=ArtifactKind.MODULE, arch=None, where="wheel") == expected


@pytest.mark.parametrize("kind", [ArtifactKind.SUPPORT, ArtifactKind.METADATA])
def test_other_kinds_carry_no_code(kind: ArtifactKind) -> None:
    assert inspect(b"text", kind=kind, arch=Arch.X86_64, where="wheel") is None


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"<html>Not found</html>", bytes(4096)])
def test_what_is_no_library_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "norm.so").write_bytes(content)
    for source in (tmp_path / "norm.so", content):
        with pytest.raises(ElfInvalid):
            inspect(source, kind=ArtifactKind.MODULE, arch=Arch.X86_64, where="norm.so")


def test_a_library_cut_anywhere_is_refused(libtvm_ffi: Path) -> None:
    data = libtvm_ffi.read_bytes()
    for part in range(8):
        with pytest.raises(ElfInvalid):
            inspect(data[: len(data) * part // 8], kind=ArtifactKind.MODULE, arch=None, where="cut")


@pytest.mark.parametrize("content", [b"", b"<html>Not found</html>", b"\x7fELF" + bytes(100)])
def test_what_is_no_cubin_is_refused(content: bytes) -> None:
    with pytest.raises(CubinInvalid):
        inspect(content, kind=ArtifactKind.CUBIN, arch=None, where="a.cubin")


def test_a_fatbin_under_a_cubins_name() -> None:
    entry = bytearray(64)
    struct.pack_into("<HHIQ", entry, 0, 2, 0x101, 64, 0)
    struct.pack_into("<I", entry, 0x1C, 90)
    struct.pack_into("<Q", entry, 0x28, 0x100011)
    data = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry
    found = inspect(data, kind=ArtifactKind.CUBIN, arch=None, where="a.cubin")
    assert found == Inspection("fatbin", "cuda", sms=("sm_90a",))
    with pytest.raises(FatbinInvalid):
        inspect(data[:-1], kind=ArtifactKind.CUBIN, arch=None, where="a.cubin")


MODULE = """
extern "C" __global__ void add(float *a, const float *b) { a[threadIdx.x] += b[threadIdx.x]; }
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_add(float *a, const float *b) {
    add<<<1, 32>>>(a, b);
    return 0;
}
"""


def test_a_compiled_module(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    (tmp_path / "add.cu").write_text(MODULE)
    command = [nvcc, "-shared", "-Xcompiler", "-fPIC", "-cudart", "none", "add.cu", "-o", "add.so"]
    for code in (
        "arch=compute_80,code=sm_80",
        "arch=compute_90a,code=sm_90a",
        "arch=compute_90,code=compute_90",
    ):
        command += ["-gencode", code]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    found = inspect(tmp_path / "add.so", kind=ArtifactKind.MODULE, arch=None, where="add.so")
    assert found is not None
    assert found.functions == ("__tvm_ffi_add",)
    assert found.sms == ("sm_80", "sm_90a")
    assert found.ptx == ("compute_90",)
    assert has_code_for(Sm.parse("sm_120"), sms=found.sms, ptx=found.ptx)
    assert not has_code_for(Sm.parse("sm_75"), sms=found.sms, ptx=found.ptx)
