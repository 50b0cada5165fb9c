"""The life of a revision: proposed, materialized, canary, active, retired, or failed.

Its state is derived from what is recorded, so nothing can disagree: the name's current revision is active,
one with a canary's row is a canary, one that failed as a canary has its failure, one that was current before
is in the audit log, and one whose wheels are all in the store is materialized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from sqlalchemy import delete
from sqlmodel import Session, col, select

from kernel_depot.catalog import changes, queries, record
from kernel_depot.catalog.bundles import PinSetUnknown, RevisionUnknown
from kernel_depot.catalog.queries import RevisionFacts
from kernel_depot.catalog.tables import AuditEntry, Canary, RevisionFailure
from kernel_depot.fleet.errors import CanaryImpossible, RevisionMoved, RevisionNotReady, RollbackImpossible

_MADE_CURRENT: Final = ("activated", "promoted", "rolled-back")


class Life(str, Enum):
    """Where a revision stands."""

    PROPOSED = "proposed"
    MATERIALIZED = "materialized"
    CANARY = "canary"
    ACTIVE = "active"
    RETIRED = "retired"
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class CanaryOrder:
    """Which nodes get a revision first, and how many of them must be ready before all get it."""

    label: str
    value: str
    require: int


def lives(session: Session, name: str, rows: Sequence[RevisionFacts]) -> dict[str, Life]:
    """Return the state of revisions of one pin set; three queries however many."""
    canary = session.get(Canary, name)
    failed = set(
        session.exec(
            select(RevisionFailure.revision).where(
                col(RevisionFailure.revision).in_([row.revision for row in rows])
            )
        )
    )
    were_current = set(
        session.exec(
            select(AuditEntry.after)
            .where(AuditEntry.subject == name, col(AuditEntry.action).in_(_MADE_CURRENT))
            .distinct()
        )
    )

    def life(row: RevisionFacts) -> Life:
        if row.current:
            return Life.ACTIVE
        if canary is not None and canary.revision == row.revision:
            return Life.CANARY
        if row.revision in failed:
            return Life.FAILED
        if row.revision in were_current:
            return Life.RETIRED
        return Life.MATERIALIZED if row.materialized else Life.PROPOSED

    return {row.revision: life(row) for row in rows}


def failure(session: Session, revision: str) -> dict[str, Any] | None:
    """Return why a revision was given up, None when it was not."""
    row = session.get(RevisionFailure, revision)
    return row.problem if row is not None else None


def activate(
    session: Session, name: str, revision: str, *, who: str, why: str | None, expected: str | None = None
) -> bool:
    """Let a pin set's name mean a materialized revision. Return whether that changed anything.

    Raise RevisionUnknown, RevisionNotReady, and RevisionMoved unless the name means `expected`, when given.
    """
    _materialized(session, name, revision)
    _unmoved(session, name, expected)
    return record.make_current(session, name, revision, who=who, why=why)


def rollback(
    session: Session, name: str, *, who: str, why: str | None, expected: str | None = None
) -> tuple[str, str]:
    """Let the name mean what it meant before; return the revision it leaves and the one it goes back to.

    A canary under way is ended. Raise PinSetUnknown, RevisionMoved, RollbackImpossible, RevisionNotReady.
    """
    now = queries.pin_set(session, name)
    if now is None:
        raise PinSetUnknown(f"this depot has no pin set {name!r}", where="pins", found=name)
    _unmoved(session, name, expected)
    came = session.exec(
        select(AuditEntry)
        .where(
            AuditEntry.subject == name,
            col(AuditEntry.action).in_(_MADE_CURRENT),
            AuditEntry.after == now.digest,
        )
        .order_by(col(AuditEntry.id).desc())
        .limit(1)
    ).first()
    before = came.before if came is not None else None
    if before is None:
        raise RollbackImpossible(
            f"the pin set {name!r} has meant no other revision before this one",
            where=f"pins/{name}",
            found=now.digest,
            remedy=f"activate one of GET /v1/pins/{name}/revisions",
        )
    _materialized(session, name, before)
    end_canary(session, name, who=who, why=why or "the pin set was rolled back", missing_ok=True)
    record.make_current(session, name, before, who=who, why=why, action="rolled-back")
    return now.digest, before


def begin_canary(
    session: Session,
    name: str,
    revision: str,
    order: CanaryOrder,
    *,
    who: str,
    why: str | None,
    expected: str | None = None,
) -> None:
    """Give a materialized revision to the nodes with a label. Another canary of the set ends by that.

    Raise RevisionUnknown, RevisionNotReady, RevisionMoved, and CanaryImpossible for the current revision, or
    for a set that has none: there is nothing to go back to.
    """
    _materialized(session, name, revision)
    _unmoved(session, name, expected)
    now = queries.pin_set(session, name)
    if now is None or now.digest == revision:
        what = "it has no current revision yet" if now is None else "that revision is the current one"
        raise CanaryImpossible(
            f"no canary of {name!r} can be begun: {what}",
            where=f"pins/{name}",
            found=revision,
            remedy="activate it without a canary" if now is None else "propose another revision",
        )
    session.connection().execute(delete(Canary).where(col(Canary.name) == name))
    session.connection().execute(delete(RevisionFailure).where(col(RevisionFailure.revision) == revision))
    session.add(
        Canary(
            name=name,
            revision=revision,
            label=order.label,
            value=order.value,
            require=order.require,
            begun_by=who,
            begun_at=record.now(),
        )
    )
    changes.audit(
        session,
        who=who,
        action="canary-begun",
        subject=name,
        before=now.digest,
        after=revision,
        why=why,
        facts={"label": order.label, "value": order.value, "require": order.require},
    )
    changes.touch_fleet(session)


def end_canary(
    session: Session,
    name: str,
    *,
    who: str,
    why: str | None,
    problem: Mapping[str, Any] | None = None,
    missing_ok: bool = False,
) -> None:
    """End a canary without a promotion; with `problem` its revision is failed. Raise CanaryImpossible."""
    canary = session.get(Canary, name)
    if canary is None:
        if missing_ok:
            return
        raise CanaryImpossible(
            f"the pin set {name!r} has no canary under way", where=f"pins/{name}", found=name
        )
    if problem is not None:
        session.merge(
            RevisionFailure(revision=canary.revision, problem=dict(problem), failed_at=record.now())
        )
    action = "canary-failed" if problem is not None else "canary-ended"
    changes.audit(session, who=who, action=action, subject=name, before=canary.revision, why=why)
    session.delete(canary)
    session.flush()
    changes.touch_fleet(session)


def promote(session: Session, canary: Canary, *, why: str) -> bool:
    """Let a canary's revision become the current one; False when it is no longer the canary."""
    there = session.get(Canary, canary.name)
    if there is None or there.revision != canary.revision:
        return False
    return record.make_current(
        session, canary.name, canary.revision, who=canary.begun_by, why=why, action="promoted"
    )


def _materialized(session: Session, name: str, revision: str) -> None:
    row = queries.revision(session, name, revision)
    if row is None:
        raise RevisionUnknown(
            f"the pin set {name!r} has no revision {revision}",
            where=f"pins/{name}",
            found=revision,
            remedy=f"see GET /v1/pins/{name}/revisions",
        )
    if not row.materialized:
        raise RevisionNotReady(
            "wheels of the revision are not in the store",
            where=f"pins/{name}, revision {revision}",
            remedy='bring them in first: POST /v1/materialize with {"revisions": ["…"]}',
        )


def _unmoved(session: Session, name: str, expected: str | None) -> None:
    if expected is None:
        return
    now = queries.pin_set(session, name)
    if now is None or now.digest != expected:
        raise RevisionMoved(
            f"the pin set {name!r} means another revision by now",
            where=f"pins/{name}",
            expected=expected,
            found=now.digest if now is not None else None,
            remedy="look at the change, and make yours on top of it",
        )
