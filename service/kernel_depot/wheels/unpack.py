"""Turn one member's packed bytes into its content, in bounded pieces, and prove them as declared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from isal import isal_zlib

from kernel_depot.wheels.archive import STORED, Bytes, Member
from kernel_depot.wheels.errors import (
    MemberCrcMismatch,
    MemberDataInvalid,
    MemberLargerThanDeclared,
    MemberSmallerThanDeclared,
)

PIECE = 4 << 20  # members up to this size are held whole, larger ones in pieces of it
_PACKED_PIECE = 256 << 10
# The library's stub takes this class for an instance.
_DeflateError = cast("type[Exception]", isal_zlib.error)


def unpack(data: Bytes, member: Member, *, where: str) -> Iterator[bytes | memoryview]:
    """Yield the member's content in pieces of at most `PIECE` bytes.

    Raise MemberLargerThanDeclared as soon as one byte too many comes out, MemberSmallerThanDeclared,
    MemberDataInvalid for a broken deflate stream, and MemberCrcMismatch after the last piece.
    """
    where = f"{where}: {member.name!r}"
    pieces = _stored(data, member) if member.method == STORED else _inflated(data, member, where=where)
    crc = size = 0
    for piece in pieces:
        size += len(piece)
        if size > member.size:
            raise MemberLargerThanDeclared(
                "the member unpacks to more bytes than it declares",
                where=where,
                expected=f"{member.size} bytes",
                found="more",
            )
        crc = isal_zlib.crc32(piece, crc)
        yield piece
    if size != member.size:
        raise MemberSmallerThanDeclared(
            "the member unpacks to fewer bytes than it declares",
            where=where,
            expected=f"{member.size} bytes",
            found=f"{size} bytes",
        )
    if crc != member.crc:
        raise MemberCrcMismatch(
            "the member's CRC-32 is not the declared one",
            where=where,
            expected=f"{member.crc:#010x}",
            found=f"{crc:#010x}",
        )


def read_whole(data: Bytes, member: Member, *, where: str) -> bytes:
    """Return the whole content of a small member, checked as `unpack` does."""
    content = _read_at_once(data, member)
    if content is not None and len(content) == member.size and isal_zlib.crc32(content) == member.crc:
        return content
    # The slow way tells what is wrong, or copes with what comes out in more than one piece.
    return b"".join(unpack(data, member, where=where))


def _read_at_once(data: Bytes, member: Member) -> bytes | None:
    if member.packed > member.size + _PACKED_PIECE:
        return None
    packed = data[member.start : member.start + member.packed]
    if member.method == STORED:
        return packed
    stream = isal_zlib.decompressobj(-15)
    try:
        content = stream.decompress(packed, member.size + 1)
    except _DeflateError:
        return None
    return content if stream.eof and not stream.unused_data else None


def _stored(data: Bytes, member: Member) -> Iterator[memoryview]:
    with memoryview(data) as view:
        for start in range(member.start, member.start + member.size, PIECE):
            with view[start : min(start + PIECE, member.start + member.size)] as piece:
                yield piece


def _inflated(data: Bytes, member: Member, *, where: str) -> Iterator[bytes]:
    """Inflate with a bound on every piece, so that a bomb is met after one byte too many."""
    stream = isal_zlib.decompressobj(-15)
    end = member.start + member.packed
    room = min(member.size + 1, PIECE)
    try:
        for start in range(member.start, end, _PACKED_PIECE):
            packed = data[start : min(start + _PACKED_PIECE, end)]
            while packed and not stream.eof:
                piece = stream.decompress(packed, room)
                if not piece and len(stream.unconsumed_tail) == len(packed):
                    raise MemberDataInvalid("the deflate stream does not go on", where=where)
                packed = stream.unconsumed_tail
                yield piece
            if stream.eof and (stream.unused_data or packed or start + _PACKED_PIECE < end):
                raise MemberDataInvalid("packed bytes follow the end of the deflate stream", where=where)
        while not stream.eof and (piece := stream.decompress(b"", room)):
            yield piece
    except _DeflateError as error:
        raise MemberDataInvalid(f"the deflate stream is broken: {error}", where=where) from error
    if not stream.eof:
        raise MemberDataInvalid("the deflate stream has no end", where=where)
