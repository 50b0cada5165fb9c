"""Scrubbing the store: every blob is hashed again; what is not what its name says goes, and comes anew."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kernel_depot.catalog import queries, record
from kernel_depot.catalog.database import reading, writing
from kernel_depot.jobs.depot import Depot
from kernel_depot.jobs.materialize import Failed, materialize_wheel
from kernel_depot.pins.pin import Pin
from kernel_depot.store.blobs import Form
from kernel_depot.store.errors import BlobMissing

PARTS: Final = tuple(f"{number:02x}" for number in range(256))
"""What the digests of one part begin with. A part is one step of the job."""


@dataclass(frozen=True, slots=True)
class Part:
    """What was read of one part, in blobs and bytes, and the blobs whose bytes are wrong or gone."""

    blobs: int
    bytes: int
    damaged: tuple[dict[str, Any], ...]


def scrub_part(depot: Depot, prefix: str, *, check: Callable[[], None]) -> Part:
    """Hash the blobs whose digests begin so, and delete what is wrong, so that nobody is sent it.

    A damaged zstd form is only forgotten: it is made again from the identity bytes. `check` is called between
    pieces and may raise. Raise StoreUnreachable.
    """
    with reading(depot.engine) as session:
        rows = queries.blobs_beginning(session, prefix)
    size = 0
    damaged = []
    for row in rows:
        found, read = _digest(depot, row.sha256, Form.IDENTITY, check)
        size += read
        if found != row.sha256:
            depot.store.delete(row.sha256)
            damaged.append({"sha256": row.sha256, "found": found, "state": "damaged"})
        if row.zstd_state == "made":
            form, read = _digest(depot, row.sha256, Form.ZSTD, check)
            size += read
            if form != row.zstd_sha256:
                depot.store.delete(row.sha256, form=Form.ZSTD)
                with writing(depot.engine) as session:
                    record.forget_zstd(session, row.sha256)
    return Part(len(rows), size, tuple(damaged))


def mend(depot: Depot, damaged: Sequence[str], *, check: Callable[[], None]) -> list[dict[str, Any]]:
    """Bring the wheels that hold damaged blobs, or are such blobs, once more; return how each blob ended.

    Each result has `sha256`, `state` (`mended` or `lost`) and, of a lost one, `why`.
    """
    with reading(depot.engine) as session:
        pins = {sha256: queries.pins_holding(session, sha256) for sha256 in damaged}
    problems: dict[str, str] = {}
    for pin in _distinct(pins.values()):
        check()
        outcome = materialize_wheel(depot, pin, progress=lambda _: check(), again=pin.sha256 in damaged)
        if isinstance(outcome, Failed):
            problems[pin.sha256] = str(outcome.problem.get("detail", "it could not be brought"))
    there = depot.store.has(damaged)
    return [
        {"sha256": sha256, "state": "mended"}
        if sha256 in there
        else {
            "sha256": sha256,
            "state": "lost",
            "why": "; ".join(problems[pin.sha256] for pin in pins[sha256] if pin.sha256 in problems)
            or "no pinned wheel holds it",
        }
        for sha256 in damaged
    ]


def _distinct(lists: Any) -> list[Pin]:
    found: dict[str, Pin] = {}
    for pins in lists:
        for pin in pins:
            found.setdefault(pin.sha256, pin)
    return list(found.values())


def _digest(depot: Depot, sha256: str, form: Form, check: Callable[[], None]) -> tuple[str | None, int]:
    """Return the digest and the size of the stored bytes, None when there are none."""
    digest = hashlib.sha256()
    size = 0
    try:
        for piece in depot.store.read(sha256, form=form):
            check()
            digest.update(piece)
            size += len(piece)
    except BlobMissing:
        return None, size
    return digest.hexdigest(), size
