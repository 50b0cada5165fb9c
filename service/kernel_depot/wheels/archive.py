"""The zip structure of a wheel, read strictly: every byte of the file belongs to exactly one record.

Format: PKWARE APPNOTE 6.3.10 and PEP 427. What a lenient reader would skip or guess is refused: the local
headers must agree with the central directory, members must lie gapless from the first byte to the
directory, and the end record must be the last 22 bytes.
"""

from __future__ import annotations

import mmap
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernel_depot.wheels.errors import (
    ArchiveMalformed,
    ArchiveTruncated,
    DataAfterLastRecord,
    DataBeforeFirstMember,
    DataBetweenMembers,
    LocalHeaderMismatch,
    MemberCompressionUnknown,
    MemberEncrypted,
    MemberLargerThanDeclared,
    MemberPathNotText,
    MemberSmallerThanDeclared,
    MembersOverlap,
    MemberSpecialMode,
    MemberSymlink,
    RatioTooHigh,
    TooManyMembers,
    UnpackedTooLarge,
    Zip64Contradiction,
)
from kernel_depot.wheels.names import check_names

Bytes = mmap.mmap | bytes

STORED = 0
DEFLATED = 8

_END = struct.Struct("<4sHHHHLLH")
_END64 = struct.Struct("<4sQHHLLQQQQ")
_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4sBBHHHLLLLHHHHHLL")
_LOCAL = struct.Struct("<4sHHHLLLLHH")
_DESCRIPTORS = {
    12: struct.Struct("<LLL"),
    16: struct.Struct("<4xLLL"),
    20: struct.Struct("<LQQ"),
    24: struct.Struct("<4xLQQ"),
}
_END_SIGNATURE = b"PK\x05\x06"
_END64_SIGNATURE = b"PK\x06\x06"
_LOCATOR_SIGNATURE = b"PK\x06\x07"
_CENTRAL_SIGNATURE = b"PK\x01\x02"
_LOCAL_SIGNATURE = b"PK\x03\x04"
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"

_UINT16 = 0xFFFF
_UINT32 = 0xFFFFFFFF
_FLAGS_ENCRYPTED = 0x2041  # encrypted, strong encryption, masked directory
_FLAG_DESCRIPTOR = 0x0008
_FLAG_UTF8 = 0x0800
_FLAGS_KNOWN = _FLAG_DESCRIPTOR | _FLAG_UTF8 | 0x0006  # the last two tell the deflate level
_EXTRA_ZIP64 = 0x0001
_EXTRA_UNICODE_PATH = 0x7075
_DOS_DIRECTORY = 0x10


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """What an archive may ask for; sizes in bytes, ratios unpacked to packed.

    The ratio of a single member counts from `ratio_floor` unpacked bytes on: small text packs well.
    """

    max_members: int = 100_000
    max_directory: int = 32 << 20
    max_member: int = 16 << 30
    max_unpacked: int = 64 << 30
    max_ratio: int = 200
    ratio_floor: int = 1 << 20


class Member(NamedTuple):
    """One record of the archive: `packed` bytes from `start` unpack to `size` bytes."""

    name: str
    method: int
    crc: int
    packed: int
    size: int
    header: int
    start: int

    @property
    def is_directory(self) -> bool:
        """Tell whether this only names a directory."""
        return self.name.endswith("/")


class _Entry(NamedTuple):
    """One record of the central directory."""

    header: int
    name: str
    raw: bytes
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    local: bytes  # the local header as it is when it only repeats this record


class _Directory(NamedTuple):
    """Where the central directory lies, and how many records it says it has."""

    start: int
    end: int
    records: int


def read_members(data: Bytes, *, where: str, limits: ArchiveLimits) -> tuple[Member, ...]:
    """Return the members in directory order, after every structural check.

    Raise one of the archive and member errors of `wheels.errors`; nothing is unpacked here.
    """
    directory = _find_directory(data, where=where)
    if directory.records > limits.max_members or directory.end - directory.start > limits.max_directory:
        raise TooManyMembers(
            "the archive lists more members than the limit allows",
            where=where,
            expected=f"at most {limits.max_members} members in {limits.max_directory} bytes",
            found=f"{directory.records} members in {directory.end - directory.start} bytes",
            remedy="raise the limit if the wheel is trusted",
        )
    entries = _read_entries(data, directory, where=where)
    check_names([entry.name for entry in entries], where=where)
    _check_sizes(entries, where=where, limits=limits)
    starts = _read_local_headers(data, entries, directory, where=where)
    return tuple(
        Member(entry.name, entry.method, entry.crc, entry.packed, entry.size, entry.header, start)
        for entry, start in zip(entries, starts, strict=True)
    )


