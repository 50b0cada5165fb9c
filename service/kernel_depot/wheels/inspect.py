"""What an artifact says about itself, checked against what its wheel's pin says."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernel_depot.bundle import ArtifactKind
from kernel_depot.platform import Arch
from kernel_depot.wheels.cubin import Sliceable, read_cubin
from kernel_depot.wheels.fatbin import MAGIC, Buffer, FatbinEntry, read_fatbin, targets
from kernel_depot.wheels.inspect_problems import CubinInvalid, WrongMachine

FUNCTION_PREFIX = "__tvm_ffi_"
FATBIN_SECTIONS = frozenset({".nv_fatbin", "__nv_relfatbin"})


@dataclass(frozen=True, slots=True)
class Inspection:
    """Facts read out of an artifact's bytes.

    `functions` are the exported `__tvm_ffi_*` names; `sms` the targets with machine code (`sm_90a`), `ptx`
    those with PTX (`compute_90`). No `sms` and no `ptx` means the file has no GPU code that could be read.
    """

    format: str
    machine: str
    soname: str | None = None
    needed: tuple[str, ...] = ()
    glibc: str | None = None
    glibcxx: str | None = None
    functions: tuple[str, ...] = ()
    sms: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()


def inspect(source: Path | Buffer, *, kind: ArtifactKind, arch: Arch | None, where: str) -> Inspection | None:
    """Read an artifact of `kind`; None for kinds that carry no code.

    `arch` is the pin's, None where the wheel is for any CPU. `where` names the file in errors. Raise
    WrongMachine, ElfInvalid, FatbinInvalid or CubinInvalid.
    """
    if kind is ArtifactKind.CUBIN:
        if not isinstance(source, Path):
            return _inspect_cubin(source, where=where)
        with _Pieces(source) as pieces:
            return _inspect_cubin(pieces, where=where)
    if kind in (ArtifactKind.MODULE, ArtifactKind.TVM_FFI):
        with _mapped(source) as data:
            return _inspect_library(data, arch=arch, where=where)
    return None


def _inspect_cubin(data: Sliceable, *, where: str) -> Inspection:
    if data[:4] == MAGIC:
        found = targets(read_fatbin(bytes(data[:]), start=0, end=len(data), where=where))
        if not found.sms and not found.ptx:
            raise CubinInvalid("the fatbin holds no code", where=where)
        return Inspection("fatbin", "cuda", sms=found.sms, ptx=found.ptx)
    target = read_cubin(data, where=where)
    return Inspection("cubin", "cuda", sms=(target.sm.target,) if target.sm is not None else ())


def _inspect_library(data: Buffer, *, arch: Arch | None, where: str) -> Inspection:
    from kernel_depot.wheels.elf import elf_machine, read_shared_object

    machine = elf_machine(data, where=where)
    if arch is not None and machine != arch.value:
        raise WrongMachine(
            f"the library is for {machine}, its wheel is pinned for {arch}",
            where=where,
            expected=arch.value,
            found=machine,
            remedy="check the pin's table and file name; the wheel may carry the wrong build",
        )
    found = read_shared_object(data, prefix=FUNCTION_PREFIX, wanted=FATBIN_SECTIONS, where=where)
    entries: list[FatbinEntry] = []
    for name, offset, size in found.sections:
        entries += read_fatbin(data, start=offset, end=offset + size, where=f"{where} ({name})")
    gpu = targets(entries)
    return Inspection(
        format="elf",
        machine=found.machine,
        soname=found.soname,
        needed=found.needed,
        glibc=found.glibc,
        glibcxx=found.glibcxx,
        functions=found.exports,
        sms=gpu.sms,
        ptx=gpu.ptx,
    )


class _Pieces:
    """A file of which only the slices asked for are read: cheaper for small files than mapping them."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size

    def __enter__(self) -> _Pieces:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _step = part.indices(self._size)
        return os.pread(self._descriptor, stop - start, start) if stop > start else b""


@contextmanager
def _mapped(source: Path | Buffer) -> Iterator[Buffer]:
    """Give the bytes of `source`, mapped so that only what is read of a large file comes into memory."""
    if not isinstance(source, Path):
        yield bytes(source) if isinstance(source, memoryview) else source
        return
    with source.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else None
    if mapping is None:
        yield b""
        return
    with mapping:
        yield mapping
