"""The catalog's database: opening it, its schema's revision, and transactions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Pool, create_engine, event, inspect, make_url, text
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlmodel import Session, SQLModel

import kernel_depot.catalog.tables  # noqa: F401  the tables register themselves in the metadata
from kernel_depot.catalog.errors import (
    DatabaseUnreachable,
    DatabaseUrlInvalid,
    SchemaBehind,
    SchemaUnknown,
)
from kernel_depot.shipped import shipped_dir

SCHEMA_HEAD = "0005"  # the newest revision in migrations/; known here so that a check needs no Alembic
_LOCK = 0x6B64_7570  # the advisory lock that upgrades of one PostgreSQL database take
_BUSY_SECONDS = 60
_lines: WeakKeyDictionary[Pool, Lock] = WeakKeyDictionary()


def open_database(url: str) -> Engine:
    """Return an engine for `sqlite:///path` or `postgresql://...` (psycopg 3). Nothing is read yet.

    SQLite is used in WAL with foreign keys on; its directory is made. Raise DatabaseUrlInvalid.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise DatabaseUrlInvalid(
            "the database URL cannot be read", expected="sqlite:///path or postgresql://host/name"
        ) from error
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            pool_pre_ping=True,
            pool_size=10,
            json_serializer=_json,
        )
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite") or not parsed.database:
        raise DatabaseUrlInvalid(
            "the database is of a kind that is not supported",
            expected="sqlite:///path or postgresql://host/name",
            found=parsed.render_as_string(hide_password=True),
        )
    Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(
        parsed,
        connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False},
        pool_size=40,  # a connection costs more to open than to keep; a server has as many threads
        json_serializer=_json,
    )
    _lines[engine.pool] = Lock()
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _json(value: object) -> str:
    """Serialize a JSON column; most inspections of a cubin wheel are lists of nothing."""
    return "[]" if value == [] else json.dumps(value)


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_SECONDS * 1000}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    """Begin; a writer takes the lock now, since a reader that turns writer cannot wait for it."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """Give a session on one consistent view of the catalog."""
    with Session(engine) as session:
        yield session


@contextmanager
def writing(engine: Engine) -> Iterator[Session]:
    """Give a session that may write; commits when the block ends, rolls back when it raises."""
    with _turn(engine), Session(engine.execution_options(writes=True), expire_on_commit=False) as session:
        yield session
        session.commit()


@contextmanager
def _turn(engine: Engine) -> Iterator[None]:
    """Let this process's writers to SQLite wait in line: SQLite itself has them sleep and try again."""
    line = _lines.get(engine.pool)
    taken = line.acquire(timeout=_BUSY_SECONDS) if line is not None else False
    try:
        yield
    finally:
        if line is not None and taken:
            line.release()


def schema_revision(engine: Engine) -> str | None:
    """Return the database's schema revision, None when no schema was made. Raise DatabaseUnreachable."""
    try:
        with engine.connect() as connection:
            return _revision(connection)
    except DBAPIError as error:
        raise DatabaseUnreachable(
            "the database does not answer",
            where=engine.url.render_as_string(hide_password=True),
            found=str(error.orig).splitlines()[0],
        ) from error


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def check_schema(engine: Engine) -> None:
    """Raise SchemaBehind or SchemaUnknown unless the schema is exactly the one this program knows."""
    revision = schema_revision(engine)
    if revision == SCHEMA_HEAD:
        return
    where = engine.url.render_as_string(hide_password=True)
    if revision is None or revision in _older_revisions():
        raise SchemaBehind(
            "the catalog's schema is older than this program's",
            where=where,
            expected=SCHEMA_HEAD,
            found=revision or "no schema",
            remedy="run: kernel-depot db upgrade",
        )
    raise SchemaUnknown(
        "the catalog's schema is not known to this program",
        where=where,
        expected=SCHEMA_HEAD,
        found=revision,
        remedy="upgrade kernel-depot, or use another database",
    )


def upgrade(engine: Engine) -> None:
    """Bring the schema to this program's revision; safe when several processes do it at once."""
    revision = schema_revision(engine)
    if revision == SCHEMA_HEAD:
        return
    if revision is not None and revision not in _older_revisions():
        check_schema(engine)
    with engine.execution_options(writes=True).connect() as connection, connection.begin():
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        revision = _revision(connection)
        if revision == SCHEMA_HEAD:
            return
        empty = revision is None and not inspect(connection).get_table_names()
        if empty and connection.dialect.name == "sqlite":
            _create(connection)
        else:
            _migrate(connection)


def _create(connection: Connection) -> None:
    """Make the tables of a new embedded catalog without Alembic, whose import takes a second.

    A test holds the result equal to what the migrations make.
    """
    SQLModel.metadata.create_all(connection)
    connection.execute(
        text(
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
            "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
        )
    )
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": SCHEMA_HEAD})


def _migrate(connection: Connection) -> None:
    from alembic import command

    config = _alembic()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _older_revisions() -> set[str]:
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory.from_config(_alembic()).walk_revisions()}
    return known - {SCHEMA_HEAD}


def _alembic() -> Any:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(shipped_dir("migrations")).replace("%", "%%"))
    return config


def upsert(session: Session, table: type[SQLModel]) -> Any:
    """Return an INSERT that can say ON CONFLICT, of the session's database."""
    if session.get_bind().dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    return sqlite.insert(table)
