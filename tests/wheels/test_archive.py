"""The zip reader against the standard library's writer and reader, and against noise."""

from __future__ import annotations

import importlib.resources
import io
import mmap
import stat
import struct
import unicodedata
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_depot.wheels.archive import ArchiveLimits, Member, read_members
from kernel_depot.wheels.errors import WheelError
from kernel_depot.wheels.unpack import PIECE, read_whole, unpack

LIMITS = ArchiveLimits(max_ratio=2000)
_SEGMENT = st.text(
    st.characters(
        min_codepoint=0x21, max_codepoint=0x17F, exclude_characters='/\\:\x7f"', categories=["L", "N"]
    ),
    min_size=1,
    max_size=20,
)
_NAMES = st.lists(_SEGMENT, min_size=1, max_size=4).map("/".join)
_CONTENT = st.one_of(
    st.binary(max_size=200),
    st.tuples(st.binary(min_size=1, max_size=8), st.integers(0, 5000)).map(lambda pair: pair[0] * pair[1]),
)


def _contents(data: bytes) -> dict[str, bytes]:
    members = read_members(data, where="test", limits=LIMITS)
    return {member.name: read_whole(data, member, where="test") for member in members}


def _mean_one_file(files: Iterable[str]) -> bool:
    names = [unicodedata.normalize("NFKC", name) for name in files]
    folded = {unicodedata.normalize("NFKC", name.casefold()) for name in names}
    parents = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    return len(folded) < len(names) or bool(parents & set(files))


