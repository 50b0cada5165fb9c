"""Every attack on an archive that is known to us is refused by its own name, with nothing written."""

from __future__ import annotations

import stat
import struct
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.errors import all_problems
from kernel_depot.wheels import errors
from kernel_depot.wheels.archive import ArchiveLimits
from kernel_depot.wheels.errors import WheelError
from kernel_depot.wheels.extract import Expectation, extract

FILENAME = "kernels-1.0-py3-none-any.whl"
CUBIN = "kernels/a.cubin"
BODY = b"machine code " * 100


class Trial:
    """Runs one archive through extract in a directory of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.staging = root / "staging"
        self.staging.mkdir()

    def refuses(
        self,
        data: bytes,
        error: type[WheelError],
        *,
        filename: str = FILENAME,
        written: bool = False,
        **kwargs: Any,
    ) -> WheelError:
        """Check that extract raises exactly `error`, and wrote nothing unless members were reached."""
        path = self.root / "wheel"
        path.write_bytes(data)
        expect = kwargs.pop("expect", Expectation(filename))
        with pytest.raises(WheelError) as caught:
            extract(path, staging=self.staging, expect=expect, **kwargs)
        assert type(caught.value) is error, caught.value
        assert set(self.root.iterdir()) == {path, self.staging}
        if not written:
            assert list(self.staging.iterdir()) == []
        return caught.value


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def test_every_refusal_has_a_slug_of_its_own() -> None:
    slugs = [kind.__dict__.get("slug") for kind in all_problems(WheelError)]
    assert None not in slugs
    assert len(slugs) == len(set(slugs))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("/etc/passwd", errors.MemberPathAbsolute),
        ("../outside", errors.MemberPathTraversal),
        ("kernels/../../outside", errors.MemberPathTraversal),
        ("kernels/..", errors.MemberPathTraversal),
        ("kernels\\a.cubin", errors.MemberPathBackslash),
        ("..\\outside", errors.MemberPathBackslash),
        ("C:/windows", errors.MemberPathDriveLetter),
        ("kernels/c:stream", errors.MemberPathDriveLetter),
        ("kernels/a\0.cubin", errors.MemberPathNul),
        ("kernels/a\n.cubin", errors.MemberPathControlCharacter),
        ("kernels/\x1b[31m", errors.MemberPathControlCharacter),
        ("kernels/\x7f", errors.MemberPathControlCharacter),
        ("kernels/\u202egnp.exe", errors.MemberPathControlCharacter),
        ("kernels//a", errors.MemberPathNotNormal),
        ("./kernels", errors.MemberPathNotNormal),
        ("kernels/./a", errors.MemberPathNotNormal),
        ("", errors.MemberPathNotNormal),
        ("kernels/" + "a" * 256, errors.MemberPathTooLong),
        ("kernels/" + "\u00e9" * 128, errors.MemberPathTooLong),
        ("a/" * 600 + "a", errors.MemberPathTooLong),
        (b"kernels/\xff", errors.MemberPathNotText),
    ],
)
def test_path(trial: Trial, forge: Any, name: str | bytes, error: type[WheelError]) -> None:
    trial.refuses(forge.pack(forge.wheel([forge.Part(name, BODY)])), error)


def test_name_in_an_unmarked_code_page(trial: Trial, forge: Any) -> None:
    part = forge.Part("kernels/\u00e9", BODY, central={"flags": 0}, local={"flags": 0})
    trial.refuses(forge.pack(forge.wheel([part])), errors.MemberPathNotText)


def test_second_name_in_an_extra_field(trial: Trial, forge: Any) -> None:
    extra = struct.pack("<HHBL", 0x7075, 6, 1, 0) + b"x"
    part = forge.Part(CUBIN, BODY, central={"extra": extra})
    trial.refuses(forge.pack(forge.wheel([part])), errors.MemberPathNotText)


@pytest.mark.parametrize(
    ("attributes", "error"),
    [
        (stat.S_IFLNK << 16, errors.MemberSymlink),
        (stat.S_IFIFO << 16, errors.MemberSpecialMode),
        (stat.S_IFCHR << 16, errors.MemberSpecialMode),
        (stat.S_IFBLK << 16, errors.MemberSpecialMode),
        (stat.S_IFSOCK << 16, errors.MemberSpecialMode),
        (stat.S_IFDIR << 16, errors.MemberSpecialMode),
        ((stat.S_IFREG | stat.S_ISUID | 0o755) << 16, errors.MemberSpecialMode),
        ((stat.S_IFREG | stat.S_ISGID | 0o755) << 16, errors.MemberSpecialMode),
        (0x10, errors.MemberSpecialMode),
    ],
)
def test_mode(trial: Trial, forge: Any, attributes: int, error: type[WheelError]) -> None:
    part = forge.Part(CUBIN, b"/etc/passwd", attributes=attributes)
    trial.refuses(forge.pack(forge.wheel([part])), error)


def test_directory_with_content(trial: Trial, forge: Any) -> None:
    part = forge.Part("kernels/", BODY, attributes=stat.S_IFDIR << 16)
    trial.refuses(forge.pack(forge.wheel([part])), errors.MemberSpecialMode)


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        (CUBIN, CUBIN, errors.MemberNameDuplicate),
        ("kernels/a", "kernels/a/", errors.MemberNameDuplicate),
        (CUBIN, "kernels/A.cubin", errors.MemberNameCaseCollision),
        ("kernels/stra\u00dfe", "kernels/STRASSE", errors.MemberNameCaseCollision),
        ("kernels/\u00e9", "kernels/e\u0301", errors.MemberNameUnicodeCollision),
        ("kernels/\ufb01", "kernels/fi", errors.MemberNameUnicodeCollision),
        ("kernels/a", "kernels/a/b", errors.MemberFileAndDirectory),
    ],
)
def test_names_that_mean_one_file(
    trial: Trial, forge: Any, first: str, second: str, error: type[WheelError]
) -> None:
    content = b"" if second.endswith("/") else b"other"
    parts = [forge.Part(first, BODY), forge.Part(second, content, attributes=0)]
    trial.refuses(forge.pack(forge.wheel(parts)), error)


@pytest.mark.parametrize("flags", [0x1, 0x41, 0x2000])
def test_encrypted(trial: Trial, forge: Any, flags: int) -> None:
    trial.refuses(forge.pack(forge.wheel([forge.Part(CUBIN, BODY, flags=flags)])), errors.MemberEncrypted)


@pytest.mark.parametrize("method", [1, 9, 12, 14, 93, 99])
def test_unknown_compression(trial: Trial, forge: Any, method: int) -> None:
    part = forge.Part(CUBIN, BODY, method=method)
    trial.refuses(forge.pack(forge.wheel([part])), errors.MemberCompressionUnknown)


def test_unknown_flags(trial: Trial, forge: Any) -> None:
    part = forge.Part(CUBIN, BODY, flags=0x20)
    trial.refuses(forge.pack(forge.wheel([part])), errors.ArchiveMalformed)


@pytest.mark.parametrize("size", [1 << 12, 40 << 20])
def test_bomb_larger_than_declared(trial: Trial, forge: Any, size: int) -> None:
    parts = forge.wheel([forge.Part(CUBIN, bytes(size))])
    parts[0].packed = forge.deflate(bytes(size + 1))
    trial.refuses(forge.pack(parts), errors.MemberLargerThanDeclared, written=True,
                  limits=ArchiveLimits(max_ratio=2000))  # fmt: skip


@pytest.mark.parametrize("size", [100, 6 << 20])
def test_smaller_than_declared(trial: Trial, forge: Any, size: int) -> None:
    parts = forge.wheel([forge.Part(CUBIN, bytes(size))])
    parts[0].packed = forge.deflate(bytes(size - 1))
    trial.refuses(forge.pack(parts), errors.MemberSmallerThanDeclared, written=True,
                  limits=ArchiveLimits(max_ratio=2000))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error"),
    [(-1, errors.MemberSmallerThanDeclared), (1, errors.MemberLargerThanDeclared)],
)
def test_stored_member_with_two_sizes(trial: Trial, forge: Any, change: int, error: type[WheelError]) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY, method=0)])
    parts[0].packed = BODY[:-1] if change < 0 else BODY + b"!"
    trial.refuses(forge.pack(parts), error)


@pytest.mark.parametrize(
    "packed",
    [b"", b"\xff" * 20, b"\x00", b"\x03"],
    ids=["nothing", "no-deflate", "cut-block", "no-end"],
)
@pytest.mark.parametrize("content", [b"", BODY, bytes(5 << 20)], ids=["empty", "small", "large"])
def test_broken_deflate_stream(trial: Trial, forge: Any, packed: bytes, content: bytes) -> None:
    parts = forge.wheel([forge.Part(CUBIN, content)])
    parts[0].packed = packed
    trial.refuses(forge.pack(parts), errors.MemberDataInvalid, written=True,
                  limits=ArchiveLimits(max_ratio=1 << 40, ratio_floor=1 << 40))  # fmt: skip


@pytest.mark.parametrize("size", [0, 1000, 5 << 20])
@pytest.mark.parametrize("hidden", [1, 300 << 10])
def test_data_after_the_deflate_stream(trial: Trial, forge: Any, size: int, hidden: int) -> None:
    parts = forge.wheel([forge.Part(CUBIN, bytes(size))])
    parts[0].packed = forge.deflate(bytes(size)) + b"h" * hidden
    trial.refuses(forge.pack(parts), errors.MemberDataInvalid, written=True,
                  limits=ArchiveLimits(max_ratio=2000))  # fmt: skip


@pytest.mark.parametrize("size", [1000, 5 << 20])
@pytest.mark.parametrize("method", [0, 8])
def test_wrong_crc(trial: Trial, forge: Any, size: int, method: int) -> None:
    part = forge.Part(CUBIN, bytes(size), method=method, central={"crc": 1}, local={"crc": 1})
    trial.refuses(forge.pack(forge.wheel([part])), errors.MemberCrcMismatch, written=True,
                  limits=ArchiveLimits(max_ratio=2000))  # fmt: skip


def test_total_over_the_limit(trial: Trial, forge: Any) -> None:
    parts = [forge.Part(f"kernels/{number}", BODY) for number in range(10)]
    data = forge.pack(forge.wheel(parts))
    trial.refuses(data, errors.UnpackedTooLarge, limits=ArchiveLimits(max_unpacked=9 * len(BODY)))


def test_member_over_the_limit(trial: Trial, forge: Any) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]))
    trial.refuses(data, errors.UnpackedTooLarge, limits=ArchiveLimits(max_member=len(BODY) - 1))


def test_ratio_of_a_member_over_the_limit(trial: Trial, forge: Any) -> None:
    trial.refuses(forge.pack(forge.wheel([forge.Part(CUBIN, bytes(2 << 20))])), errors.RatioTooHigh)


def test_ratio_of_the_whole_over_the_limit(trial: Trial, forge: Any) -> None:
    parts = [forge.Part(f"kernels/{number}", bytes(1 << 20)) for number in range(8)]
    trial.refuses(forge.pack(forge.wheel(parts)), errors.RatioTooHigh)


def test_too_many_members(trial: Trial, forge: Any) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]))
    trial.refuses(data, errors.TooManyMembers, limits=ArchiveLimits(max_members=3))


def test_directory_too_large(trial: Trial, forge: Any) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]))
    trial.refuses(data, errors.TooManyMembers, limits=ArchiveLimits(max_directory=100))


def test_two_members_share_their_bytes(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY), forge.Part("kernels/b.cubin", BODY)])
    parts[1].central["header"] = 0
    trial.refuses(forge.pack(parts), errors.MembersOverlap)


def test_member_inside_another(trial: Trial, forge: Any) -> None:
    inner = forge.pack([forge.Part("kernels/b.cubin", BODY, method=0)])
    outer = forge.Part(CUBIN, inner, method=0)
    twin = forge.Part("kernels/b.cubin", BODY, method=0)
    parts = forge.wheel([outer, twin])
    parts[1].central["header"] = 30 + len(CUBIN)
    trial.refuses(forge.pack(parts), errors.MembersOverlap)


def test_member_reaches_into_the_next(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY, method=0), forge.Part("kernels/b", b"b")])
    lie = {"packed": len(BODY) + 10, "size": len(BODY) + 10}
    parts[0].central, parts[0].local = lie, lie
    trial.refuses(forge.pack(parts), errors.MembersOverlap)


def test_member_reaches_into_the_directory(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)])
    parts[-1].central = parts[-1].local = {"packed": 1 << 20}
    trial.refuses(forge.pack(parts), errors.MembersOverlap)


@pytest.mark.parametrize(
    "lie",
    [
        {"name": b"kernels/b.cubin"},
        {"method": 0},
        {"flags": 0x2},
        {"crc": 1},
        {"packed": 1},
        {"size": 1},
        {"signature": b"PK\x03\x05"},
    ],
    ids=lambda lie: next(iter(lie)),
)
def test_local_header_disagrees(trial: Trial, forge: Any, lie: dict[str, Any]) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY, local=lie)]))
    trial.refuses(data, errors.LocalHeaderMismatch)


@pytest.mark.parametrize("descriptor", [12, 16, 20, 24])
@pytest.mark.parametrize("field", ["crc", "packed", "size"])
def test_data_descriptor_disagrees(trial: Trial, forge: Any, descriptor: int, field: str) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY, descriptor=descriptor)])
    data = bytearray(forge.pack(parts))
    start = 30 + len(CUBIN) + len(forge.deflate(BODY)) + (4 if descriptor in (16, 24) else 0)
    width = 8 if descriptor >= 20 else 4
    data[start + {"crc": 0, "packed": 4, "size": 4 + width}[field]] ^= 1
    trial.refuses(bytes(data), errors.LocalHeaderMismatch)


def test_data_descriptor_without_its_signature(trial: Trial, forge: Any) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY, descriptor=16)]))
    trial.refuses(data.replace(b"PK\x07\x08", b"PK\x07\x09"), errors.LocalHeaderMismatch)


def test_data_descriptor_absent(trial: Trial, forge: Any) -> None:
    part = forge.Part(CUBIN, BODY, flags=8)
    trial.refuses(forge.pack(forge.wheel([part])), errors.LocalHeaderMismatch)


def test_data_after_a_data_descriptor(trial: Trial, forge: Any) -> None:
    part = forge.Part(CUBIN, BODY, descriptor=16, after=b"hidden" * 9)
    trial.refuses(forge.pack(forge.wheel([part])), errors.DataBetweenMembers)


@pytest.mark.parametrize("prefix", [b"x", b"#!/bin/sh\nexec evil\n", b"PK\x03\x04" + bytes(100)])
def test_data_before_the_first_member(trial: Trial, forge: Any, prefix: bytes) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)])
    trial.refuses(forge.pack(parts, prefix=prefix), errors.DataBeforeFirstMember)
    parts[0].before = prefix
    trial.refuses(forge.pack(parts), errors.DataBeforeFirstMember)


def test_data_before_an_empty_directory(trial: Trial, forge: Any) -> None:
    trial.refuses(forge.pack([], before_directory=b"hidden"), errors.DataBeforeFirstMember)


def test_data_between_members(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY, after=b"hidden"), forge.Part("kernels/b", BODY)])
    trial.refuses(forge.pack(parts), errors.DataBetweenMembers)


def test_data_before_the_directory(trial: Trial, forge: Any) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]), before_directory=b"hidden")
    trial.refuses(data, errors.DataBetweenMembers)


@pytest.mark.parametrize("zip64", [False, True])
def test_data_before_the_end_record(trial: Trial, forge: Any, zip64: bool) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]), before_end=b"hidden", zip64=zip64)
    trial.refuses(data, errors.DataBetweenMembers)


@pytest.mark.parametrize("suffix", [b"\n", b"hidden", bytes(65535), b"PK\x05\x06"])
def test_data_after_the_last_record(trial: Trial, forge: Any, suffix: bytes) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]), suffix=suffix)
    trial.refuses(data, errors.DataAfterLastRecord)


def test_archive_comment(trial: Trial, forge: Any) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]), comment=b"a comment")
    trial.refuses(data, errors.DataAfterLastRecord)


def test_second_archive_appended(trial: Trial, forge: Any) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]))
    trial.refuses(data + data, errors.DataBeforeFirstMember)


@pytest.mark.parametrize("count", [-1, 1])
def test_record_count_lies(trial: Trial, forge: Any, count: int) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)])
    lie = {"count_here": len(parts) + count, "count": len(parts) + count}
    trial.refuses(forge.pack(parts, end=lie), errors.ArchiveMalformed)


def test_several_disks(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)])
    trial.refuses(forge.pack(parts, end={"disk": 1}), errors.ArchiveMalformed)
    trial.refuses(forge.pack(parts, end={"count_here": 1}), errors.ArchiveMalformed)
    parts[0].central["disk"] = 1
    trial.refuses(forge.pack(parts), errors.ArchiveMalformed)


def test_directory_record_with_a_broken_signature(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY), forge.Part("kernels/b", b"b")])
    parts[1].central["signature"] = b"PK\x01\x03"
    trial.refuses(forge.pack(parts), errors.ArchiveMalformed)


@pytest.mark.parametrize("extra", [b"\x01", b"\x09\x00\x08\x00abc"])
def test_extra_field_cut_short(trial: Trial, forge: Any, extra: bytes) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY, central={"extra": extra})]))
    trial.refuses(data, errors.ArchiveMalformed)
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY, local={"extra": extra})]))
    trial.refuses(data, errors.ArchiveMalformed)


def _zip64(*values: int) -> bytes:
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


SATURATED = {"packed": 0xFFFFFFFF, "size": 0xFFFFFFFF}
PACKED = len(BODY)


@pytest.mark.parametrize(
    ("central", "local"),
    [
        ({**SATURATED}, {}),
        ({**SATURATED, "extra": _zip64(PACKED)}, {}),
        ({**SATURATED, "extra": _zip64(PACKED, PACKED, 0)}, {}),
        ({**SATURATED, "extra": _zip64(PACKED, PACKED) * 2}, {}),
        ({"extra": _zip64(PACKED, PACKED)}, {}),
        ({}, {**SATURATED}),
        ({}, {**SATURATED, "extra": _zip64(PACKED)}),
        ({}, {"packed": 1, "size": 1, "extra": _zip64(PACKED, PACKED)}),
    ],
)
def test_zip64_fields_of_a_member_lie(
    trial: Trial, forge: Any, central: dict[str, Any], local: dict[str, Any]
) -> None:
    part = forge.Part(CUBIN, BODY, method=0, central=central, local=local)
    trial.refuses(forge.pack(forge.wheel([part])), errors.Zip64Contradiction)


def test_zip64_sizes_disagree_with_the_directory(trial: Trial, forge: Any) -> None:
    local = {**SATURATED, "extra": _zip64(PACKED + 1, PACKED + 1)}
    part = forge.Part(CUBIN, BODY, method=0, local=local)
    trial.refuses(forge.pack(forge.wheel([part])), errors.LocalHeaderMismatch)


@pytest.mark.parametrize(
    ("end", "end64"),
    [
        ({"count": 1, "count_here": 1}, {}),
        ({"length": 1}, {}),
        ({"start": 1}, {}),
        ({}, {"signature_offset": 0}),
        ({}, {"record": 45}),
        ({}, {"disks": 2}),
    ],
)
def test_zip64_end_record_lies(trial: Trial, forge: Any, end: dict[str, int], end64: dict[str, int]) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)])
    trial.refuses(forge.pack(parts, zip64=True, end=end, end64=end64), errors.Zip64Contradiction)


def test_zip64_end_record_absent(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)])
    trial.refuses(forge.pack(parts, end={"start": 0xFFFFFFFF}), errors.Zip64Contradiction)
    data = forge.pack(parts, zip64=True)
    trial.refuses(data.replace(b"PK\x06\x06", b"PK\x06\x08"), errors.Zip64Contradiction)


def test_truncated_anywhere(trial: Trial, forge: Any) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]))
    for length in (0, 1, 21, 22, 30, 200, len(data) // 2, len(data) - 22, len(data) - 1):
        trial.refuses(data[:length], errors.ArchiveTruncated)


def test_middle_cut_out(trial: Trial, forge: Any) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]))
    trial.refuses(data[300:], errors.ArchiveTruncated)


def test_not_a_zip_at_all(trial: Trial) -> None:
    trial.refuses(b"<html>404 not found</html>" * 9, errors.ArchiveTruncated)


def test_record_missing(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)])
    trial.refuses(forge.pack(parts[:-1]), errors.RecordMissing)
    trial.refuses(forge.pack(parts[:1]), errors.RecordMissing)
    trial.refuses(forge.pack([]), errors.RecordMissing)


def test_two_dist_info_directories(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part("other-1.0.dist-info/METADATA", BODY)])
    trial.refuses(forge.pack(parts), errors.RecordMissing)


def test_member_not_in_record(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)], extra=[forge.Part("kernels/smuggled.so", BODY)])
    trial.refuses(forge.pack(parts), errors.RecordMemberUnlisted)


def test_signature_of_another_directory_not_in_record(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)], extra=[forge.Part("kernels/RECORD.jws", BODY)])
    trial.refuses(forge.pack(parts), errors.RecordMemberUnlisted)


@pytest.mark.parametrize("body", [BODY, bytes(5 << 20)], ids=["small", "large"])
def test_record_hash_wrong(trial: Trial, forge: Any, body: bytes) -> None:
    def swap(rows: list[str]) -> list[str]:
        return [forge.record_row(CUBIN, bytes(len(body) - 1) + b"!"), *rows[1:]]

    parts = forge.wheel([forge.Part(CUBIN, body, method=0)], edit=swap)
    trial.refuses(forge.pack(parts), errors.RecordHashMismatch, written=True)


def test_record_hash_of_record_itself_wrong(trial: Trial, forge: Any) -> None:
    def claim(rows: list[str]) -> list[str]:
        return [*rows[:-1], forge.record_row("kernels-1.0.dist-info/RECORD", b"").replace(",0", ",")]

    parts = forge.wheel([forge.Part(CUBIN, BODY)], edit=claim)
    trial.refuses(forge.pack(parts), errors.RecordHashMismatch, written=True)


def test_record_size_wrong(trial: Trial, forge: Any) -> None:
    def shrink(rows: list[str]) -> list[str]:
        return [rows[0].replace(f",{len(BODY)}", f",{len(BODY) - 1}"), *rows[1:]]

    trial.refuses(forge.pack(forge.wheel([forge.Part(CUBIN, BODY)], edit=shrink)), errors.RecordSizeMismatch)


@pytest.mark.parametrize("path", ["kernels/gone.so", "../../bin/sh", "kernels/", "/etc/passwd"])
def test_record_names_a_missing_file(trial: Trial, forge: Any, path: str) -> None:
    def add(rows: list[str]) -> list[str]:
        return [*rows, forge.record_row(path, b"")]

    parts = forge.wheel(
        [forge.Part("kernels/", attributes=stat.S_IFDIR << 16), forge.Part(CUBIN, BODY)], edit=add
    )
    trial.refuses(forge.pack(parts), errors.RecordFileAbsent)


def test_record_names_a_file_twice(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)], edit=lambda rows: [rows[0], *rows])
    trial.refuses(forge.pack(parts), errors.RecordDuplicate)


def test_record_without_a_hash_for_data(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)], edit=lambda rows: [f"{CUBIN},,", *rows[1:]])
    trial.refuses(forge.pack(parts), errors.RecordHashAbsent)


@pytest.mark.parametrize("algorithm", ["md5", "sha1", "sha224"])
def test_record_with_a_weak_hash(trial: Trial, forge: Any, algorithm: str) -> None:
    def weaken(rows: list[str]) -> list[str]:
        return [forge.record_row(CUBIN, BODY, algorithm), *rows[1:]]

    trial.refuses(forge.pack(forge.wheel([forge.Part(CUBIN, BODY)], edit=weaken)), errors.RecordHashWeak)


def test_record_is_not_the_pinned_one(trial: Trial, forge: Any) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]))
    expect = Expectation(FILENAME, record_sha256="0" * 64)
    trial.refuses(data, errors.RecordDigestMismatch, expect=expect)


@pytest.mark.parametrize(
    "metadata",
    [
        b"Metadata-Version: 2.1\nName: kernels\nVersion: 1.1\n",
        b"Metadata-Version: 2.1\nName: other\nVersion: 1.0\n",
        b"Metadata-Version: 2.1\nName: kernels\nVersion: one\n",
    ],
)
def test_metadata_contradicts_the_filename(trial: Trial, forge: Any, metadata: bytes) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)], metadata=metadata))
    trial.refuses(data, errors.MetadataContradiction)


@pytest.mark.parametrize("filename", ["kernels-1.1-py3-none-any.whl", "other-1.0-py3-none-any.whl"])
def test_dist_info_contradicts_the_filename(trial: Trial, forge: Any, filename: str) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]))
    trial.refuses(data, errors.MetadataContradiction, filename=filename)


@pytest.mark.parametrize(
    "metadata",
    [b"", b"Name: kernels\n", b"Name: kernels\nVersion: 1.0\nVersion: 1.0\n", b"Name: \xff\nVersion: 1.0\n"],
)
def test_metadata_unreadable(trial: Trial, forge: Any, metadata: bytes) -> None:
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)], metadata=metadata))
    trial.refuses(data, errors.MetadataMissing)


def test_metadata_missing(trial: Trial, forge: Any) -> None:
    parts = forge.wheel([forge.Part(CUBIN, BODY)], edit=lambda rows: [rows[0], *rows[2:]])
    trial.refuses(forge.pack([parts[0], *parts[2:]]), errors.MetadataMissing)


def test_wheel_is_not_the_pinned_one(trial: Trial, forge: Any) -> None:
    expect = Expectation(FILENAME, sha256="0" * 64)
    data = forge.pack(forge.wheel([forge.Part(CUBIN, BODY)]))
    trial.refuses(data, errors.WheelDigestMismatch, expect=expect, written=True)
    trial.refuses(data[:-1], errors.WheelDigestMismatch, expect=expect, written=True)


@pytest.mark.parametrize("filename", ["kernels.whl", "kernels-1.0.zip", "kernels-x-py3-none-any.whl", ""])
def test_not_a_wheel_filename(trial: Trial, filename: str) -> None:
    trial.refuses(b"", errors.WheelFilenameInvalid, filename=filename)
