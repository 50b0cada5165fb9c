"""What a shared object says about itself: machine, SONAME, NEEDED, versions needed, exported names, sections.

pyelftools reads the dynamic and version sections, through a stream that ends its patience with files made
to keep it busy. The symbol table is read here with `struct`: the library makes an object for each symbol,
which costs seconds on large files.
"""

from __future__ import annotations

import io
import re
import struct
from dataclasses import dataclass
from typing import IO, cast

from kernel_depot.wheels.fatbin import Buffer
from kernel_depot.wheels.inspect_problems import ElfInvalid

MACHINES = {
    3: "i386",
    40: "arm",
    21: "ppc64",
    22: "s390x",
    62: "x86_64",
    183: "aarch64",
    190: "cuda",
    243: "riscv",
}

_HEADER = struct.Struct("<HHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_DYNAMIC, _SHT_NOBITS, _SHT_DYNSYM, _SHT_VERNEED = 6, 8, 11, 0x6FFFFFFE
_ET_DYN = 3
_GLOBAL = (1, 2, 10)  # STB_GLOBAL, STB_WEAK, STB_GNU_UNIQUE
_MAX_SECTIONS = 4096
_MAX_TABLE = 256 << 20
_MAX_NAME = 4096
_MAX_EXPORTS = 1 << 16
_PATIENCE = 4 << 20
_DOTTED = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}")


@dataclass(frozen=True, slots=True)
class SharedObject:
    """The facts of one ELF64 shared object.

    `glibc` and `glibcxx` are the highest symbol versions needed, as `2.28` and `3.4.21`; `sections` are the
    file ranges of the sections asked for that have bytes.
    """

    machine: str
    soname: str | None
    needed: tuple[str, ...]
    glibc: str | None
    glibcxx: str | None
    exports: tuple[str, ...]
    sections: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Section:
    name: int
    kind: int
    offset: int
    size: int
    link: int
    entry_size: int


class _Impatient(io.RawIOBase):
    """A file for pyelftools: reading more than any real file needs raises ElfInvalid.

    The library follows counts and offsets of the file without bounds, and strings to their NUL.
    """

    def __init__(self, data: Buffer, *, where: str) -> None:
        self._data = data
        self._where = where
        self._position = 0
        self._left = _PATIENCE

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        rest = max(0, len(self._data) - self._position)
        count = rest if size < 0 else min(size, rest)
        self._left -= max(count, 64)
        if self._left < 0:
            raise ElfInvalid("the file's tables are endless or implausibly large", where=self._where)
        piece = bytes(self._data[self._position : self._position + count])
        self._position += count
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position


def elf_machine(data: Buffer, *, where: str) -> str:
    """Return the machine an ELF file is for. Raise ElfInvalid for a file that is not ELF."""
    if len(data) < 20 or bytes(data[:4]) != b"\x7fELF":
        raise ElfInvalid(
            "the file has no ELF header",
            where=where,
            expected="7f454c46",
            found=bytes(data[:4]).hex() or "an empty file",
            remedy="the wheel is broken or is not what its name says",
        )
    order = "<" if data[5] == 1 else ">"
    (machine,) = struct.unpack_from(f"{order}H", data, 18)
    return MACHINES.get(machine, f"e_machine {machine}")


def read_shared_object(data: Buffer, *, prefix: str, wanted: frozenset[str], where: str) -> SharedObject:
    """Read a shared object; `prefix` chooses the exported names, `wanted` the sections to locate.

    Raise ElfInvalid for anything that is not a well-formed little-endian ELF64 shared object.
    """
    machine = elf_machine(data, where=where)
    sections, names = _checked_sections(data, where=where)
    located = tuple(
        (name, section.offset, section.size)
        for section in sections
        if section.kind != _SHT_NOBITS
        and section.size
        and (name := _string(data, names, section.name, where=where)) in wanted
    )
    exports: set[str] = set()
    for section in sections:
        if section.kind == _SHT_DYNSYM:
            exports.update(_exports(data, section, sections[section.link], prefix.encode(), where=where))
    try:
        soname, needed, versions = _dynamic(_Impatient(data, where=where), sections)
    except ElfInvalid:
        raise
    except Exception as error:
        # pyelftools promises no exception types for broken input: parse errors, assertions, Unicode, lookups.
        raise ElfInvalid(f"the dynamic sections cannot be read: {error!r}", where=where) from error
    return SharedObject(
        machine=machine,
        soname=soname,
        needed=needed,
        glibc=_highest(versions, "GLIBC_"),
        glibcxx=_highest(versions, "GLIBCXX_"),
        exports=tuple(sorted(exports)),
        sections=located,
    )


