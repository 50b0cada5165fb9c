from __future__ import annotations

import contextlib
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_depot.wheels.elf import SharedObject, read_shared_object
from kernel_depot.wheels.inspect_problems import ElfInvalid

STRTAB, DYNAMIC, NOBITS, DYNSYM, VERNEED = 3, 6, 8, 11, 0x6FFFFFFE


@dataclass
class Library:
    """Writes a small ELF64 shared object; single fields can be made to lie."""

    machine: int = 62
    kind: int = 3
    soname: str | None = "libk.so"
    needed: tuple[str, ...] = ("libtvm_ffi.so", "libc.so.6")
    versions: tuple[str, ...] = (
        "GLIBC_2.17",
        "GLIBC_2.4",
        "GLIBC_PRIVATE",
        "GLIBCXX_3.4.21",
        "GLIBCXX_3.4.9",
    )
    # name, defined, binding
    symbols: tuple[tuple[str, bool, int], ...] = (
        ("__tvm_ffi_run", True, 1),
        ("__tvm_ffi_plan", True, 2),
        ("__tvm_ffi_wanted", False, 1),
        ("__tvm_ffi_local", True, 0),
        ("helper", True, 1),
    )
    fatbin: bytes = b"fatbin bytes"
    section_entry_size: int = 64
    section_count: int | None = None
    headers: dict[str, dict[str, int]] = field(default_factory=dict)
    next_version: int = 16
    end_dynamic: bool = True
    end_strings: bool = True

    def build(self) -> bytes:
        strings = bytearray(b"\0")

        def text(value: str) -> int:
            strings.extend(value.encode() + b"\0")
            return len(strings) - len(value.encode()) - 1

        symbols = bytes(24)
        for name, defined, binding in self.symbols:
            symbols += struct.pack("<IBBHQQ", text(name), binding << 4 | 2, 0, int(defined), 0, 0)
        tags = [(1, text(name)) for name in self.needed]
        if self.soname is not None:
            tags.append((14, text(self.soname)))
        dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags) + (
            bytes(16) if self.end_dynamic else b""
        )
        versions = struct.pack("<HHIII", 1, len(self.versions), text("libc.so.6"), 16, 0)
        for name in self.versions:
            versions += struct.pack("<IHHII", 0, 0, 2, text(name), self.next_version)
        if not self.end_strings:
            strings[-1:] = b"x" * 10_000
        sections = {
            ".dynstr": (STRTAB, bytes(strings), 0, 0, 0),
            ".dynsym": (DYNSYM, symbols, 1, 1, 24),
            ".gnu.version_r": (VERNEED, versions, 1, 1, 0),
            ".dynamic": (DYNAMIC, dynamic, 1, 0, 16),
            ".nv_fatbin": (1, self.fatbin, 0, 0, 0),
            ".bss": (NOBITS, b"", 0, 0, 0),
            ".shstrtab": (STRTAB, b"", 0, 0, 0),
        }
        names = b"\0" + b"".join(name.encode() + b"\0" for name in sections)
        body, table = bytearray(64), bytearray(64)
        for name, (kind, content, link, info, entry_size) in sections.items():
            content = names if name == ".shstrtab" else content
            values = {
                "name": names.index(name.encode() + b"\0"), "kind": kind, "offset": len(body),
                "size": len(content), "link": link, "info": info, "entry_size": entry_size,
            }  # fmt: skip
            values.update(self.headers.get(name, {}))
            table += struct.pack(
                "<IIQQQQIIQQ",
                *(values["name"], values["kind"], 0, 0, values["offset"], values["size"]),
                *(values["link"], values["info"], 8, values["entry_size"]),
            )
            body += content
        count = len(sections) + 1 if self.section_count is None else self.section_count
        body[:16] = b"\x7fELF\x02\x01\x01" + bytes(9)
        body[16:64] = struct.pack(
            "<HHIQQQIHHHHHH",
            *(self.kind, self.machine, 1, 0, 0, len(body), 0, 64, 56, 0),
            *(self.section_entry_size, count, len(sections)),
        )
        return bytes(body + table)


def read(data: bytes) -> SharedObject:
    return read_shared_object(data, prefix="__tvm_ffi_", wanted=frozenset({".nv_fatbin"}), where="test")


def test_facts() -> None:
    data = Library().build()
    found = read(data)
    assert found.machine == "x86_64"
    assert found.soname == "libk.so"
    assert found.needed == ("libtvm_ffi.so", "libc.so.6")
    assert found.glibc == "2.17"
    assert found.glibcxx == "3.4.21"
    assert found.exports == ("__tvm_ffi_plan", "__tvm_ffi_run")
    ((name, offset, size),) = found.sections
    assert (name, data[offset : offset + size]) == (".nv_fatbin", b"fatbin bytes")


