"""What the catalog is asked. Every function only reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import String, cast, func, or_, tuple_
from sqlmodel import Session, col, select

import kernel_depot.pins.pin as pins
from kernel_depot.catalog.tables import (
    Blob,
    BundleRow,
    Inspection,
    Job,
    Member,
    PinRow,
    PinSet,
    PinSetRevision,
    Token,
    Wheel,
    WheelFailure,
)
from kernel_depot.pins.groups import ModuleGroup
from kernel_depot.platform import Arch, CudaTag, Sm

_CHUNK = 5000  # parameters a statement; SQLite takes 32,766, PostgreSQL 65,535


@dataclass(frozen=True, slots=True)
class PinSetFacts:
    """A pin set and the revision its name means now."""

    name: str
    revision: str
    origin: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class RevisionFacts:
    """A revision of a pin set; `materialized` tells whether every wheel of it was brought in."""

    revision: str
    origin: str
    created_at: datetime
    current: bool
    materialized: bool


@dataclass(frozen=True, slots=True)
class ArtifactFacts:
    """One artifact of one ingested wheel, with what inspection found in it."""

    wheel: str
    path: str
    kind: str
    module: str | None
    sha256: str
    size: int
    project: str
    version: str
    filename: str
    arch: str | None
    inspection: Inspection | None


@dataclass(frozen=True, slots=True)
class ArtifactPage:
    """Some artifacts, and where the next page starts; `after` None: this was the last."""

    items: tuple[ArtifactFacts, ...]
    after: str | None


def pin_sets(session: Session) -> list[PinSetFacts]:
    """List the pin sets by name."""
    rows = session.exec(
        select(PinSet, PinSetRevision)
        .join(PinSetRevision, col(PinSet.revision) == col(PinSetRevision.digest))
        .order_by(col(PinSet.name))
    )
    return [PinSetFacts(row.name, row.revision, rev.origin, rev.created_at) for row, rev in rows]


def pin_set(session: Session, name: str) -> pins.PinSet | None:
    """Return the revision a name means now, None when the name is not known."""
    named = session.get(PinSet, name)
    return pin_set_revision(session, named.revision) if named is not None else None


def pin_set_revision(session: Session, digest: str) -> pins.PinSet | None:
    """Return one revision, None when it is not known."""
    revision = session.get(PinSetRevision, digest)
    if revision is None:
        return None
    rows = session.exec(select(PinRow).where(PinRow.revision == digest).order_by(col(PinRow.id)))
    return pins.PinSet(
        name=revision.name,
        pins=tuple(_pin(row) for row in rows),
        text=revision.text,
        origin=revision.origin,
        groups=tuple(ModuleGroup.from_json(group) for group in revision.groups),
    )


def revisions(session: Session, name: str, *, limit: int = 100) -> list[RevisionFacts]:
    """Return what was recorded under a pin set's name, the newest first."""
    query = (
        select(PinSetRevision)
        .where(PinSetRevision.name == name)
        .order_by(col(PinSetRevision.created_at).desc(), col(PinSetRevision.digest))
    )
    return _revision_facts(session, name, list(session.exec(query.limit(limit))))


def revision(session: Session, name: str, digest: str) -> RevisionFacts | None:
    """Return one revision of a pin set, None when the set has no such revision."""
    row = session.get(PinSetRevision, digest)
    if row is None or row.name != name:
        return None
    return _revision_facts(session, name, [row])[0]


def _revision_facts(session: Session, name: str, rows: Sequence[PinSetRevision]) -> list[RevisionFacts]:
    named = session.get(PinSet, name)
    lacking = select(PinRow.revision).where(
        col(PinRow.revision).in_([row.digest for row in rows]),
        col(PinRow.sha256).not_in(select(Wheel.sha256)),
    )
    absent = set(session.exec(lacking.distinct()))
    return [
        RevisionFacts(
            revision=row.digest,
            origin=row.origin,
            created_at=row.created_at,
            current=named is not None and named.revision == row.digest,
            materialized=row.digest not in absent,
        )
        for row in rows
    ]


