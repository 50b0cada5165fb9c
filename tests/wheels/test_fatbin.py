from __future__ import annotations

import contextlib
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.platform import Sm
from kernel_depot.wheels.fatbin import ELF, PTX, FatbinEntry, Targets, read_fatbin, targets
from kernel_depot.wheels.inspect_problems import FatbinInvalid

# Headers of entries that nvcc 13.0 made, as hexadecimal; the third word is the payload's size.
SM_80 = (
    "02000101 40000000 a80c0000 00000000 00000000 00000000 08000100 50000000 00000000 00000000 11000000"
    + (" 00000000" * 5)
)
PTX_90 = (
    "01000101 50000000 78010000 00000000 76010000 40000000 00000900 5a000000 00000000 00000000 11800000"
    + (" 00000000" * 3 + " 22030000 00000000 48000000 00000000 00000000 00000000")
)
SM_90A = (
    "02000101 40000000 000f0000 00000000 00000000 00000000 08000100 5a000000 00000000 00000000 11001000"
    + (" 00000000" * 5)
)
SM_100F_PACKED = (
    "02000101 70000000 90050000 00000000 8d050000 40000000 08000100 64000000 00000000 00000000 11802001"
    " 00000000 00000000 00000000 30160000 00000000 48000000 24000000 00020900 00020201 00020505 00030701"
    " 01020300 00020601 00040b08 00090000 00000000 00000000"
)
PTX_100F = PTX_90.replace("5a000000", "64000000").replace("11800000", "11802000")


def entry(header: str) -> bytes:
    data = bytes.fromhex(header)
    (size,) = struct.unpack_from("<Q", data, 8)
    return data + bytes(size)


def container(*entries: bytes, version: int = 1, magic: int = 0xBA55ED50) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", magic, version, 16, len(body)) + body


def read(data: bytes) -> list[FatbinEntry]:
    return read_fatbin(data, start=0, end=len(data), where="test")


def test_entries_of_nvcc() -> None:
    data = container(*map(entry, (SM_80, PTX_90, SM_90A, SM_100F_PACKED, PTX_100F)))
    found = read(data)
    assert found == [
        FatbinEntry(ELF, Sm(8, 0)),
        FatbinEntry(PTX, Sm(9, 0)),
        FatbinEntry(ELF, Sm(9, 0, "a")),
        FatbinEntry(ELF, Sm(10, 0, "f")),
        FatbinEntry(PTX, Sm(10, 0, "f")),
    ]
    assert targets(found) == Targets(sms=("sm_80", "sm_90a", "sm_100f"), ptx=("compute_90", "compute_100f"))


def test_several_containers_with_padding() -> None:
    data = container(entry(SM_80)) + bytes(24) + container(entry(SM_90A)) + container() + bytes(100_000)
    assert [item.sm for item in read(data)] == [Sm(8, 0), Sm(9, 0, "a")]


def test_a_part_of_a_larger_file() -> None:
    data = b"before" + container(entry(SM_80)) + b"after"
    assert len(read_fatbin(data, start=6, end=len(data) - 5, where="test")) == 1


def test_nothing_but_padding_is_nothing() -> None:
    assert read(b"") == []
    assert read(bytes(1000)) == []


def test_unknown_kinds_count_for_no_target() -> None:
    other = bytearray(entry(SM_80))
    other[0] = 8
    assert targets(read(container(bytes(other)))) == Targets()


@pytest.mark.parametrize(
    "data",
    [
        b"garbage that is no container",
        container(entry(SM_80), magic=0x466243B1),
        container(entry(SM_80), version=2),
        container(entry(SM_80))[:-1],
        container(entry(SM_80))[:10],
        container(entry(SM_80)[:40]),
        container(entry(SM_80)[:-8]),
        container(entry(SM_80.replace("40000000", "00000000", 1))),
        container(entry(SM_80.replace("50000000", "05000000"))),
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 63),
        struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0),
        container() * ((1 << 18) + 2),
    ],
    ids=[
        "garbage", "magic", "version", "cut", "cut header", "cut entry header", "cut payload",
        "no header size", "no SM", "endless", "no container header", "too many",
    ],
)  # fmt: skip
def test_broken_fatbins_are_refused(data: bytes) -> None:
    with pytest.raises(FatbinInvalid):
        read(data)


@given(st.binary(max_size=300))
def test_no_bytes_fail_otherwise(data: bytes) -> None:
    for candidate in (data, b"\x50\xed\x55\xba" + data, container(data)):
        with contextlib.suppress(FatbinInvalid):
            assert isinstance(read(candidate), list)


@given(st.data())
def test_no_damage_fails_otherwise(data: st.DataObject) -> None:
    image = bytearray(container(*map(entry, (SM_80, PTX_90, SM_100F_PACKED))))
    for _ in range(data.draw(st.integers(1, 4))):
        image[data.draw(st.integers(0, 200))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FatbinInvalid):
        read(bytes(image))


SOURCE = "__global__ void add(float *a, const float *b) { a[threadIdx.x] += b[threadIdx.x]; }"


@pytest.mark.parametrize("packing", [(), ("--no-compress",), ("-Xfatbin", "-compress-all")])
def test_agrees_with_cuobjdump(tmp_path: Path, packing: tuple[str, ...]) -> None:
    nvcc, cuobjdump = shutil.which("nvcc"), shutil.which("cuobjdump")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    (tmp_path / "add.cu").write_text(SOURCE)
    code = ["80", "90a", "100f"]
    command = [nvcc, "-fatbin", "add.cu", "-o", "add.fatbin", *packing]
    for name in code:
        command += ["-gencode", f"arch=compute_{name},code=sm_{name}"]
    command += ["-gencode", "arch=compute_90,code=compute_90"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"nvcc does not know all of these targets: {built.stderr[:200]}")
    found = read((tmp_path / "add.fatbin").read_bytes())
    assert targets(found).sms == tuple(Sm.parse(name).target for name in code)
    assert targets(found).ptx == ("compute_90",)
    if cuobjdump is None:
        pytest.skip("no cuobjdump on PATH; compared with what nvcc was asked for alone")
    listed = subprocess.run(
        [cuobjdump, "-all", "--list-elf", "--list-ptx", "add.fatbin"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    theirs = Counter(
        (line[:3], line.rsplit(".", 2)[1]) for line in listed.stdout.splitlines() if " file " in line
    )
    # cuobjdump names family code in cubins by the plain target.
    ours = Counter(
        ("ELF", item.sm.target.rstrip("f")) if item.kind == ELF else ("PTX", item.sm.target) for item in found
    )
    assert ours == theirs
