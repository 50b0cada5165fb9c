"""RECORD: the list of a wheel's files with their hashes and sizes (PEP 376, PEP 427)."""

from __future__ import annotations

import binascii
import csv
import io
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernel_depot.wheels.errors import (
    RecordDuplicate,
    RecordFileAbsent,
    RecordHashAbsent,
    RecordHashMismatch,
    RecordHashWeak,
    RecordMalformed,
    RecordMemberUnlisted,
    RecordSizeMismatch,
)

# Hash algorithms that are accepted, by hashlib's names, with their digest size in bytes.
ALGORITHMS = {"sha256": 32, "sha384": 48, "sha512": 64, "sha3_256": 32, "sha3_384": 48, "sha3_512": 64}
_URL_SAFE = str.maketrans("-_", "+/")


class RecordRow(NamedTuple):
    """What RECORD says of one file; `algorithm` and `digest` are both absent or both there."""

    algorithm: str | None
    digest: bytes | None
    size: int | None


def read_record(data: bytes, *, where: str) -> dict[str, RecordRow]:
    """Read RECORD's rows by path.

    Raise RecordMalformed, RecordDuplicate or RecordHashWeak.
    """
    rows: dict[str, RecordRow] = {}
    try:
        for fields in csv.reader(io.StringIO(data.decode("utf-8"), newline=""), strict=True):
            if not fields:
                continue
            if len(fields) != 3 or not fields[0]:
                raise RecordMalformed(
                    "a row of RECORD is not a path, a hash and a size", where=where, found=",".join(fields)
                )
            path, coded, size = fields
            if path in rows:
                raise RecordDuplicate("RECORD names a file twice", where=where, found=path)
            algorithm, digest = _read_hash(coded, where=f"{where}: {path!r}") if coded else (None, None)
            if size and not (size.isascii() and size.isdigit()):
                raise RecordMalformed(
                    "a size in RECORD is not a number", where=f"{where}: {path!r}", found=size
                )
            rows[path] = RecordRow(algorithm, digest, int(size) if size else None)
    except (UnicodeDecodeError, csv.Error) as error:
        raise RecordMalformed(f"RECORD is not UTF-8 CSV: {error}", where=where) from error
    return rows


def check_listing(
    rows: Mapping[str, RecordRow], files: Iterable[tuple[str, int]], *, record: str, where: str
) -> None:
    """Check that RECORD and the wheel name the same files, each with a hash, and the same sizes.

    `files` are paths and sizes of all members but directories; `record` is RECORD's own path. RECORD and
    its signatures need no hash (PEP 427). Raise RecordMemberUnlisted, RecordHashAbsent,
    RecordSizeMismatch or RecordFileAbsent.
    """
    unhashed = (record, f"{record}.jws", f"{record}.p7s")
    left = set(rows)
    for path, size in files:
        row = rows.get(path)
        if row is None:
            if path in unhashed:
                continue
            raise RecordMemberUnlisted("a member is not in RECORD", where=f"{where}: {path!r}")
        left.discard(path)
        if row.digest is None and path not in unhashed:
            raise RecordHashAbsent("RECORD has no hash for a member", where=f"{where}: {path!r}")
        if row.size is not None and row.size != size:
            raise RecordSizeMismatch(
                "a member's size is not the one in RECORD",
                where=f"{where}: {path!r}",
                expected=row.size,
                found=size,
            )
    if left:
        raise RecordFileAbsent(
            f"RECORD names {len(left)} file(s) that are not in the wheel",
            where=where,
            found=sorted(left)[:10],
        )


def check_digest(row: RecordRow, digest: bytes, *, where: str) -> None:
    """Compare a member's digest, by the row's algorithm. Raise RecordHashMismatch."""
    if row.digest != digest:
        raise RecordHashMismatch(
            "a member's bytes are not those that RECORD names",
            where=where,
            expected=f"{row.algorithm} {row.digest.hex() if row.digest else None}",
            found=digest.hex(),
        )


def _read_hash(coded: str, *, where: str) -> tuple[str, bytes]:
    algorithm, _, text = coded.partition("=")
    size = ALGORITHMS.get(algorithm)
    if size is None:
        raise RecordHashWeak(
            "RECORD names a hash that is not accepted",
            where=where,
            expected=", ".join(ALGORITHMS),
            found=algorithm,
        )
    try:
        digest = binascii.a2b_base64(text.translate(_URL_SAFE) + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError) as error:
        raise RecordMalformed("a hash in RECORD is not base64", where=where, found=coded) from error
    if len(digest) != size or len(text) != (size * 8 + 5) // 6:
        raise RecordMalformed(
            "a hash in RECORD has the wrong length", where=where, expected=f"{size} bytes", found=coded
        )
    return algorithm, digest