def _checked_sections(data: Buffer, *, where: str) -> tuple[list[_Section], _Section]:
    """Return the section table and the section of names, after checks that bound all later reading."""
    size = len(data)
    if size < 64 or data[4] != 2 or data[5] != 1:
        raise ElfInvalid("the file is not little-endian ELF64", where=where, found=bytes(data[:6]).hex())
    (kind, _machine, _version, _entry, _programs, table, _flags, _size, _program_size, _program_count,
     entry_size, count, names_index) = _HEADER.unpack_from(data, 16)  # fmt: skip
    if kind != _ET_DYN:
        raise ElfInvalid("the file is no shared object", where=where, expected=_ET_DYN, found=kind)
    if entry_size != _SECTION.size or not 0 < count <= _MAX_SECTIONS or names_index >= count:
        raise ElfInvalid(
            "the section table's shape is wrong",
            where=where,
            found=f"{count} sections of {entry_size} bytes, names in {names_index}",
        )
    if table + count * entry_size > size:
        raise ElfInvalid("the section table lies outside the file", where=where, found=f"ends after {size}")
    sections = []
    for fields in _SECTION.iter_unpack(bytes(data[table : table + count * entry_size])):
        name, kind, _flags, _address, offset, length, link, _info, _align, entry = fields
        sections.append(_Section(name, kind, offset, length, link, entry))
    for index, section in enumerate(sections):
        if section.kind not in (0, _SHT_NOBITS) and section.offset + section.size > size:
            raise ElfInvalid(f"section {index} lies outside the file", where=where)
    for section in sections:
        if section.kind == _SHT_DYNSYM and (
            section.link >= count
            or section.entry_size != _SYMBOL.size
            or max(section.size, sections[section.link].size) > _MAX_TABLE
        ):
            raise ElfInvalid("the table of dynamic symbols has a wrong shape", where=where)
    return sections, sections[names_index]


def _string(data: Buffer, table: _Section, index: int, *, where: str) -> str:
    start, end = table.offset + index, table.offset + table.size
    name, nul, _rest = bytes(data[start : min(start + _MAX_NAME, end)]).partition(b"\0")
    if not nul:
        raise ElfInvalid("a name is endless or lies outside its string table", where=where, found=index)
    return name.decode("utf-8", "replace")


def _exports(data: Buffer, symbols: _Section, strings: _Section, prefix: bytes, *, where: str) -> set[str]:
    """Return the defined global names that begin with `prefix`."""
    table = bytes(data[symbols.offset : symbols.offset + symbols.size - symbols.size % _SYMBOL.size])
    names = bytes(data[strings.offset : strings.offset + strings.size])
    offsets = {
        name
        for name, info, _other, section, _value, _size in _SYMBOL.iter_unpack(table)
        if section and info >> 4 in _GLOBAL and names.startswith(prefix, name)
    }
    if len(offsets) > _MAX_EXPORTS:
        raise ElfInvalid("the library exports implausibly many names", where=where, found=len(offsets))
    return {_string(data, strings, offset, where=where) for offset in offsets}


def _dynamic(stream: _Impatient, sections: list[_Section]) -> tuple[str | None, tuple[str, ...], set[str]]:
    """Return SONAME, NEEDED and the needed versions' names."""
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    soname: str | None = None
    needed: list[str] = []
    versions: set[str] = set()
    elf = ELFFile(cast(IO[bytes], stream))
    for index, known in enumerate(sections):
        if known.kind not in (_SHT_DYNAMIC, _SHT_VERNEED):
            continue
        section = elf.get_section(index)
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                # The library adds the attribute `soname` or `needed` to tags of that name only.
                if tag.entry.d_tag == "DT_SONAME":
                    soname = str(vars(tag)["soname"])
                elif tag.entry.d_tag == "DT_NEEDED":
                    needed.append(str(vars(tag)["needed"]))
        elif isinstance(section, GNUVerNeedSection):
            versions.update(aux.name for _, auxes in section.iter_versions() for aux in auxes)
    return soname, tuple(needed), versions


def _highest(versions: set[str], prefix: str) -> str | None:
    """Return the highest of the dotted numbers after `prefix`; names like `GLIBC_PRIVATE` don't count."""
    texts = (name[len(prefix) :] for name in versions if name.startswith(prefix))
    numbers = [tuple(map(int, text.split("."))) for text in texts if _DOTTED.fullmatch(text)]
    return ".".join(map(str, max(numbers))) if numbers else None
