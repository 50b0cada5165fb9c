from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.platform import Sm
from kernel_depot.wheels.cubin import CubinTarget, read_cubin
from kernel_depot.wheels.inspect_problems import CubinInvalid

NOTE, COMPAT = 7, 0x70000086
# .nv.compat as ptxas 13.0 writes it for sm_90a, and for sm_100f
COMPAT_A = bytes.fromhex("02090100 02020100 02050500 03070101 02030000 02060100 040b0800 00000000 00000000")
COMPAT_F = bytes.fromhex("02090000 02020100 02050500 03070101 02030000 02060100 040b0800 09000000 00000000")


def tool_note(arguments: str) -> bytes:
    text = f"\0ptxas\0Cuda compilation tools, release 13.0, V13.0.88\0{arguments}\0".encode()
    return struct.pack("<III", 12, len(text), 2000) + b"NVIDIA Corp\0" + text


def cubin(
    flags: int, *, abi: int = 8, machine: int = 190, sections: tuple[tuple[int, bytes], ...] = ()
) -> bytes:
    content = b""
    table = bytes(64)
    for kind, data in sections:
        table += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, 64 + len(content), len(data), 0, 0, 1, 0)
        content += data
    identity = b"\x7fELF\x02\x01\x01" + bytes([65 if abi > 7 else 51, abi]) + bytes(7)
    header = struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, 64 + len(content), flags, 64, 56, 0, 64, len(sections) + 1, 0
    )
    return identity + header + content + table


@pytest.mark.parametrize(
    ("data", "sm"),
    [
        # ABI 7, as CUDA 11 and 12 write it
        (cubin(0x500550, abi=7), "80"),
        (cubin(0x5A055A, abi=7), "90"),
        (cubin(0x5A0D5A, abi=7), "90a"),
        # ABI 8, by flags alone
        (cubin(0x6005004), "80"),
        (cubin(0x6007802), "120"),
        (cubin(0x1000640C), "100a"),
        (cubin(0x600670A), "103a"),
        # ABI 8 of CUDA 13, which leaves the flag away
        (cubin(0x6005A04, sections=((COMPAT, COMPAT_A),)), "90a"),
        (cubin(0x6006402, sections=((COMPAT, COMPAT_F),)), "100"),
        # what ptxas was told is the most exact
        (cubin(0x6006402, sections=((NOTE, tool_note("-arch sm_100f -m 64 ")), (COMPAT, COMPAT_F))), "100f"),
        (
            cubin(0x6005A04, sections=((NOTE, tool_note("-v  -arch sm_90a -m 64 ")), (COMPAT, COMPAT_A))),
            "90a",
        ),
        (cubin(0x6005A04, sections=((NOTE, tool_note("-arch sm_90 -m 64 ")),)), "90"),
        # a note about another target, or with a name that goes on, says nothing
        (cubin(0x6006402, sections=((NOTE, tool_note("-arch sm_90a -m 64 ")),)), "100"),
        (cubin(0x6006402, sections=((NOTE, tool_note("-arch sm_100fx -m 64 ")),)), "100"),
    ],
)
def test_targets(data: bytes, sm: str) -> None:
    assert read_cubin(data, where="test").sm == Sm.parse(sm)


def test_an_unknown_abi_has_no_target() -> None:
    assert read_cubin(cubin(0x6006402, abi=9), where="test") == CubinTarget(None, 9)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x7fELF",
        b"<!DOCTYPE html>" + bytes(100),
        cubin(0x6005004, machine=62),
        b"\x7fELF\x01" + cubin(0x6005004)[5:],
        b"\x7fELF\x02\x02" + cubin(0x6005004)[6:],
        cubin(0x6005004)[:-1],
        cubin(0x04),
        cubin(0x6006402, sections=((NOTE, bytes(64)),)).replace(
            struct.pack("<QQ", 64, 64), struct.pack("<QQ", 64, 1 << 62)
        ),
    ],
    ids=[
        "empty",
        "cut",
        "html",
        "host code",
        "32 bit",
        "big endian",
        "cut table",
        "no SM",
        "section outside",
    ],
)
def test_what_is_no_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(CubinInvalid):
        read_cubin(data, where="test")


@given(st.data())
def test_no_damage_fails_otherwise(data: st.DataObject) -> None:
    image = bytearray(
        cubin(0x6005A04, sections=((NOTE, tool_note("-arch sm_90a -m 64 ")), (COMPAT, COMPAT_A)))
    )
    for _ in range(data.draw(st.integers(1, 6))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CubinInvalid):
        read_cubin(bytes(image[: data.draw(st.integers(0, len(image)))]), where="test")
