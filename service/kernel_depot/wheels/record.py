"""RECORD: the list of a wheel's files with their hashes and sizes (PEP 376, PEP 427)."""

from __future__ import annotations

import base64
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
_TEXT_LENGTHS = {name: (size * 8 + 5) // 6 for name, size in ALGORITHMS.items()}


class RecordRow(NamedTuple):
    """What RECORD says of one file. `digest` is URL-safe base64 without padding, "" when absent."""

    algorithm: str
    digest: str
    size: int | None


def read_record(data: bytes, *, where: str) -> dict[str, RecordRow]:
    """Read RECORD's rows by path.

    Raise RecordMalformed, RecordDuplicate or RecordHashWeak.
    """
    rows: dict[str, RecordRow] = {}
    try:
        lines = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", newline="")
        for fields in csv.reader(lines, strict=True):
            if not fields:
                continue
            if len(fields) != 3 or not fields[0]:
                raise RecordMalformed(
                    "a row of RECORD is not a path, a hash and a size", where=where, found=",".join(fields)
                )
            path, coded, size = fields
            if path in rows:
                raise RecordDuplicate("RECORD names a file twice", where=where, found=path)
            algorithm, _, digest = coded.partition("=")
            if coded and _TEXT_LENGTHS.get(algorithm) != len(digest):
                _refuse_hash(algorithm, digest, where=f"{where}: {path!r}")
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
        if not row.digest and path not in unhashed:
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


def check_digest(row: RecordRow, digest: bytes, *, where: str, path: str) -> None:
    """Compare the digest of the member at `path`, made with the row's algorithm. Raise RecordHashMismatch."""
    found = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    if row.digest != found:
        raise RecordHashMismatch(
            "a member's bytes are not those that RECORD names",
            where=f"{where}: {path!r}",
            expected=f"{row.algorithm}={row.digest}",
            found=f"{row.algorithm}={found}",
        )


def _refuse_hash(algorithm: str, digest: str, *, where: str) -> None:
    if algorithm not in ALGORITHMS:
        raise RecordHashWeak(
            "RECORD names a hash that is not accepted",
            where=where,
            expected=", ".join(ALGORITHMS),
            found=algorithm,
        )
    raise RecordMalformed(
        "a hash in RECORD has the wrong length",
        where=where,
        expected=f"{_TEXT_LENGTHS[algorithm]} characters",
        found=f"{digest!r}, {len(digest)} characters",
    )
