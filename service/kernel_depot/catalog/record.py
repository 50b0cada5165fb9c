"""What the catalog is told. Every function writes within the caller's transaction."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from operator import itemgetter
from typing import Any

from sqlalchemy import delete, insert, update
from sqlmodel import Session, SQLModel, col, select

import kernel_depot.pins.pin as pins
from kernel_depot.catalog import changes
from kernel_depot.catalog.database import upsert
from kernel_depot.catalog.tables import (
    Blob,
    Canary,
    Inspection,
    Job,
    Member,
    PinRow,
    PinSet,
    PinSetRevision,
    RevisionFailure,
    Token,
    Wheel,
    WheelFailure,
)
from kernel_depot.wheels.extract import ExtractedWheel
from kernel_depot.wheels.inspect import Inspection as Inspected

LEAK_MARK = "kd_"  # lets a scanner recognize a leaked secret


def now() -> datetime:
    """Return the present moment in UTC."""
    return datetime.now(timezone.utc)


def insert_absent(session: Session, table: type[SQLModel], rows: Sequence[Mapping[str, Any]]) -> int:
    """Insert the rows whose primary key is not there yet, in bulk; return how many were asked for."""
    if rows:
        session.connection().execute(upsert(session, table).on_conflict_do_nothing(), list(rows))
    return len(rows)


def _insert_plain(session: Session, statement: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Insert many rows of plain text and numbers, which need no conversion one by one."""
    connection = session.connection()
    compiled = statement.compile(dialect=connection.dialect, column_keys=list(rows[0]))
    if compiled.positional:
        values: list[Any] = list(map(itemgetter(*compiled.positiontup), rows))
    else:
        values = list(rows)
    connection.exec_driver_sql(str(compiled), values)


def record_pin_set(session: Session, pin_set: pins.PinSet, *, who: str, why: str | None = None) -> bool:
    """Record a revision and make it what its name means. Return whether that changed anything."""
    record_revision(session, pin_set)
    return make_current(session, pin_set.name, pin_set.digest, who=who, why=why)


def record_revision(session: Session, pin_set: pins.PinSet) -> bool:
    """Record a revision; its name goes on meaning what it means. Return whether it was not known."""
    if session.get(PinSetRevision, pin_set.digest) is not None:
        return False
    session.add(
        PinSetRevision(
            digest=pin_set.digest,
            name=pin_set.name,
            text=pin_set.text,
            origin=pin_set.origin,
            groups=[group.to_json() for group in pin_set.groups],
            created_at=now(),
        )
    )
    session.flush()
    session.connection().execute(
        insert(PinRow), [_pin_row(pin, revision=pin_set.digest) for pin in pin_set.pins]
    )
    return True


def make_current(
    session: Session,
    name: str,
    revision: str,
    *,
    who: str,
    why: str | None = None,
    action: str = "activated",
) -> bool:
    """Let a pin set's name mean a recorded revision from now on. Return whether that changed anything.

    The change is audited and told to the fleet; a canary of that revision is over, and its failure forgotten.
    """
    session.connection().execute(
        delete(Canary).where(col(Canary.name) == name, col(Canary.revision) == revision)
    )
    session.connection().execute(delete(RevisionFailure).where(col(RevisionFailure.revision) == revision))
    named = session.get(PinSet, name)
    if named is not None and named.revision == revision:
        return False
    before = named.revision if named is not None else None
    changes.audit(session, who=who, action=action, subject=name, before=before, after=revision, why=why)
    changes.touch_fleet(session)
    if named is None:
        session.add(PinSet(name=name, revision=revision, updated_at=now()))
    else:
        named.revision = revision
        named.updated_at = now()
    session.flush()
    return True


def _pin_row(pin: pins.Pin, *, revision: str) -> dict[str, Any]:
    return {
        "revision": revision,
        "project": pin.project,
        "version": pin.version,
        "filename": pin.filename,
        "sha256": pin.sha256,
        "cuda": str(pin.cuda),
        "arch": str(pin.arch),
        "sm": str(pin.sm) if pin.sm is not None else None,
        "url": pin.origin.url if isinstance(pin.origin, pins.UrlOrigin) else None,
        "index_name": pin.origin.name if isinstance(pin.origin, pins.IndexOrigin) else None,
        "size": pin.size,
        "record_sha256": pin.record_sha256,
    }


def record_wheel(
    session: Session,
    wheel: ExtractedWheel,
    inspections: Mapping[str, Inspected],
    *,
    sha256: str,
    arch: str | None,
    kept: bool,
) -> None:
    """Record a wheel whose artifacts, and its own bytes when `kept`, are published. Clear its failure.

    `inspections` are by the SHA-256 of the artifact. A wheel that is recorded already stays as it is.
    """
    if session.get(Wheel, sha256) is None:
        session.connection().execute(
            insert(Wheel),
            {
                "sha256": sha256,
                "filename": wheel.filename,
                "project": pins.project_word(wheel.project),
                "version": wheel.version,
                "arch": arch,
                "size": wheel.size,
                "unpacked_size": wheel.unpacked_size,
                "member_count": len(wheel.members),
                "kept": kept,
                "ingested_at": now(),
            },
        )
        _insert_plain(
            session,
            insert(Member),
            [
                {
                    "wheel": sha256,
                    "path": member.path,
                    "sha256": member.sha256,
                    "size": member.size,
                    "kind": member.kind.value if member.kind is not None else None,
                    "module": member.module,
                }
                for member in sorted(wheel.members)
            ],
        )
    # Rows in the order of their key fill the key's tree from left to right.
    blobs = [_blob_row(digest, member.size) for digest, member in sorted(wheel.blobs.items())]
    if kept:
        # A wheel is compressed already; its zstd form is never worth its bytes.
        blobs.append(_blob_row(sha256, wheel.size, state="not_worth"))
    if blobs:
        _insert_plain(session, upsert(session, Blob).on_conflict_do_nothing(), blobs)
    if inspections:
        _insert_plain(
            session,
            upsert(session, Inspection).on_conflict_do_nothing(),
            [_inspection_row(*item) for item in sorted(inspections.items())],
        )
    session.connection().execute(delete(WheelFailure).where(col(WheelFailure.sha256) == sha256))
    changes.touch_fleet(session)


