"""What a node must know of an ELF file before it loads it: whole, for this CPU, needing what, offering what.

Format: System V ABI, "Object Files"; sections, because stripping keeps those the loader uses.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kernel_depot.platform import Arch
from kernel_depot.smoke.errors import ElfRefused

MACHINES: Final = {Arch.X86_64: 62, Arch.AARCH64: 183}
EM_CUDA: Final = 190
_NAMES: Final = {
    62: "x86_64",
    183: "aarch64",
    EM_CUDA: "CUDA",
    3: "i386",
    40: "arm",
    21: "ppc64",
    243: "riscv",
}
_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_NOBITS = 6, 11, 8
_DT_NEEDED: Final = 1


@dataclass(frozen=True, slots=True)
class Elf:
    """The needed libraries and the names defined for others."""

    machine: int
    needed: tuple[str, ...]
    defined: frozenset[str]
    undefined: frozenset[str]


def read_header(data: bytes, *, size: int, machine: int, where: str) -> tuple[int, int, int]:
    """Check an ELF header against the file's size and the machine wanted.

    `data` holds at least the first 64 bytes. Return offset, entry size and count of the section headers.
    Raise ElfRefused.
    """
    if len(data) < _HEADER.size or data[:4] != b"\x7fELF":
        raise ElfRefused(
            "the file is no ELF file",
            where=where,
            expected="7f 45 4c 46",
            found=data[:4].hex(" ") or "nothing",
        )
    if data[4:6] != b"\x02\x01":
        raise ElfRefused("the file is not 64-bit little-endian", where=where, found=data[4:6].hex(" "))
    fields = _HEADER.unpack_from(data)
    if fields[2] != machine:
        raise ElfRefused(
            "the file is for another machine",
            where=where,
            expected=_NAMES.get(machine, machine),
            found=_NAMES.get(fields[2], fields[2]),
        )
    offset, entry_size, count = fields[6], fields[11], fields[12]
    if count and (entry_size != _SECTION.size or offset + count * entry_size > size):
        raise ElfRefused(
            "the file is cut off",
            where=where,
            expected=f"{offset + count * entry_size} bytes",
            found=f"{size} bytes",
        )
    return offset, entry_size, count


def read_library(path: Path, *, arch: Arch) -> Elf:
    """Read a shared library's header, needs and symbols. Raise ElfRefused when it is not one for `arch`."""
    data = path.read_bytes()
    where = str(path)
    offset, entry_size, count = read_header(data, size=len(data), machine=MACHINES[arch], where=where)
    sections = [_SECTION.unpack_from(data, offset + index * entry_size) for index in range(count)]
    for section in sections:
        if section[1] != _SHT_NOBITS and section[4] + section[5] > len(data):
            raise ElfRefused(
                "the file is cut off",
                where=where,
                expected=f"{section[4] + section[5]} bytes",
                found=len(data),
            )
    try:
        needed, defined, undefined = _dynamic(data, sections)
    except (struct.error, IndexError, ValueError) as error:
        raise ElfRefused("the file's dynamic section is broken", where=where, found=repr(error)) from error
    return Elf(MACHINES[arch], needed, defined, undefined)


def _dynamic(
    data: bytes, sections: list[tuple[int, ...]]
) -> tuple[tuple[str, ...], frozenset[str], frozenset[str]]:
    needed: list[str] = []
    defined: set[str] = set()
    undefined: set[str] = set()
    for section in sections:
        kind, start, length, link = section[1], section[4], section[5], section[6]
        if kind == _SHT_DYNAMIC:
            strings = _strings(data, sections[link])
            for tag, value in struct.iter_unpack("<qQ", data[start : start + length - length % 16]):
                if tag == _DT_NEEDED:
                    needed.append(_name(strings, value))
        elif kind == _SHT_DYNSYM:
            strings = _strings(data, sections[link])
            for name, _, _, index, _, _ in _SYMBOL.iter_unpack(
                data[start : start + length - length % _SYMBOL.size]
            ):
                if name:
                    (defined if index else undefined).add(_name(strings, name))
    return tuple(needed), frozenset(defined), frozenset(undefined)


def _strings(data: bytes, section: tuple[int, ...]) -> bytes:
    return data[section[4] : section[4] + section[5]]


def _name(strings: bytes, offset: int) -> str:
    return strings[offset : strings.index(b"\0", offset)].decode("utf-8", "replace")