def current_pin_sets(session: Session, names: Sequence[str] | None = None) -> list[pins.PinSet]:
    """Return the revisions that all names, or those given, mean now; two queries however many."""
    query = select(PinSetRevision).join(PinSet, col(PinSet.revision) == col(PinSetRevision.digest))
    if names is not None:
        query = query.where(col(PinSet.name).in_(names))
    revisions = session.exec(query.order_by(col(PinSetRevision.name))).all()
    rows = session.exec(
        select(PinRow)
        .where(col(PinRow.revision).in_([revision.digest for revision in revisions]))
        .order_by(col(PinRow.id))
    ).all()
    by_revision: dict[str, list[pins.Pin]] = {}
    for row in rows:
        by_revision.setdefault(row.revision, []).append(_pin(row))
    return [
        pins.PinSet(
            name=revision.name,
            pins=tuple(by_revision.get(revision.digest, ())),
            text=revision.text,
            origin=revision.origin,
            groups=tuple(ModuleGroup.from_json(group) for group in revision.groups),
        )
        for revision in revisions
    ]


def _pin(row: PinRow) -> pins.Pin:
    origin: pins.Origin = pins.StoreOrigin()
    if row.url is not None:
        origin = pins.UrlOrigin(row.url)
    elif row.index_name is not None:
        origin = pins.IndexOrigin(row.index_name)
    return pins.Pin(
        project=row.project,
        version=row.version,
        filename=row.filename,
        sha256=row.sha256,
        cuda=CudaTag.parse(row.cuda),
        arch=Arch.parse(row.arch),
        sm=Sm.parse(row.sm) if row.sm is not None else None,
        origin=origin,
        size=row.size,
        record_sha256=row.record_sha256,
    )


def wheels(session: Session, sha256s: Iterable[str] | None = None) -> list[Wheel]:
    """Return the ingested wheels, or those of them with the given digests."""
    query = select(Wheel)
    if sha256s is not None:
        query = query.where(col(Wheel.sha256).in_(list(sha256s)))
    return list(session.exec(query.order_by(col(Wheel.filename), col(Wheel.sha256))))


def failures(session: Session, sha256s: Iterable[str]) -> list[WheelFailure]:
    """Return why the wheels with the given digests could not be ingested, for those that failed last."""
    return list(session.exec(select(WheelFailure).where(col(WheelFailure.sha256).in_(list(sha256s)))))


def blobs_beginning(session: Session, prefix: str) -> list[Blob]:
    """Return the blobs whose digests begin so."""
    query = select(Blob).where(col(Blob.sha256) >= prefix, col(Blob.sha256) < f"{prefix}g")
    return list(session.exec(query.order_by(col(Blob.sha256))))


def pins_holding(session: Session, sha256: str) -> list[pins.Pin]:
    """Return a pin of each wheel that is these bytes, or has them as an artifact."""
    holding = select(Member.wheel).where(Member.sha256 == sha256, col(Member.kind).is_not(None))
    query = select(PinRow).where(or_(col(PinRow.sha256) == sha256, col(PinRow.sha256).in_(holding)))
    found: dict[str, pins.Pin] = {}
    for row in session.exec(query.order_by(col(PinRow.id).desc())):
        found.setdefault(row.sha256, _pin(row))
    return list(found.values())


def wheel_blobs(session: Session, sha256: str) -> dict[str, int]:
    """Return the digests and sizes of a wheel's distinct artifacts."""
    rows = session.exec(
        select(Member.sha256, Member.size).where(Member.wheel == sha256, col(Member.kind).is_not(None))
    )
    return dict(rows.all())


def artifacts(
    session: Session,
    *,
    project: str | None = None,
    module: str | None = None,
    cuda: CudaTag | None = None,
    arch: Arch | None = None,
    sm: Sm | None = None,
    kind: str | None = None,
    after: str | None = None,
    limit: int = 100,
) -> ArtifactPage:
    """Return a page of artifacts in the order of wheel digest and path.

    `cuda` and `sm` select by the pins that name the wheel, `sm` also by the code found in the file.
    `after` is what the previous page said.
    """
    query = (
        select(Member, Wheel, Inspection)
        .join(Wheel, col(Member.wheel) == col(Wheel.sha256))
        .outerjoin(Inspection, col(Member.sha256) == col(Inspection.sha256))
        .where(col(Member.kind).is_not(None))
    )
    if project is not None:
        query = query.where(Wheel.project == pins.project_word(project))
    if module is not None:
        query = query.where(Member.module == module)
    if kind is not None:
        query = query.where(Member.kind == kind)
    if arch is not None:
        query = query.where(or_(col(Wheel.arch).is_(None), col(Wheel.arch) == str(arch)))
    if cuda is not None:
        query = query.where(col(Wheel.sha256).in_(select(PinRow.sha256).where(PinRow.cuda == str(cuda))))
    if sm is not None:
        # JSON arrays are compared as text: the element is quoted, so `sm_90` is not found in `sm_90a`.
        listed = cast(col(Inspection.sms), String)
        query = query.where(listed.contains(f'"{sm.target}"', autoescape=True))
    if after is not None:
        wheel, _, path = after.partition("/")
        query = query.where(tuple_(col(Member.wheel), col(Member.path)) > (wheel, path))
    rows = session.exec(query.order_by(col(Member.wheel), col(Member.path)).limit(limit + 1)).all()
    items = tuple(_artifact(*row) for row in rows[:limit])
    more = len(rows) > limit
    return ArtifactPage(items, f"{items[-1].wheel}/{items[-1].path}" if more else None)