def _find_directory(data: Bytes, *, where: str) -> _Directory:
    size = len(data)
    end = size - _END.size
    if end < 0 or data[end : end + 4] != _END_SIGNATURE or data[size - 2 : size] != b"\0\0":
        _refuse_missing_end(data, where=where)
    _, disk, first_disk, count_here, count, length, start, _ = _END.unpack_from(data, end)
    stop = end
    classic = (disk, first_disk, count_here, count, length, start)
    wide = _UINT16 in classic[:4] or _UINT32 in classic[4:]
    located = end >= _LOCATOR.size and data[end - _LOCATOR.size : end - 16] == _LOCATOR_SIGNATURE
    if wide and not located:
        raise Zip64Contradiction("the end record needs a Zip64 record, and there is none", where=where)
    if located and (wide or start + length != end):
        stop = end - _LOCATOR.size - _END64.size
        disk, first_disk, count_here, count, length, start = _read_end64(data, stop, classic, where=where)
    if disk or first_disk or count_here != count:
        raise ArchiveMalformed(
            "the archive spans several disks",
            where=where,
            expected="one disk, all records on it",
            found=f"disk {disk}, directory on disk {first_disk}, {count_here} of {count} records",
        )
    if start + length != stop:
        _refuse_misplaced_directory(data, start=start, length=length, stop=stop, where=where)
    return _Directory(start, stop, count)


def _refuse_missing_end(data: Bytes, *, where: str) -> None:
    window = data[max(0, len(data) - _END.size - _UINT16) :]
    if _END_SIGNATURE in window[: len(window) - _END.size + 4]:
        raise DataAfterLastRecord(
            "the end record is not the last thing in the file: data or a comment follows it",
            where=where,
            remedy="get the file again from its publisher",
        )
    raise ArchiveTruncated(
        "the file does not end with a zip end record: it is cut short, or no wheel at all",
        where=where,
        found=f"{len(data)} bytes",
        remedy="get the file again from its publisher",
    )


def _read_end64(
    data: Bytes, position: int, classic: tuple[int, ...], *, where: str
) -> tuple[int, int, int, int, int, int]:
    _, disk, offset, disks = _LOCATOR.unpack_from(data, position + _END64.size if position >= 0 else 0)
    if position < 0 or data[position : position + 4] != _END64_SIGNATURE:
        raise Zip64Contradiction(
            "no Zip64 end record lies before its locator", where=where, expected=f"at byte {position}"
        )
    _, length, _, _, *fields = _END64.unpack_from(data, position)
    if offset != position or disk or disks > 1 or length != _END64.size - 12:
        raise Zip64Contradiction(
            "the Zip64 locator does not lead to the Zip64 end record",
            where=where,
            expected=f"byte {position}, 44 bytes, one disk",
            found=f"byte {offset}, {length} bytes, disk {disk} of {disks}",
        )
    for small, large, limit in zip(classic, fields, (_UINT16,) * 4 + (_UINT32,) * 2, strict=True):
        if small not in (limit, large):
            raise Zip64Contradiction(
                "the Zip64 end record contradicts the end record",
                where=where,
                expected=list(classic),
                found=list(fields),
            )
    return (fields[0], fields[1], fields[2], fields[3], fields[4], fields[5])


def _refuse_misplaced_directory(data: Bytes, *, start: int, length: int, stop: int, where: str) -> None:
    if start + length > stop:
        raise ArchiveTruncated(
            "the central directory reaches beyond the bytes before the end record",
            where=where,
            expected=f"bytes {start} to {start + length}",
            found=f"an end record at byte {stop}",
            remedy="get the file again from its publisher",
        )
    actual = stop - length
    if data[actual : actual + 4] == _CENTRAL_SIGNATURE:
        raise DataBeforeFirstMember(
            "something was put before the archive: its records are displaced",
            where=where,
            expected=f"the central directory at byte {start}",
            found=f"at byte {actual}",
        )
    raise DataBetweenMembers(
        "bytes lie between the central directory and the end record",
        where=where,
        found=f"{stop - start - length} bytes at byte {start + length}",
    )


