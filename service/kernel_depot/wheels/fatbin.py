"""Which GPU targets a CUDA fatbin holds, read from its record headers; no code is decompressed.

A fatbin is a row of containers, padded with zeros to 8 bytes. A container is

    u32 magic 0xBA55ED50 | u16 version 1 | u16 header size 16 | u64 size of its entries

and an entry, whose payload follows its header at once,

    0x00 u16 kind | 0x02 u16 version | 0x04 u32 header size | 0x08 u64 payload size
    0x10 u32 compressed size | 0x18 u16 minor | 0x1a u16 major | 0x1c u32 SM number | 0x28 u64 flags

all little-endian. NVIDIA publishes no description of it: docs/inspect.md tells what this was checked with.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

from kernel_depot.platform import Sm
from kernel_depot.wheels.inspect_problems import FatbinInvalid

MAGIC = b"\x50\xed\x55\xba"
PTX = 1
ELF = 2

_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI8xQ")
_ARCH_SPECIFIC = 0x100000  # the target was named with an `a`
_FAMILY = 0x200000  # ... with an `f`
_MAX_RECORDS = 1 << 18

Buffer = bytes | memoryview | mmap.mmap


@dataclass(frozen=True, slots=True)
class FatbinEntry:
    """One image: machine code, PTX or another kind, and the target it was built for."""

    kind: int
    sm: Sm


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of all images, sorted: machine code as `sm_90a`, PTX as `compute_90a`."""

    sms: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()


def read_fatbin(data: Buffer, *, start: int, end: int, where: str) -> list[FatbinEntry]:
    """List the images of all containers in `data[start:end]`, in file order.

    Raise FatbinInvalid for bytes that are no container, for a record that leaves its container or the
    section, and for more records than any compiler makes.
    """
    found: list[FatbinEntry] = []
    records = 0
    position = _next_container(data, start, end)
    while position is not None:
        records += 1
        if position + _CONTAINER.size > end:
            raise _broken("a container is cut short", where, position)
        magic, version, header, size = _CONTAINER.unpack_from(data, position)
        if magic != 0xBA55ED50 or version != 1 or header < _CONTAINER.size:
            raise FatbinInvalid(
                f"the container at byte {position} has an unknown header",
                where=where,
                expected="magic 0xba55ed50, version 1",
                found=f"magic {magic:#x}, version {version}, header of {header} bytes",
            )
        entry, stop = position + header, position + header + size
        if stop > end:
            raise _broken("a container is larger than its section", where, position)
        while entry < stop:
            records += 1
            if entry + _ENTRY.size > stop:
                raise _broken("an entry is cut short", where, entry)
            kind, _version, entry_header, payload, sm, flags = _ENTRY.unpack_from(data, entry)
            if entry_header < _ENTRY.size or entry + entry_header + payload > stop:
                raise _broken("an entry leaves its container", where, entry)
            if not 10 <= sm <= 999:
                raise _broken(f"an entry is for SM {sm}, which no GPU has", where, entry)
            found.append(FatbinEntry(kind, _target(sm, flags)))
            entry += entry_header + payload
        if records > _MAX_RECORDS:
            raise _broken(f"more than {_MAX_RECORDS} records", where, position)
        position = _next_container(data, stop, end)
    return found


def targets(entries: list[FatbinEntry]) -> Targets:
    """Reduce images to the distinct targets of machine code and of PTX."""
    return Targets(
        sms=tuple(sm.target for sm in sorted({entry.sm for entry in entries if entry.kind == ELF})),
        ptx=tuple(
            sm.target.replace("sm_", "compute_")
            for sm in sorted({entry.sm for entry in entries if entry.kind == PTX})
        ),
    )


def _next_container(data: Buffer, position: int, end: int) -> int | None:
    """Skip padding; None at the end of the section."""
    step = 64
    while position < end:
        piece = bytes(data[position : min(position + step, end)])
        rest = piece.lstrip(b"\0")
        if rest:
            return position + len(piece) - len(rest)
        position += len(piece)
        step = 1 << 16
    return None


def _target(number: int, flags: int) -> Sm:
    suffix = "a" if flags & _ARCH_SPECIFIC else "f" if flags & _FAMILY else ""
    return Sm(number // 10, number % 10, suffix)


def _broken(what: str, where: str, position: int) -> FatbinInvalid:
    return FatbinInvalid(f"{what} (byte {position})", where=where)