def _artifact(member: Member, wheel: Wheel, inspection: Inspection | None) -> ArtifactFacts:
    return ArtifactFacts(
        wheel=member.wheel,
        path=member.path,
        kind=member.kind or "",
        module=member.module,
        sha256=member.sha256,
        size=member.size,
        project=wheel.project,
        version=wheel.version,
        filename=wheel.filename,
        arch=wheel.arch,
        inspection=inspection,
    )


def module_names(session: Session, *, wheels: Iterable[str] | None = None) -> list[str]:
    """Return the kernel modules' URIs there are, or those of the given wheels."""
    query = select(Member.module).where(Member.kind == "module").distinct()
    if wheels is not None:
        query = query.where(col(Member.wheel).in_(list(wheels)))
    return sorted(name for name in session.exec(query) if name is not None)


def blob(session: Session, sha256: str) -> Blob | None:
    """Return one blob's row."""
    return session.get(Blob, sha256)


def blobs(session: Session, sha256s: Sequence[str]) -> list[Blob]:
    """Return the rows of those blobs that are known, in no order."""
    found: list[Blob] = []
    for start in range(0, len(sha256s), _CHUNK):
        found += session.exec(select(Blob).where(col(Blob.sha256).in_(sha256s[start : start + _CHUNK])))
    return found


def pending_zstd(session: Session, *, limit: int) -> list[Blob]:
    """Return blobs whose zstd form was not tried yet, large ones first: they save most."""
    return list(
        session.exec(
            select(Blob).where(Blob.zstd_state == "pending").order_by(col(Blob.size).desc()).limit(limit)
        )
    )


def bundle_manifest(session: Session, digest: str) -> bytes | None:
    """Return a bundle's canonical bytes, None when it is not known."""
    manifest = session.exec(select(BundleRow.manifest).where(BundleRow.digest == digest)).one_or_none()
    return manifest.encode() if manifest is not None else None


def tokens(session: Session) -> list[Token]:
    """Return all tokens, oldest first."""
    return list(session.exec(select(Token).order_by(col(Token.created_at))))


def job(session: Session, job_id: str) -> Job | None:
    """Return one job."""
    return session.get(Job, job_id)


def jobs(session: Session, *, limit: int = 100) -> list[Job]:
    """Return the latest jobs, newest first."""
    return list(session.exec(select(Job).order_by(col(Job.created_at).desc()).limit(limit)))


def queued_jobs(session: Session, *, kinds: Sequence[str], before: datetime) -> list[Job]:
    """Return the jobs of some kinds that were handed in before a moment and that nobody has begun."""
    query = select(Job).where(col(Job.kind).in_(kinds), Job.state == "queued", col(Job.created_at) < before)
    return list(session.exec(query.order_by(col(Job.created_at))))


def job_counts(session: Session) -> dict[str, int]:
    """Return how many jobs there are in each state."""
    counts: Any = session.exec(select(Job.state, func.count()).group_by(col(Job.state)))
    return dict(counts.all())


def totals(session: Session) -> dict[str, int]:
    """Return how many wheels and blobs there are, and the blobs' bytes."""
    count, size = session.exec(
        select(func.count(), func.coalesce(func.sum(Blob.size), 0)).select_from(Blob)
    ).one()
    wheel_count = session.exec(select(func.count()).select_from(Wheel)).one()
    return {"wheels": wheel_count, "blobs": count, "blob_bytes": int(size)}