class _Pipe(io.RawIOBase):
    """A file that cannot seek, so that zipfile writes data descriptors."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self.data += piece
        return len(piece)


def _write(files: dict[str, bytes], methods: list[int], *, seekable: bool, zip64: bool) -> bytes:
    target: Any = io.BytesIO() if seekable else _Pipe()
    with zipfile.ZipFile(target, "w") as archive:
        for number, (name, content) in enumerate(files.items()):
            info = zipfile.ZipInfo(name)
            info.compress_type = methods[number % len(methods)]
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            with archive.open(info, "w", force_zip64=zip64) as member:
                member.write(content)
    return bytes(target.getvalue() if seekable else target.data)


@settings(max_examples=150)
@given(
    files=st.dictionaries(_NAMES, _CONTENT, max_size=8),
    methods=st.lists(st.sampled_from([0, 8]), min_size=1, max_size=3),
    seekable=st.booleans(),
    zip64=st.booleans(),
)
def test_reads_what_zipfile_writes(
    files: dict[str, bytes], methods: list[int], seekable: bool, zip64: bool
) -> None:
    data = _write(files, methods, seekable=seekable, zip64=zip64)
    if _mean_one_file(files):
        with pytest.raises(WheelError, match=r"names|directory of another"):
            _contents(data)
    else:
        assert _contents(data) == files


@settings(max_examples=600)
@given(
    seekable=st.booleans(),
    zip64=st.booleans(),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3),
)
def test_flipped_bytes_are_refused_or_harmless(
    seekable: bool, zip64: bool, flips: list[tuple[float, int]]
) -> None:
    files = {"a/b.cubin": b"machine code " * 20, "a/empty": b"", "c.so": bytes(range(256)), "d/\u00e9": b"x"}
    data = bytearray(_write(files, [8, 0], seekable=seekable, zip64=zip64))
    for place, mask in flips:
        data[int(place * len(data))] ^= mask
    try:
        found = _contents(bytes(data))
    except WheelError:
        return
    assert list(found.values()) == list(files.values())


@settings(max_examples=300)
@given(start=st.floats(0, 1), stop=st.floats(0, 1), splice=st.binary(max_size=60), seekable=st.booleans())
def test_cut_and_spliced_archives_are_refused_or_harmless(
    start: float, stop: float, splice: bytes, seekable: bool
) -> None:
    files = {"a/b.cubin": b"machine code " * 20, "c.so": bytes(range(256))}
    data = _write(files, [8, 0], seekable=seekable, zip64=False)
    low, high = sorted((int(start * len(data)), int(stop * len(data))))
    try:
        found = _contents(data[:low] + splice + data[high:])
    except WheelError:
        return
    assert list(found.values()) == list(files.values())


@settings(max_examples=200)
@given(noise=st.binary(max_size=400))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(WheelError):
        read_members(noise + b"PK\x05\x06" + noise[:18], where="test", limits=LIMITS)


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_truncated_at_any_length(cut: int) -> None:
    data = _write({"a": b"a" * 50, "b": b"b" * 50}, [0, 8], seekable=False, zip64=True)
    with pytest.raises(WheelError):
        read_members(data[: min(cut, len(data) - 1)], where="test", limits=LIMITS)


def _bundled_wheels() -> list[Path]:
    bundled = Path(str(importlib.resources.files("ensurepip"))) / "_bundled"
    return sorted(bundled.glob("*.whl")) if bundled.is_dir() else []


def test_agrees_with_zipfile_on_real_wheels() -> None:
    wheels = _bundled_wheels()
    if not wheels:
        pytest.skip("this Python has no bundled wheels")
    for path in wheels:
        with path.open("rb") as file, zipfile.ZipFile(path) as archive:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            members = read_members(data, where=path.name, limits=ArchiveLimits())
            infos = archive.infolist()
            assert [
                (member.name, member.method, member.crc, member.packed, member.size, member.header)
                for member in members
            ] == [
                (
                    info.filename,
                    info.compress_type,
                    info.CRC,
                    info.compress_size,
                    info.file_size,
                    info.header_offset,
                )
                for info in infos
            ]
            for member in members:
                assert read_whole(data, member, where=path.name) == archive.read(member.name)


@pytest.mark.parametrize("descriptor", [12, 16, 20, 24])
def test_every_form_of_data_descriptor(forge: Any, descriptor: int) -> None:
    parts = [forge.Part("a", b"a" * 99, descriptor=descriptor), forge.Part("b", b"b", method=0)]
    assert _contents(forge.pack(parts)) == {"a": b"a" * 99, "b": b"b"}


def test_zip64_end_record(forge: Any) -> None:
    assert _contents(forge.pack([forge.Part("a", b"a")], zip64=True)) == {"a": b"a"}
    exact = forge.pack([forge.Part("a", b"a")], zip64=True, end={"count": 1, "count_here": 1})
    assert _contents(exact) == {"a": b"a"}


def test_zip64_sizes_and_offset_in_the_directory(forge: Any) -> None:
    wide = 0xFFFFFFFF
    extra = struct.pack("<HHQQQ", 1, 24, 5, 5, 0)
    part = forge.Part("a", b"hello", method=0,
                      central={"size": wide, "packed": wide, "header": wide, "extra": extra})  # fmt: skip
    assert _contents(forge.pack([part])) == {"a": b"hello"}


def test_other_extra_fields_are_passed_over(forge: Any) -> None:
    extra = struct.pack("<HHBL", 0x5455, 5, 1, 1_700_000_000)
    part = forge.Part("a", b"hello", central={"extra": extra}, local={"extra": extra})
    assert _contents(forge.pack([part])) == {"a": b"hello"}


def test_directory_order_need_not_be_file_order(forge: Any) -> None:
    first, second = forge.Part("a", b"first"), forge.Part("b", b"second")
    data = forge.pack([first, second])
    length = 46 + 1
    start = len(data) - 22 - 2 * length
    swapped = data[:start] + data[start + length : -22] + data[start : start + length] + data[-22:]
    assert list(_contents(swapped).items()) == [("b", b"second"), ("a", b"first")]


def test_more_members_than_sixteen_bits_count(forge: Any) -> None:
    parts = [forge.Part(f"d/{number}", method=0) for number in range(65_600)]
    members = read_members(forge.pack(parts, zip64=True), where="test", limits=LIMITS)
    assert len(members) == 65_600


def test_member_beyond_four_gibibytes(tmp_path: Path) -> None:
    """A sparse archive: one stored member of 4 GiB and one after it; only the records are touched."""
    size, wide = (4 << 30) + 5, 0xFFFFFFFF
    local = struct.Struct("<4sHHHLLLLHH")
    central = struct.Struct("<4sBBHHHLLLLHHHHHLL")
    first = local.pack(b"PK\x03\x04", 45, 0, 0, 0, 0, wide, wide, 1, 20) + b"a"
    first += struct.pack("<HHQQ", 1, 16, size, size)
    second_at = len(first) + size
    second = local.pack(b"PK\x03\x04", 45, 0, 0, 0, 0, 0, 0, 1, 0) + b"b"
    directory = central.pack(b"PK\x01\x02", 45, 3, 45, 0, 0, 0, 0, wide, wide, 1, 20, 0, 0, 0, 0, 0) + b"a"
    directory += struct.pack("<HHQQ", 1, 16, size, size)
    directory += central.pack(b"PK\x01\x02", 45, 3, 45, 0, 0, 0, 0, 0, 0, 1, 12, 0, 0, 0, 0, wide) + b"b"
    directory += struct.pack("<HHQ", 1, 8, second_at)
    at = second_at + len(second)
    end = struct.pack("<4sQHHLLQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 2, 2, len(directory), at)
    end += struct.pack("<4sLQL", b"PK\x06\x07", 0, at + len(directory), 1)
    end += struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, 2, 2, len(directory), wide, 0)
    path = tmp_path / "sparse.zip"
    with path.open("wb") as file:
        file.write(first)
        file.seek(second_at)
        file.write(second + directory + end)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        members = read_members(data, where="test", limits=LIMITS)
    assert [(member.name, member.size, member.header) for member in members] == [
        ("a", size, 0),
        ("b", 0, second_at),
    ]


@settings(max_examples=40)
@given(seed=st.binary(min_size=1, max_size=4096), size=st.integers(0, 3 * PIECE), level=st.integers(0, 9))
def test_pieces_are_bounded_and_add_up(seed: bytes, size: int, level: int) -> None:
    content = (seed * (size // len(seed) + 1))[:size]
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED if level else zipfile.ZIP_STORED) as archive:
        archive.writestr("a", content, compresslevel=level)
    data = target.getvalue()
    (member,) = read_members(data, where="test", limits=ArchiveLimits(max_ratio=1 << 20))
    pieces = [bytes(piece) for piece in unpack(data, member, where="test")]
    assert all(len(piece) <= PIECE for piece in pieces)
    assert b"".join(pieces) == content


def test_a_bomb_is_met_after_its_declared_size(forge: Any) -> None:
    packed = forge.deflate(bytes(64 << 20), 9)
    data = forge.pack([forge.Part("a", bytes(10), packed=packed)])
    (member,) = read_members(data, where="test", limits=LIMITS)
    got = 0
    with pytest.raises(WheelError, match="more bytes than it declares"):
        for piece in unpack(data, member, where="test"):
            got += len(piece)
    assert got <= member.size


def test_directories_are_told_apart() -> None:
    assert Member("a/", 0, 0, 0, 0, 0, 32).is_directory
    assert not Member("a", 0, 0, 0, 0, 0, 31).is_directory
