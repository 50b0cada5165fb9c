"""The audit log is only ever added to, and the fleet's version only grows."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, delete, update
from sqlalchemy.exc import DBAPIError

from kernel_depot.catalog import changes
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import AuditEntry


def test_no_entry_can_be_changed_or_removed(engine: Engine) -> None:
    with writing(engine) as session:
        changes.audit(session, who="ada", action="activated", subject="kernels", after="a" * 64, why="first")
    for statement in (update(AuditEntry).values(who="eve"), delete(AuditEntry)):
        with pytest.raises(DBAPIError, match="append-only"), writing(engine) as session:
            session.connection().execute(statement)
    with reading(engine) as session:
        (entry,) = changes.audit_page(session)
        assert (entry.who, entry.why) == ("ada", "first")


def test_pages_hold_every_entry_once(engine: Engine) -> None:
    with writing(engine) as session:
        for number in range(7):
            changes.audit(session, who="ada", action="x", subject="ab"[number % 2], facts={"n": number})
    seen, before = [], None
    with reading(engine) as session:
        while page := changes.audit_page(session, before=before, limit=3):
            seen += [entry.facts["n"] for entry in page]
            before = page[-1].id
        assert [entry.facts["n"] for entry in changes.audit_page(session, subject="b")] == [5, 3, 1]
    assert seen == [6, 5, 4, 3, 2, 1, 0]


def test_the_fleets_version_grows_with_each_change(engine: Engine) -> None:
    with reading(engine) as session:
        assert changes.fleet_version(session) == 0
    for number in (1, 2):
        with writing(engine) as session:
            changes.touch_fleet(session)
        with reading(engine) as session:
            assert changes.fleet_version(session) == number
