"""Who changed what, when and why; and one number that grows whenever nodes may have to do something."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Final

from sqlalchemy import update
from sqlmodel import Session, col, select

from kernel_depot.catalog.database import upsert
from kernel_depot.catalog.tables import AuditEntry, FleetVersion

_ROW: Final = 1


def audit(
    session: Session,
    *,
    who: str,
    action: str,
    subject: str,
    before: str | None = None,
    after: str | None = None,
    why: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Add an entry to the audit log, within the transaction that makes the change."""
    session.add(
        AuditEntry(
            at=datetime.now(timezone.utc),
            who=who,
            action=action,
            subject=subject,
            before=before,
            after=after,
            why=why,
            facts=dict(facts or {}),
        )
    )
    session.flush()


def audit_page(
    session: Session,
    *,
    subject: str | None = None,
    action: str | None = None,
    before: int | None = None,
    limit: int = 100,
) -> list[AuditEntry]:
    """Return entries, the newest first; `before` is the id of the last one of the page before."""
    query = select(AuditEntry)
    if subject is not None:
        query = query.where(AuditEntry.subject == subject)
    if action is not None:
        query = query.where(AuditEntry.action == action)
    if before is not None:
        query = query.where(col(AuditEntry.id) < before)
    return list(session.exec(query.order_by(col(AuditEntry.id).desc()).limit(limit)))


def touch_fleet(session: Session) -> None:
    """Say that what nodes are to have may have changed."""
    statement = update(FleetVersion).where(col(FleetVersion.id) == _ROW)
    done = session.connection().execute(statement.values(number=FleetVersion.number + 1))
    if done.rowcount == 0:
        first = upsert(session, FleetVersion).values(id=_ROW, number=1)
        again = {"number": FleetVersion.number + 1}
        session.connection().execute(first.on_conflict_do_update(index_elements=["id"], set_=again))


def fleet_version(session: Session) -> int:
    """Return the number; 0 before the first change."""
    return session.exec(select(FleetVersion.number).where(FleetVersion.id == _ROW)).first() or 0