def _read_entries(data: Bytes, directory: _Directory, *, where: str) -> list[_Entry]:
    table = data[directory.start : directory.end]
    position = 0
    unpack = _CENTRAL.unpack_from
    make = _Entry._make
    plain_modes: set[tuple[int, bool]] = set()
    entries: list[_Entry] = []
    for number in range(directory.records):
        if position + _CENTRAL.size > len(table):
            raise ArchiveMalformed(
                "the central directory has fewer records than the end record says",
                where=where,
                expected=directory.records,
                found=number,
            )
        (
            signature, _, _, _, flags, method, _, crc, packed, size,
            name_length, extra_length, comment_length, disk, _, attributes, header,
        ) = unpack(table, position)  # fmt: skip
        start = position
        name_end = position + _CENTRAL.size + name_length
        raw = table[position + _CENTRAL.size : name_end]
        position = name_end + extra_length + comment_length
        if signature != _CENTRAL_SIGNATURE or position > len(table):
            raise ArchiveMalformed(f"record {number} of the central directory is broken", where=where)
        name = raw.decode("ascii") if raw.isascii() else _decode(raw, flags, where=where)
        if extra_length or packed == _UINT32 or size == _UINT32 or header == _UINT32 or disk:
            extra = table[name_end : name_end + extra_length]
            size, packed, header, disk = _widen(
                extra, (size, packed, header, disk), where=f"{where}: {name!r}"
            )
        if flags & ~_FLAGS_KNOWN or method not in (STORED, DEFLATED) or disk:
            _refuse_format(flags, method, disk, where=f"{where}: {name!r}")
        mode = (attributes, raw[-1:] == b"/")
        if mode not in plain_modes:
            _check_mode(attributes, is_directory=mode[1], where=where, name=name)
            plain_modes.add(mode)
        local = b"".join((_LOCAL_SIGNATURE, table[start + 6 : start + 30], b"\0\0", raw))
        entries.append(make((header, name, raw, flags, method, crc, packed, size, local)))
    if position != len(table):
        raise ArchiveMalformed(
            "the central directory has more bytes than its records",
            where=where,
            expected=position,
            found=len(table),
        )
    return entries


