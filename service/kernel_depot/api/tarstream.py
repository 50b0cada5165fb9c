"""Many blobs as one tar stream of exactly known length, plain or as a chain of zstd frames.

The archive is ustar (POSIX.1-2001, pax "ustar interchange format"): members `sha256/<hex>`, mode 0444,
no times and no owners, so the same question always gets the same bytes. The compressed form (RFC 8878)
uses that a concatenation of frames is one stream: the stored zstd form of a blob goes in as it is,
headers and padding travel in frames of raw blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kernel_depot.api.sending import Piece, damaged

BLOCK = 512
BATCH = 1 << 20
_END = bytes(2 * BLOCK)
_RAW_BLOCK = 128 << 10  # the largest block of a frame, RFC 8878 3.1.1.2.4
LARGEST = 8**11 - 1  # bytes of a member: eleven octal digits


@dataclass(frozen=True, slots=True)
class Entry:
    """One blob of the stream. `zstd_size` is set when its stored zstd form is to be used."""

    sha256: str
    size: int
    zstd_size: int | None = None


class Source(Protocol):
    """Where an entry's bytes come from, in the form the entry says."""

    def path(self, entry: Entry) -> Path | None:
        """Return the local file that holds them, None when there is none."""
        ...

    def read(self, entry: Entry) -> Iterator[Piece]:
        """Yield them from where they are when no local file holds them."""
        ...


def _header_template() -> tuple[bytearray, int]:
    header = bytearray(BLOCK)
    header[:7] = b"sha256/"
    for offset, field in (
        (100, b"0000444\0"),
        (108, b"0000000\0"),
        (116, b"0000000\0"),
        (124, b"00000000000\0"),
        (136, b"00000000000\0"),
        (148, b"        "),
        (156, b"0"),
        (257, b"ustar\x0000"),
        (329, b"0000000\0"),
        (337, b"0000000\0"),
    ):
        header[offset : offset + len(field)] = field
    # The size's and the name's digits are added per member.
    return header, sum(header) - 11 * ord("0")


_TEMPLATE, _TEMPLATE_SUM = _header_template()


def tar_header(sha256: str, size: int) -> bytes:
    """Return the ustar header of a blob. Raise ValueError for sizes the format cannot say (8 GiB)."""
    if size > LARGEST:
        raise ValueError(f"{size} bytes do not fit a ustar header")
    header = bytearray(_TEMPLATE)
    name, octal = sha256.encode("ascii"), b"%011o" % size
    header[7:71] = name
    header[124:135] = octal
    header[148:156] = b"%06o\0 " % (_TEMPLATE_SUM + sum(name) + sum(octal))
    return bytes(header)


def padding(size: int) -> int:
    """Return how many zero bytes fill the last block of a member."""
    return -size % BLOCK


def plain_length(entries: Sequence[Entry]) -> int:
    """Return the length of the plain stream."""
    return sum(BLOCK + entry.size + padding(entry.size) for entry in entries) + len(_END)


def zstd_length(entries: Sequence[Entry]) -> int:
    """Return the length of the stream as zstd frames."""
    total = pending = 0
    for entry in entries:
        pending += BLOCK
        if entry.zstd_size is None:
            pending += entry.size
        else:
            total += _framed_length(pending) + entry.zstd_size
            pending = 0
        pending += padding(entry.size)
    return total + _framed_length(pending + len(_END))


