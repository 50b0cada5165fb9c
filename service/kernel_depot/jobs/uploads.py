"""Bytes that a client brings: taken in parts, checked each and as a whole, then a blob like any other.

The parts lie in the store and their numbers in the catalog, so any server takes any part, and an upload that
was broken off goes on with the parts that are missing. A part's row is written before its bytes and removed
after them: no bytes are ever left without a row that leads to them.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from sqlalchemy import Engine, delete, update
from sqlmodel import Session, col, select

from kernel_depot.catalog import record
from kernel_depot.catalog.database import reading, upsert, writing
from kernel_depot.catalog.tables import Blob, Upload, UploadPart
from kernel_depot.digest import sha256_bytes
from kernel_depot.errors import DepotError
from kernel_depot.settings import Settings
from kernel_depot.store.blobs import Form, StagedBlob, Store
from kernel_depot.store.errors import BlobMissing

PART: Final = 4 << 20
"""Bytes of every part but the last."""

_ABANDONED = timedelta(days=7)


class UploadError(DepotError):
    """The root of what can go wrong with an upload."""

    slug = "upload-failed"
    title = "The upload failed"
    status = 400


class UploadUnknown(UploadError):
    """A digest under which no upload is under way."""

    slug = "upload-unknown"
    title = "No such upload"
    status = 404


class UploadTooLarge(UploadError):
    """An upload of more bytes than this depot takes."""

    slug = "upload-too-large"
    title = "The upload is too large"
    status = 413


class UploadSizeDiffers(UploadError):
    """A digest that is known with another size than the one announced."""

    slug = "upload-size-differs"
    title = "These bytes are known with another size"
    status = 409


class UploadPartRefused(UploadError):
    """A part that is not what its number and digest say."""

    slug = "upload-part-refused"
    title = "The part cannot be taken"


class UploadIncomplete(UploadError):
    """An upload that was to be completed though parts are missing; `missing` lists them."""

    slug = "upload-incomplete"
    title = "Parts of the upload are missing"
    status = 409


class UploadMismatch(UploadError):
    """Bytes that, together, are not those that the digest names; nothing of them is kept."""

    slug = "upload-mismatch"
    title = "The uploaded bytes are not the announced ones"


class UploadNoRoom(UploadError):
    """No room on the server's disk."""

    slug = "upload-no-room"
    title = "The server's disk is full"
    status = 507