def test_absent_facts() -> None:
    found = read(Library(soname=None, needed=(), versions=("OTHER_1",), symbols=(), fatbin=b"").build())
    assert found == SharedObject("x86_64", None, (), None, None, (), ())


def test_numbers_are_compared_as_numbers() -> None:
    assert read(Library(versions=("GLIBC_2.9", "GLIBC_2.34", "GLIBC_2.2.5")).build()).glibc == "2.34"


@pytest.mark.parametrize(("machine", "name"), [(183, "aarch64"), (40, "arm"), (4711, "e_machine 4711")])
def test_machines(machine: int, name: str) -> None:
    assert read(Library(machine=machine).build()).machine == name


HUGE = 1 << 62


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x7fELF",
        b"MZ" + bytes(200),
        Library().build()[:60],
        Library().build()[:-1],
        b"\x7fELF\x01" + Library().build()[5:],
        b"\x7fELF\x02\x02" + Library().build()[6:],
        Library(kind=1).build(),
        Library(section_entry_size=0).build(),
        Library(section_count=0).build(),
        Library(section_count=0xFF00).build(),
        Library(headers={".dynstr": {"size": HUGE}}).build(),
        Library(headers={".nv_fatbin": {"offset": HUGE}}).build(),
        Library(headers={".dynsym": {"link": 99}}).build(),
        Library(headers={".dynsym": {"entry_size": 0}}).build(),
        Library(headers={".dynamic": {"link": 99}}).build(),
        Library(headers={".dynamic": {"link": 5}}).build(),
        Library(headers={".gnu.version_r": {"link": 5}}).build(),
        Library(headers={".gnu.version_r": {"info": 0xFFFFFFFF}}).build(),
        Library(headers={".nv_fatbin": {"name": 1 << 20}}).build(),
        Library(symbols=(("__tvm_ffi_" + "x" * 5000, True, 1),)).build(),
        Library(versions=("V",) * 0xFFFF, next_version=0).build(),
        Library(symbols=(), needed=("a" * 20_000_000,)).build(),
    ],
    ids=[
        "empty", "only magic", "not ELF", "cut header", "cut table", "32 bit", "big endian", "object file",
        "sections of no size", "no sections", "too many sections", "section too large", "section too far",
        "symbols without strings", "symbols of no size", "dynamic without strings", "dynamic with code",
        "versions with code", "endless versions", "name outside", "endless name", "circling versions",
        "endless string",
    ],
)  # fmt: skip
def test_hostile_files_are_refused(data: bytes) -> None:
    with pytest.raises(ElfInvalid):
        read(data)


@settings(max_examples=50)
@given(st.data())
def test_no_damage_fails_otherwise(data: st.DataObject) -> None:
    image = bytearray(Library().build())
    for _ in range(data.draw(st.integers(1, 5))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ElfInvalid):
        read(bytes(image))


def real_libraries() -> list[Path]:
    found = [Path(spec.origin) for spec in map(find_spec, ("_ctypes", "_ssl")) if spec and spec.origin]
    tvm_ffi = find_spec("tvm_ffi")
    if tvm_ffi is not None and tvm_ffi.origin is not None:
        found += sorted(Path(tvm_ffi.origin).parent.rglob("*.so"))
    return [path for path in found if ".so" in path.name]


def test_real_libraries_agree_with_readelf() -> None:
    readelf = shutil.which("readelf")
    libraries = real_libraries()
    assert libraries, f"no shared object near {sys.executable}"
    for path in libraries:
        found = read_shared_object(path.read_bytes(), prefix="", wanted=frozenset(), where=path.name)
        assert "libc.so.6" in found.needed
        assert found.glibc is not None
        if readelf is None:
            continue
        listed = subprocess.run(
            [readelf, "-dVW", "--dyn-syms", str(path)], capture_output=True, text=True, check=True
        ).stdout
        lines = listed.splitlines()
        bracketed = {
            tag: [_bracket(line) for line in lines if f"({tag})" in line] for tag in ("NEEDED", "SONAME")
        }
        assert list(found.needed) == bracketed["NEEDED"]
        assert ([found.soname] if found.soname else []) == bracketed["SONAME"]
        names = {
            parts[7].split("@")[0]
            for parts in (line.split() for line in lines)
            if len(parts) >= 8 and parts[4] in ("GLOBAL", "WEAK", "UNIQUE") and parts[6] != "UND"
        }
        assert set(found.exports) == names
        assert f"Name: GLIBC_{found.glibc} " in listed


def _bracket(line: str) -> str:
    return line.partition("[")[2].partition("]")[0]
