from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from sqlalchemy import Engine
from sqlmodel import select

from kernel_depot.catalog import leases
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import Lease

HOLDER = """
import sys, time
from kernel_depot.catalog import leases
from kernel_depot.catalog.database import open_database
lease = leases.acquire(open_database(sys.argv[1]), "wheel:x", seconds=600)
print(type(lease).__name__, flush=True)
time.sleep(600)
"""


def rows(engine: Engine) -> list[Lease]:
    with reading(engine) as session:
        return list(session.exec(select(Lease)))


def test_one_of_many_gets_it(engine: Engine) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: leases.acquire(engine, "k", seconds=60), range(16)))
    winners = [lease for lease in found if isinstance(lease, leases.Acquired)]
    assert len(winners) == 1
    assert [row.owner for row in rows(engine)] == [winners[0].owner]


def test_who_is_refused_learns_who_has_it(engine: Engine) -> None:
    leases.acquire(engine, "k", seconds=60)
    other = leases.acquire(engine, "k", seconds=60)
    assert isinstance(other, leases.Held)
    assert "pid" in other.holder


def test_what_is_released_can_be_had(engine: Engine) -> None:
    lease = leases.acquire(engine, "k", seconds=60)
    assert isinstance(lease, leases.Acquired)
    leases.release(engine, lease)
    assert rows(engine) == []
    assert isinstance(leases.acquire(engine, "k", seconds=60), leases.Acquired)


def test_an_expired_lease_is_taken_over_and_its_owner_cannot_renew(engine: Engine) -> None:
    first = leases.acquire(engine, "k", seconds=0.01)
    assert isinstance(first, leases.Acquired)
    time.sleep(0.05)
    second = leases.acquire(engine, "k", seconds=60)
    assert isinstance(second, leases.Acquired)
    assert not leases.renew(engine, first, seconds=60)
    leases.release(engine, first)
    assert [row.owner for row in rows(engine)] == [second.owner]


def test_a_kept_lease_outlives_its_period(engine: Engine) -> None:
    lease = leases.acquire(engine, "k", seconds=0.6)
    assert isinstance(lease, leases.Acquired)
    with leases.kept(engine, lease, seconds=0.6):
        first = rows(engine)[0].expires_at
        time.sleep(1.0)
        assert rows(engine)[0].expires_at > first
        assert isinstance(leases.acquire(engine, "k", seconds=1), leases.Held)
    assert rows(engine) == []


def test_the_lease_of_a_killed_process_is_free_at_once(engine: Engine, database_url: str) -> None:
    command = [sys.executable, "-c", HOLDER, database_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "Acquired\n"
        assert isinstance(leases.acquire(engine, "wheel:x", seconds=60), leases.Held)
        with reading(engine) as session:
            assert leases.is_live(session, "wheel:x")
        child.kill()
        child.wait()
        with reading(engine) as session:
            assert not leases.is_live(session, "wheel:x")
        assert isinstance(leases.acquire(engine, "wheel:x", seconds=60), leases.Acquired)


def test_leases_of_dead_processes_are_removed(engine: Engine, database_url: str) -> None:
    mine = leases.acquire(engine, "mine", seconds=60)
    command = [sys.executable, "-c", HOLDER, database_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert leases.remove_dead(engine) == 0
        child.kill()
    assert leases.remove_dead(engine) == 1
    assert isinstance(mine, leases.Acquired)
    assert [row.owner for row in rows(engine)] == [mine.owner]


def test_a_lease_from_elsewhere_is_honoured_until_it_expires(engine: Engine) -> None:
    lease = leases.acquire(engine, "k", seconds=60)
    assert isinstance(lease, leases.Acquired)
    with writing(engine) as session:
        row = session.exec(select(Lease)).one()
        row.owner = ".".join(["f" * 32, "1", "1", "1", "abc"])
    assert leases.remove_dead(engine) == 0
    assert isinstance(leases.acquire(engine, "k", seconds=60), leases.Held)


def test_a_holder_whom_the_database_does_not_hear_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that hangs, as with a network that swallows packets, does not keep it from being told."""
    answered, told = Event(), Event()

    def hang(*_: object, **__: object) -> bool:
        answered.wait(60)
        return True

    monkeypatch.setattr(leases, "renew", hang)
    lease = leases.acquire(engine, "executor:x", seconds=2.0)
    assert isinstance(lease, leases.Acquired)
    with leases.kept(engine, lease, seconds=2.0, on_lost=told.set, on_silence=True):
        assert told.wait(30)
        assert not answered.is_set()
        answered.set()
