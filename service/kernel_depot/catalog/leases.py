"""Leases: the right to do one thing, held for a short time and renewed while the holder lives.

A lease saves work, it guards nothing: whoever loses one may finish, since bytes are published under their
digest and rows are inserted once.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from threading import Event, Lock, Thread
from typing import Any

from sqlalchemy import Engine, delete, func, or_, update
from sqlalchemy.exc import DBAPIError
from sqlmodel import Session, col, select

from kernel_depot.catalog.database import reading, upsert, writing
from kernel_depot.catalog.tables import Lease
from kernel_depot.liveness import is_dead, process_name


@dataclass(frozen=True, slots=True)
class Held:
    """Someone else has the lease: who, and until when if they do not renew it."""

    holder: str
    until: datetime


@dataclass(frozen=True, slots=True)
class Acquired:
    """The caller has the lease under the name `owner`."""

    key: str
    owner: str


def acquire(engine: Engine, key: str, *, seconds: float) -> Acquired | Held:
    """Take the lease `key` for so many seconds, if nobody has it or whoever had it expired or died."""
    owner = process_name()
    for _ in range(2):
        with writing(engine) as session:
            if _take(session, key, owner, seconds=seconds, replacing=None):
                return Acquired(key, owner)
        with reading(engine) as session:
            current = session.exec(select(Lease).where(Lease.key == key)).one_or_none()
        if current is not None:
            break
    if current is None:  # released between the two looks, twice
        return Held("unknown", datetime.now(timezone.utc))
    if is_dead(current.owner):
        with writing(engine) as session:
            if _take(session, key, owner, seconds=seconds, replacing=current.owner):
                return Acquired(key, owner)
    return Held(current.holder, current.expires_at)


def _take(session: Session, key: str, owner: str, *, seconds: float, replacing: str | None) -> bool:
    """Insert the lease, or take over an expired one or that of the owner `replacing`, in one statement."""
    moment = clock(session)
    values = {
        "owner": owner,
        "holder": f"{socket.gethostname()} pid {os.getpid()}",
        "expires_at": moment + timedelta(seconds=seconds),
    }
    statement: Any = (
        upsert(session, Lease)
        .values(key=key, **values)
        .on_conflict_do_update(
            index_elements=["key"],
            set_=values,
            where=or_(col(Lease.expires_at) < moment, col(Lease.owner) == (replacing or owner)),
        )
        .returning(col(Lease.owner))
    )
    return session.connection().execute(statement).scalar() == owner


def renew(engine: Engine, lease: Acquired, *, seconds: float) -> bool:
    """Hold the lease for so many seconds from now; False when someone else took it."""
    with writing(engine) as session:
        result = session.connection().execute(
            update(Lease)
            .where(col(Lease.key) == lease.key, col(Lease.owner) == lease.owner)
            .values(expires_at=clock(session) + timedelta(seconds=seconds))
        )
        return result.rowcount == 1


def release(engine: Engine, lease: Acquired) -> None:
    """Give the lease back; one that was lost is left to whoever has it."""
    with writing(engine) as session:
        session.connection().execute(
            delete(Lease).where(col(Lease.key) == lease.key, col(Lease.owner) == lease.owner)
        )


@contextmanager
def kept(
    engine: Engine,
    lease: Acquired,
    *,
    seconds: float,
    on_lost: Callable[[], None] | None = None,
    on_silence: bool = False,
) -> Iterator[None]:
    """Renew the lease in a thread three times a period while the block runs, then give it back.

    `on_lost` is called, once and in a thread, when someone else took the lease; with `on_silence` also before
    the lease expires when the database could not be told in time that its holder lives.
    """
    done = Event()
    lost = Lock()
    sure_until = [time.monotonic() + seconds]

    def tell() -> None:
        if on_lost is not None and lost.acquire(blocking=False):
            on_lost()

    def work() -> None:
        while not done.wait(seconds / 3):
            asked = time.monotonic()
            try:
                if not renew(engine, lease, seconds=seconds):
                    tell()
                    return
            except DBAPIError:
                continue  # the database may come back before the lease expires
            sure_until[0] = asked + seconds

    def mind() -> None:
        # Apart from the other thread, whose question to a database that is cut off can hang for minutes.
        while not done.wait(seconds / 20):
            if time.monotonic() > sure_until[0] - seconds / 10:
                tell()
                return

    targets = [work, mind] if on_silence else [work]
    threads = [Thread(target=target, name=f"lease {lease.key}", daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
        release(engine, lease)


def is_live(session: Session, key: str) -> bool:
    """Tell whether someone who may be alive holds the lease.

    A process of this machine that is seen to live is alive, however late it renews.
    """
    lease = session.exec(select(Lease).where(Lease.key == key)).one_or_none()
    if lease is None:
        return False
    dead = is_dead(lease.owner)
    return dead is False or (dead is None and lease.expires_at >= clock(session))


def remove_dead(engine: Engine) -> int:
    """Remove the leases of processes of this machine that are gone; return how many."""
    with reading(engine) as session:
        dead = [lease.owner for lease in session.exec(select(Lease)) if is_dead(lease.owner)]
    if dead:
        with writing(engine) as session:
            session.connection().execute(delete(Lease).where(col(Lease.owner).in_(dead)))
    return len(dead)


def clock(session: Session) -> datetime:
    """Return the database's clock where it is shared by machines, this machine's for SQLite."""
    if session.get_bind().dialect.name == "postgresql":
        moment: datetime = session.exec(select(func.clock_timestamp())).one()
        return moment
    return datetime.now(timezone.utc)
