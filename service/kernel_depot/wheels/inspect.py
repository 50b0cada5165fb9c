"""What an artifact says about itself, checked against what its wheel's pin says."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernel_depot.bundle import ArtifactKind
from kernel_depot.platform import Arch
from kernel_depot.wheels.cubin import read_cubin
from kernel_depot.wheels.fatbin import MAGIC, Buffer, FatbinEntry, read_fatbin, targets
from kernel_depot.wheels.inspect_problems import CubinInvalid, ElfInvalid, WrongMachine

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
        return _inspect_cubin(source.read_bytes() if isinstance(source, Path) else source, where=where)
    if kind in (ArtifactKind.MODULE, ArtifactKind.TVM_FFI):
        with _mapped(source, where=where) as data:
            return _inspect_library(data, arch=arch, where=where)
    return None


def _inspect_cubin(data: Buffer, *, where: str) -> Inspection:
    if bytes(data[:4]) == MAGIC:
        found = targets(read_fatbin(data, start=0, end=len(data), where=where))
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


@contextmanager
def _mapped(source: Path | Buffer, *, where: str) -> Iterator[Buffer]:
    """Give the bytes of `source`, mapped so that only what is read of a large file comes into memory."""
    if not isinstance(source, Path):
        yield source
        return
    with source.open("rb") as file:
        try:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise ElfInvalid("the file is empty", where=where) from error
    with mapping:
        yield mapping
