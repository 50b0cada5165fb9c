"""Which GPU a cubin is for, read from its ELF header and its notes; made to be cheap for thousands of files.

A cubin is an ELF64 file of machine 190 (EM_CUDA). The SM number is in `e_flags`: the low byte up to ABI
version 7, the second byte from ABI version 8 (LLVM, `ELF.h`). Whether the target had a suffix is told, in
this order, by the arguments of ptxas kept in the note section (`-arch sm_100f`), by the accelerator bit of
`e_flags`, or by attribute 9 of `.nv.compat`.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Protocol

from kernel_depot.platform import Sm
from kernel_depot.wheels.inspect_problems import CubinInvalid

EM_CUDA = 190

_HEADER = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SHT_NOTE = 7
_SHT_CUDA_COMPAT = 0x70000086
_TOLD_BY = bytes((_SHT_NOTE & 0xFF, _SHT_CUDA_COMPAT & 0xFF))
_ACCELERATED = {7: 0x800, 8: 0x8}
_COMPAT_ACCELERATED = 9
_SIZED = 4
_TOOL_TARGET = re.compile(rb"-(?:arch|-gpu-name)[ =]sm_(\d{2,3})([af]?)(?![0-9A-Za-z])")
_MAX_NOTE = 1 << 16


class Sliceable(Protocol):
    """Bytes in memory, or a file that reads the slices it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes | memoryview: ...


@dataclass(frozen=True, slots=True)
class CubinTarget:
    """What a cubin runs on; `sm` None when its ABI version is one this reader does not know."""

    sm: Sm | None
    abi: int


def read_cubin(data: Sliceable, *, where: str) -> CubinTarget:
    """Read a cubin's target. Raise CubinInvalid for anything but a well-formed ELF64 file of EM_CUDA."""
    size = len(data)
    if size < _HEADER.size:
        raise CubinInvalid("the file is shorter than an ELF header", where=where, found=f"{size} bytes")
    (
        magic, file_class, order, _version, _os, abi, _type, machine, _version2,
        _entry, _programs, sections, flags, _size, _program_size, _program_count,
        section_size, section_count, _names,
    ) = _HEADER.unpack(data[: _HEADER.size])  # fmt: skip
    if magic != b"\x7fELF" or file_class != 2 or order != 1:
        raise CubinInvalid(
            "the file is not little-endian ELF64",
            where=where,
            expected="7f454c460201",
            found=bytes(data[:6]).hex(),
        )
    if machine != EM_CUDA:
        raise CubinInvalid("the ELF file is not for a GPU", where=where, expected=EM_CUDA, found=machine)
    if section_count and (section_size != _SECTION.size or sections + section_count * section_size > size):
        raise CubinInvalid("the section headers lie outside the file", where=where)
    if abi > 8:
        return CubinTarget(None, abi)
    number = (flags >> 8) & 0xFF if abi == 8 else flags & 0xFF
    if number < 10:
        raise CubinInvalid("the ELF header names no SM", where=where, found=f"e_flags {flags:#x}, ABI {abi}")
    suffix = _suffix(data, sections, section_count, number, where=where)
    if suffix is None:
        suffix = "a" if flags & _ACCELERATED.get(abi, 0) else ""
    return CubinTarget(Sm(number // 10, number % 10, suffix), abi)


def _suffix(data: Sliceable, sections: int, count: int, number: int, *, where: str) -> str | None:
    """Return the suffix that a note or `.nv.compat` tells; None when neither says anything."""
    compat: str | None = None
    table = bytes(data[sections : sections + count * _SECTION.size])
    # A section's type lies in its bytes 4 to 8; looking at the lowest of each skips most sections at once.
    for index, low in enumerate(table[4 :: _SECTION.size]):
        if low not in _TOLD_BY:
            continue
        _name, kind, _flags, _address, offset, length, *_rest = _SECTION.unpack_from(
            table, index * _SECTION.size
        )
        if kind not in (_SHT_NOTE, _SHT_CUDA_COMPAT):
            continue
        if offset + length > len(data):
            raise CubinInvalid("a section lies outside the file", where=where)
        content = bytes(data[offset : offset + min(length, _MAX_NOTE)])
        if kind == _SHT_NOTE:
            match = _TOOL_TARGET.search(content)
            if match is not None and int(match[1]) == number:
                return match[2].decode()
        elif _compat_attribute(content, _COMPAT_ACCELERATED):
            compat = "a"
    return compat


def _compat_attribute(content: bytes, wanted: int) -> int:
    """Return an attribute's 16-bit value out of `.nv.compat`, 0 when it is absent.

    Records are u8 form, u8 attribute, u16 value; with form 4 the value is the length of what follows.
    """
    at = 0
    while at + 4 <= len(content):
        form, attribute, value = struct.unpack_from("<BBH", content, at)
        if form != _SIZED and attribute == wanted:
            return int(value)
        at += 4 + (value if form == _SIZED else 0)
    return 0