def _decode(raw: bytes, flags: int, *, where: str) -> str:
    if not flags & _FLAG_UTF8:
        raise MemberPathNotText(
            "a member's name is not ASCII and not marked as UTF-8", where=where, found=repr(raw)
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MemberPathNotText("a member's name is not UTF-8", where=where, found=repr(raw)) from error


def _extra_fields(extra: bytes, *, where: str) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(extra):
        if position + 4 > len(extra):
            raise ArchiveMalformed("an extra field is cut short", where=where)
        tag, length = struct.unpack_from("<HH", extra, position)
        position += 4 + length
        if position > len(extra):
            raise ArchiveMalformed("an extra field is cut short", where=where)
        yield tag, extra[position - length : position]


def _zip64_field(extra: bytes, *, where: str) -> bytes | None:
    found: bytes | None = None
    for tag, content in _extra_fields(extra, where=where):
        if tag == _EXTRA_UNICODE_PATH:
            raise MemberPathNotText("an extra field gives the member a second name", where=where)
        if tag == _EXTRA_ZIP64:
            if found is not None:
                raise Zip64Contradiction("a member has two Zip64 fields", where=where)
            found = content
    return found


def _widen(extra: bytes, fields: tuple[int, int, int, int], *, where: str) -> tuple[int, int, int, int]:
    """Put the Zip64 values where the classic fields (size, packed, header, disk) are saturated."""
    content = _zip64_field(extra, where=where)
    limits = (_UINT32, _UINT32, _UINT32, _UINT16)
    saturated = [value == limit for value, limit in zip(fields, limits, strict=True)]
    form = "<" + "".join("L" if index == 3 else "Q" for index in range(4) if saturated[index])
    if content is None and not any(saturated):
        return fields
    if content is None or len(content) != struct.calcsize(form) or not any(saturated):
        raise Zip64Contradiction(
            "a member's Zip64 field does not hold what its saturated fields need",
            where=where,
            expected=f"{struct.calcsize(form)} bytes",
            found="none" if content is None else f"{len(content)} bytes",
        )
    values = iter(struct.unpack(form, content))
    size, packed, header, disk = (
        next(values) if wide else value for wide, value in zip(saturated, fields, strict=True)
    )
    return (size, packed, header, disk)


def _refuse_format(flags: int, method: int, disk: int, *, where: str) -> None:
    if flags & _FLAGS_ENCRYPTED:
        raise MemberEncrypted("the member is encrypted", where=where, found=f"flags {flags:#06x}")
    if method not in (STORED, DEFLATED):
        raise MemberCompressionUnknown(
            "the member's compression method is not known",
            where=where,
            expected="0 (stored) or 8 (deflated)",
            found=method,
        )
    raise ArchiveMalformed(
        "the member has flags or a disk number that no wheel needs",
        where=where,
        found=f"flags {flags:#06x}, disk {disk}",
    )


def _check_mode(attributes: int, *, is_directory: bool, where: str, name: str) -> None:
    mode = attributes >> 16
    kind = stat.S_IFMT(mode)
    plain = (0, stat.S_IFDIR) if is_directory else (0, stat.S_IFREG)
    disguised = bool(attributes & _DOS_DIRECTORY) and not is_directory
    if kind in plain and not mode & 0o7000 and not disguised:
        return
    if kind == stat.S_IFLNK:
        raise MemberSymlink("the member is a symbolic link", where=f"{where}: {name!r}")
    raise MemberSpecialMode(
        "the member is neither a plain file nor a plain directory",
        where=f"{where}: {name!r}",
        found=f"{stat.filemode(mode)}, attributes {attributes:#010x}",
    )


def _check_sizes(entries: Sequence[_Entry], *, where: str, limits: ArchiveLimits) -> None:
    unpacked = packed = 0
    for entry in entries:
        size = entry.size
        unpacked += size
        packed += entry.packed
        if entry.method == STORED and size != entry.packed:
            kind = MemberLargerThanDeclared if entry.packed > size else MemberSmallerThanDeclared
            raise kind(
                "a stored member's two sizes differ",
                where=f"{where}: {entry.name!r}",
                expected=f"{size} bytes",
                found=f"{entry.packed} bytes",
            )
        if size > limits.ratio_floor and size > entry.packed * limits.max_ratio:
            raise RatioTooHigh(
                "a member unpacks to suspiciously many bytes",
                where=f"{where}: {entry.name!r}",
                expected=f"at most {limits.max_ratio} times its packed size",
                found=f"{size} from {entry.packed} bytes",
                remedy="raise the limit if the wheel is trusted",
            )
        if size > limits.max_member:
            raise UnpackedTooLarge(
                "a member unpacks to more bytes than the limit allows",
                where=f"{where}: {entry.name!r}",
                expected=f"at most {limits.max_member} bytes",
                found=size,
                remedy="raise the limit if the wheel is trusted",
            )
        if size and entry.name.endswith("/"):
            raise MemberSpecialMode(
                "a directory has content", where=f"{where}: {entry.name!r}", found=f"{size} bytes"
            )
    if unpacked > limits.max_unpacked:
        raise UnpackedTooLarge(
            "the members together unpack to more bytes than the limit allows",
            where=where,
            expected=f"at most {limits.max_unpacked} bytes",
            found=unpacked,
            remedy="raise the limit if the wheel is trusted",
        )
    if unpacked > limits.ratio_floor and unpacked > packed * limits.max_ratio:
        raise RatioTooHigh(
            "the members together unpack to suspiciously many bytes",
            where=where,
            expected=f"at most {limits.max_ratio} times their packed size",
            found=f"{unpacked} from {packed} bytes",
            remedy="raise the limit if the wheel is trusted",
        )


def _read_local_headers(
    data: Bytes, entries: Sequence[_Entry], directory: _Directory, *, where: str
) -> list[int]:
    """Check each member's local header, and that members lie gapless; return where their data starts."""
    starts = [0] * len(entries)
    order = sorted(range(len(entries)), key=lambda index: entries[index].header)
    unpack = _LOCAL.unpack_from
    room = directory.start - _LOCAL.size
    expected = 0
    for index, following in zip(order, [*order[1:], None], strict=False):
        entry = entries[index]
        header = entry.header
        if header != expected:
            _refuse_gap(header, expected, first=index == order[0], where=f"{where}: {entry.name!r}")
        if header > room:
            raise ArchiveTruncated(
                "a member starts where no room is left for it",
                where=f"{where}: {entry.name!r}",
                expected=f"before byte {max(room, 0)}",
                found=f"byte {header}",
            )
        limit = directory.start if following is None else entries[following].header
        start = header + len(entry.local)
        end = start + entry.packed
        if end == limit and data[header:start] == entry.local and not entry.flags & _FLAG_DESCRIPTOR:
            starts[index] = start
            expected = end
            continue
        signature, _, flags, method, _, crc, packed, size, name_length, extra_length = unpack(data, header)
        name_end = header + _LOCAL.size + name_length
        start = name_end + extra_length
        end = start + entry.packed
        if (
            signature != _LOCAL_SIGNATURE
            or flags != entry.flags
            or method != entry.method
            or data[header + _LOCAL.size : name_end] != entry.raw
        ):
            raise LocalHeaderMismatch(
                "the member's local header is absent or names another file, method or flags",
                where=f"{where}: {entry.name!r}",
                expected=f"{entry.name!r}, method {entry.method}, flags {entry.flags:#06x}",
                found=f"signature {signature!r}, method {method}, flags {flags:#06x}, "
                f"name {data[header + _LOCAL.size : name_end]!r}",
            )
        if start > directory.start or end > limit:
            raise MembersOverlap(
                "the member's data reaches into the next record",
                where=f"{where}: {entry.name!r}",
                expected=f"an end at byte {limit} at the latest",
                found=f"byte {end}",
            )
        if extra_length or (crc, packed, size) != (entry.crc, entry.packed, entry.size):
            _check_local_sizes(
                entry, (crc, packed, size), data[name_end:start], where=f"{where}: {entry.name!r}"
            )
        if flags & _FLAG_DESCRIPTOR:
            end = _check_descriptor(data, entry, end, limit, where=f"{where}: {entry.name!r}")
        starts[index] = start
        expected = end
    if expected != directory.start:
        if not entries:
            raise DataBeforeFirstMember("an empty archive has data before its directory", where=where)
        raise DataBetweenMembers(
            "bytes lie between the last member and the central directory",
            where=where,
            found=f"{directory.start - expected} bytes at byte {expected}",
        )
    return starts


def _refuse_gap(header: int, expected: int, *, first: bool, where: str) -> None:
    if first:
        raise DataBeforeFirstMember(
            "the first member does not start at the file's first byte",
            where=where,
            expected="byte 0",
            found=f"byte {header}",
        )
    if header < expected:
        raise MembersOverlap(
            "the member starts inside the one before it",
            where=where,
            expected=f"byte {expected}",
            found=f"byte {header}",
        )
    raise DataBetweenMembers(
        "bytes lie before the member that no record accounts for",
        where=where,
        expected=f"the member at byte {expected}",
        found=f"at byte {header}",
    )


def _check_local_sizes(entry: _Entry, classic: tuple[int, int, int], extra: bytes, *, where: str) -> None:
    crc, packed, size = classic
    content = _zip64_field(extra, where=where)
    if content is not None:
        if len(content) != 16:
            raise Zip64Contradiction(
                "the local header's Zip64 field must hold both sizes",
                where=where,
                expected="16 bytes",
                found=f"{len(content)} bytes",
            )
        wide_size, wide_packed = struct.unpack("<QQ", content)
        if size not in (_UINT32, wide_size) or packed not in (_UINT32, wide_packed):
            raise Zip64Contradiction(
                "the local header's Zip64 field contradicts its classic sizes",
                where=where,
                expected=f"{size} from {packed} bytes",
                found=f"{wide_size} from {wide_packed} bytes",
            )
        size, packed = wide_size, wide_packed
    elif _UINT32 in (packed, size):
        raise Zip64Contradiction("the local header needs a Zip64 field, and there is none", where=where)
    # A writer that cannot seek leaves zeros here and puts the truth into the data descriptor.
    late = bool(entry.flags & _FLAG_DESCRIPTOR)
    for found, expected in ((crc, entry.crc), (packed, entry.packed), (size, entry.size)):
        if found != expected and not (late and found == 0):
            raise LocalHeaderMismatch(
                "the local header's CRC or sizes are not the central directory's",
                where=where,
                expected=f"CRC {entry.crc:#010x}, {entry.size} from {entry.packed} bytes",
                found=f"CRC {crc:#010x}, {size} from {packed} bytes",
            )


def _check_descriptor(data: Bytes, entry: _Entry, end: int, limit: int, *, where: str) -> int:
    """Check the data descriptor that fills the room up to the next record; return where it ends."""
    form = _DESCRIPTORS.get(limit - end)
    if form is None:
        kind = DataBetweenMembers if limit - end > max(_DESCRIPTORS) else LocalHeaderMismatch
        raise kind(
            "the bytes after the member's data are not its data descriptor",
            where=where,
            expected="12, 16, 20 or 24 bytes",
            found=f"{limit - end} bytes",
        )
    signed = limit - end in (16, 24)
    if (signed and data[end : end + 4] != _DESCRIPTOR_SIGNATURE) or form.unpack_from(data, end) != (
        entry.crc,
        entry.packed,
        entry.size,
    ):
        raise LocalHeaderMismatch(
            "the member's data descriptor is not what the central directory says",
            where=where,
            expected=f"CRC {entry.crc:#010x}, {entry.size} from {entry.packed} bytes",
        )
    return limit