def _framed_length(size: int) -> int:
    total = 0
    while size:
        part = min(size, BATCH)
        total += len(_frame_head(part)) + 3 * -(-part // _RAW_BLOCK) + part
        size -= part
    return total


def _frame_head(size: int) -> bytes:
    """Return the head of a single-segment frame (RFC 8878, 3.1.1.1) whose content has `size` bytes."""
    magic = b"\x28\xb5\x2f\xfd"
    if size < 256:
        return magic + b"\x20" + size.to_bytes(1, "little")
    if size < 256 + 65536:
        return magic + b"\x60" + (size - 256).to_bytes(2, "little")
    return magic + b"\xa0" + size.to_bytes(4, "little")


def raw_frame(content: Piece) -> bytes:
    """Wrap at most BATCH bytes in one zstd frame of raw blocks."""
    parts: list[Piece] = [_frame_head(len(content))]
    view = memoryview(content)
    for start in range(0, len(view), _RAW_BLOCK):
        block = view[start : start + _RAW_BLOCK]
        last = start + len(block) == len(view)
        parts += [(len(block) << 3 | last).to_bytes(3, "little"), block]
    return b"".join(parts)


def plain_stream(entries: Sequence[Entry], source: Source) -> Iterator[Piece]:
    """Yield the plain stream in batches. Raise BlobDamaged in the middle when a blob is not whole."""
    batch = _Batch()
    for entry in entries:
        yield from batch.put(tar_header(entry.sha256, entry.size))
        path = source.path(entry)
        if path is None:
            for piece in _exactly(source.read(entry), entry, entry.size):
                yield from batch.put(piece)
        else:
            yield from batch.fill(path, entry)
        yield from batch.put(_END[: padding(entry.size)])
    yield from batch.put(_END)
    yield from batch.rest()


def zstd_stream(entries: Sequence[Entry], source: Source) -> Iterator[Piece]:
    """Yield the stream as zstd frames, in batches. Raise BlobDamaged when a blob is not whole."""
    out, plain = bytearray(), bytearray()
    for entry in entries:
        plain += tar_header(entry.sha256, entry.size)
        if entry.zstd_size is not None:
            out += raw_frame(plain)
            plain = bytearray()
        for piece in _form(entry, source):
            if entry.zstd_size is None:
                plain += piece
                while len(plain) >= BATCH:
                    out += raw_frame(plain[:BATCH])
                    plain = plain[BATCH:]
            else:
                out += piece
            if len(out) >= BATCH:
                yield out
                out = bytearray()
        plain += _END[: padding(entry.size)]
    plain += _END
    while plain:
        out += raw_frame(plain[:BATCH])
        plain = plain[BATCH:]
    yield out


def _form(entry: Entry, source: Source) -> Iterator[Piece]:
    expected = entry.size if entry.zstd_size is None else entry.zstd_size
    path = source.path(entry)
    return _exactly(_file(path, entry) if path is not None else source.read(entry), entry, expected)


def _file(path: Path, entry: Entry) -> Iterator[Piece]:
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(BATCH):
                yield piece
    except OSError as error:
        raise damaged(entry.sha256, expected=entry.size, found=error.strerror) from error


def _exactly(pieces: Iterator[Piece], entry: Entry, expected: int) -> Iterator[Piece]:
    count = 0
    for piece in pieces:
        count += len(piece)
        if count > expected:
            break
        yield piece
    if count != expected:
        raise damaged(entry.sha256, expected=expected, found=f"{count} bytes")


class _Batch:
    """Gathers many small files in one buffer; each is read straight into its place there."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self._buffer = bytearray(BATCH)
        self._view = memoryview(self._buffer)
        self._used = 0

    def _flush(self) -> Piece:
        # The socket may hold the batch for long, so the next one gets a buffer of its own.
        full = self._view[: self._used]
        self._renew()
        return full

    def put(self, data: Piece) -> Iterator[Piece]:
        """Append bytes; yield batches that became full."""
        left = memoryview(data)
        while left:
            count = min(len(left), BATCH - self._used)
            self._view[self._used : self._used + count] = left[:count]
            self._used += count
            left = left[count:]
            if self._used == BATCH:
                yield self._flush()

    def fill(self, path: Path, entry: Entry) -> Iterator[Piece]:
        """Append a file's bytes; yield batches that became full."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise damaged(entry.sha256, expected=entry.size, found=error.strerror) from error
        try:
            found = os.fstat(file).st_size
            left = entry.size if found == entry.size else -1
            while left > 0:
                end = self._used + min(left, BATCH - self._used)
                count = os.readv(file, [self._view[self._used : end]])
                if count == 0:
                    found, left = entry.size - left, -1
                    break
                self._used += count
                left -= count
                if self._used == BATCH:
                    yield self._flush()
            if left < 0:
                raise damaged(entry.sha256, expected=entry.size, found=f"{found} bytes")
        finally:
            os.close(file)

    def rest(self) -> Iterator[Piece]:
        """Yield what is left."""
        if self._used:
            yield self._flush()