def _blob_row(sha256: str, size: int, *, state: str = "pending") -> dict[str, Any]:
    return {"sha256": sha256, "size": size, "zstd_state": state, "zstd_size": None, "zstd_sha256": None}


def _inspection_row(sha256: str, found: Inspected) -> dict[str, Any]:
    return {
        "sha256": sha256,
        "format": found.format,
        "machine": found.machine,
        "soname": found.soname,
        "needed": _json_list(found.needed),
        "glibc": found.glibc,
        "glibcxx": found.glibcxx,
        "functions": _json_list(found.functions),
        "sms": _json_list(found.sms),
        "ptx": _json_list(found.ptx),
    }


@lru_cache(maxsize=1024)
def _json_list(items: tuple[str, ...]) -> str:
    """Return a JSON column's text; the inspections of a cubin wheel repeat a few lists."""
    return json.dumps(items)


def record_failure(session: Session, *, sha256: str, filename: str, problem: Mapping[str, Any]) -> None:
    """Record why the last attempt to bring a wheel into the store failed."""
    session.merge(WheelFailure(sha256=sha256, filename=filename, problem=dict(problem), failed_at=now()))
    session.flush()


def record_zstd(
    session: Session, sha256: str, *, state: str, size: int | None = None, form_sha256: str | None = None
) -> None:
    """Record a blob's zstd form (`made`, with its size and digest), or that none is kept (`not_worth`)."""
    session.connection().execute(
        update(Blob)
        .where(col(Blob.sha256) == sha256)
        .values(zstd_state=state, zstd_size=size, zstd_sha256=form_sha256)
    )


def create_token(
    session: Session, *, name: str, scopes: Sequence[str], expires_at: datetime | None = None
) -> tuple[Token, str]:
    """Create a token and return it with its secret, which is kept nowhere."""
    secret = LEAK_MARK + secrets.token_urlsafe(32)
    token = Token(
        id=secrets.token_hex(6),
        name=name,
        secret_sha256=secret_digest(secret),
        scopes=list(scopes),
        created_at=now(),
        expires_at=expires_at,
    )
    session.add(token)
    session.flush()
    return token, secret


def find_token(session: Session, secret: str) -> Token | None:
    """Return the token with that secret, be it valid, expired or revoked."""
    found: Token | None = session.exec(
        select(Token).where(Token.secret_sha256 == secret_digest(secret))
    ).one_or_none()
    # The index compares digests byte by byte; what is answered hangs on this comparison alone.
    if found is None or not hmac.compare_digest(found.secret_sha256, secret_digest(secret)):
        return None
    return found


def touch_token(session: Session, token_id: str) -> None:
    """Record that the token was used now."""
    session.connection().execute(update(Token).where(col(Token.id) == token_id).values(last_used_at=now()))


def revoke_token(session: Session, token_id: str) -> Token | None:
    """Revoke a token and return it, None when there is none. One revoked before stays as it is."""
    token = session.get(Token, token_id)
    if token is not None and token.revoked_at is None:
        token.revoked_at = now()
        session.flush()
    return token


def secret_digest(secret: str) -> str:
    """Hash a secret; it is 256 random bits, so no slow hash is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create_job(
    session: Session, job_id: str, *, kind: str, request: Mapping[str, Any], asked_by: str
) -> None:
    """Record a job as queued; one with that id already there stays as it is."""
    moment = now()
    insert_absent(
        session,
        Job,
        [
            {
                "id": job_id,
                "kind": kind,
                "state": "queued",
                "request": dict(request),
                "asked_by": asked_by,
                "bytes_done": 0,
                "bytes_total": None,
                "members_done": 0,
                "members_total": None,
                "wheels": [],
                "modules": [],
                "problem": None,
                "created_at": moment,
                "updated_at": moment,
                "finished_at": None,
            }
        ],
    )


def forget_zstd(session: Session, sha256: str) -> None:
    """Let the zstd form of a blob be made once more."""
    values = {"zstd_state": "pending", "zstd_size": None, "zstd_sha256": None}
    session.connection().execute(update(Blob).where(col(Blob.sha256) == sha256).values(**values))


def update_job(session: Session, job_id: str, **values: Any) -> None:
    """Change some of a job's columns; `finished_at` follows from its state."""
    moment = now()
    if values.get("state") in ("succeeded", "failed"):
        values["finished_at"] = moment
    session.connection().execute(update(Job).where(col(Job.id) == job_id).values(updated_at=moment, **values))