@dataclass(frozen=True, slots=True)
class Stored:
    """The bytes are a blob of this depot. `size` is in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Receiving:
    """An upload under way. `missing` are the numbers of the parts to send, from 0; `size` is in bytes."""

    sha256: str
    size: int
    missing: tuple[int, ...]


Progress = Stored | Receiving


def begin(
    engine: Engine, store: Store, *, settings: Settings, sha256: str, size: int, begun_by: str
) -> Progress:
    """Begin an upload of `size` bytes, or find how far it is.

    Raise UploadTooLarge, and UploadSizeDiffers when the digest is known with another size.
    """
    if size > settings.max_wheel_bytes:
        raise UploadTooLarge(
            "the upload is larger than what this depot takes",
            where=sha256,
            expected=f"at most {settings.max_wheel_bytes} bytes",
            found=size,
            remedy="raise the server's setting max_wheel_bytes",
        )
    there = _stored(engine, store, sha256)
    if there is None:
        moment = record.now()
        row = {"sha256": sha256, "size": size, "begun_by": begun_by, "begun_at": moment, "touched_at": moment}
        with writing(engine) as session:
            record.insert_absent(session, Upload, [row])
    known = there or progress(engine, store, sha256)
    if known.size != size:
        raise UploadSizeDiffers(
            "bytes of this digest are known with another size",
            where=sha256,
            expected=known.size,
            found=size,
            remedy="one of the two is wrong: hash the file again",
        )
    return known


def progress(engine: Engine, store: Store, sha256: str) -> Progress:
    """Say how far an upload is. Raise UploadUnknown."""
    there = _stored(engine, store, sha256)
    if there is not None:
        return there
    with reading(engine) as session:
        upload = _upload(session, sha256)
        parts = _parts(session, sha256)
    held = store.has(set(parts.values()), form=Form.PART)
    missing = [number for number in range(_count(upload.size)) if parts.get(number) not in held]
    return Receiving(sha256, upload.size, tuple(missing))


def take_part(
    engine: Engine, store: Store, *, sha256: str, number: int, data: bytes, digest: str | None
) -> None:
    """Take one part, which may have been taken before. `digest` is its SHA-256 as the client says it.

    Raise UploadUnknown, UploadPartRefused for a number, length or digest that does not fit, UploadNoRoom.
    """
    with reading(engine) as session:
        size = _upload(session, sha256).size
    wanted = min(PART, size - number * PART)
    where = f"upload {sha256}, part {number}"
    if wanted <= 0:
        raise UploadPartRefused(
            "the upload has no such part", where=where, expected=f"0 to {_count(size) - 1}", found=number
        )
    if len(data) != wanted:
        raise UploadPartRefused(
            "the part has not the length of its number", where=where, expected=wanted, found=len(data)
        )
    found = sha256_bytes(data)
    if digest is not None and digest != found:
        raise UploadPartRefused(
            "the part was changed on its way",
            where=where,
            expected=digest,
            found=found,
            remedy="send it again",
        )
    with writing(engine) as session:
        values = {"upload": sha256, "number": number, "sha256": found}
        statement = upsert(session, UploadPart).values(values)
        session.connection().execute(
            statement.on_conflict_do_update(index_elements=["upload", "number"], set_={"sha256": found})
        )
        session.connection().execute(
            update(Upload).where(col(Upload.sha256) == sha256).values(touched_at=record.now())
        )
    with _room(where), store.staging() as staging:
        path = staging / found
        path.write_bytes(data)
        store.publish(StagedBlob(found, len(data), path), form=Form.PART)


def complete(engine: Engine, store: Store, sha256: str) -> Stored:
    """Put the parts together, check them as a whole, and make them a blob.

    Raise UploadUnknown, UploadIncomplete, UploadNoRoom, and UploadMismatch, after which nothing is left.
    """
    known = progress(engine, store, sha256)
    if isinstance(known, Stored):
        return known
    if known.missing:
        raise _incomplete(known)
    with reading(engine) as session:
        parts = _parts(session, sha256)
    with _room(f"upload {sha256}"), store.staging() as staging:
        path = staging / sha256
        try:
            found = _assemble(store, [parts[number] for number in sorted(parts)], path)
        except BlobMissing:  # another upload that shared a part was completed meanwhile
            again = progress(engine, store, sha256)
            if isinstance(again, Stored):
                return again
            raise _incomplete(again) from None
        if found != sha256:
            abandon(engine, store, sha256)
            raise UploadMismatch(
                "the uploaded bytes are not those that were announced",
                where=f"upload {sha256}",
                expected=sha256,
                found=found,
                remedy="hash the file again and upload it once more; nothing of it was kept",
            )
        store.publish(StagedBlob(sha256, known.size, path))
    with writing(engine) as session:
        row = {
            "sha256": sha256,
            "size": known.size,
            "zstd_state": "pending",
            "zstd_size": None,
            "zstd_sha256": None,
        }
        record.insert_absent(session, Blob, [row])
    abandon(engine, store, sha256)
    return Stored(sha256, known.size)


def abandon(engine: Engine, store: Store, sha256: str) -> None:
    """Forget an upload and its parts; one that is not known is no error."""
    with reading(engine) as session:
        mine = set(_parts(session, sha256).values())
        shared = select(UploadPart.sha256).where(
            col(UploadPart.upload) != sha256, col(UploadPart.sha256).in_(mine)
        )
        mine -= set(session.exec(shared))
    for part in sorted(mine):
        store.delete(part, form=Form.PART)
    with writing(engine) as session:
        session.connection().execute(delete(UploadPart).where(col(UploadPart.upload) == sha256))
        session.connection().execute(delete(Upload).where(col(Upload.sha256) == sha256))


def remove_abandoned(engine: Engine, store: Store) -> int:
    """Forget the uploads that nobody came back for in a week; return how many."""
    with reading(engine) as session:
        limit = record.now() - _ABANDONED
        left = session.exec(select(Upload.sha256).where(col(Upload.touched_at) < limit)).all()
    for sha256 in left:
        abandon(engine, store, sha256)
    return len(left)


def _assemble(store: Store, parts: list[str], path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in parts:
            for piece in store.read(part, form=Form.PART):
                digest.update(piece)
                file.write(piece)
    return digest.hexdigest()


def _stored(engine: Engine, store: Store, sha256: str) -> Stored | None:
    with reading(engine) as session:
        blob = session.get(Blob, sha256)
    if blob is None or store.size(sha256) != blob.size:
        return None
    return Stored(sha256, blob.size)


def _upload(session: Session, sha256: str) -> Upload:
    upload = session.get(Upload, sha256)
    if upload is None:
        raise UploadUnknown(
            f"no upload of {sha256} is under way",
            where="uploads",
            found=sha256,
            remedy="begin it with POST /v1/uploads",
        )
    return upload


def _parts(session: Session, sha256: str) -> dict[int, str]:
    rows = session.exec(select(UploadPart.number, UploadPart.sha256).where(UploadPart.upload == sha256))
    return dict(rows.all())


def _count(size: int) -> int:
    return -(-size // PART)


def _incomplete(known: Receiving) -> UploadIncomplete:
    return UploadIncomplete(
        f"{len(known.missing)} parts of the upload are missing",
        where=f"upload {known.sha256}",
        remedy="send them, then complete the upload",
        missing=list(known.missing),
    )


@contextmanager
def _room(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UploadNoRoom(
            "the server has no room for these bytes",
            where=where,
            remedy="free space on the server; the upload goes on where it was",
        ) from error
