from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text
from sqlmodel import SQLModel, select

from kernel_depot.catalog import database, record
from kernel_depot.catalog.database import (
    SCHEMA_HEAD,
    check_schema,
    open_database,
    reading,
    schema_revision,
    upgrade,
    writing,
)
from kernel_depot.catalog.errors import DatabaseUnreachable, DatabaseUrlInvalid, SchemaBehind, SchemaUnknown
from kernel_depot.catalog.tables import PinRow, Token


def test_a_new_database_is_behind_and_upgrading_makes_it_current(database_url: str) -> None:
    engine = open_database(database_url)
    assert schema_revision(engine) is None
    with pytest.raises(SchemaBehind, match="db upgrade"):
        check_schema(engine)
    upgrade(engine)
    check_schema(engine)
    upgrade(engine)
    assert schema_revision(engine) == SCHEMA_HEAD
    engine.dispose()


def test_a_later_schema_is_refused_and_left_alone(engine: Engine) -> None:
    with writing(engine) as session:
        session.connection().execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaUnknown):
        check_schema(engine)
    with pytest.raises(SchemaUnknown):
        upgrade(engine)
    assert schema_revision(engine) == "9999"


def test_the_tables_are_what_the_migrations_make(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, SQLModel.metadata) == []


def test_the_known_head_is_the_newest_migration() -> None:
    assert ScriptDirectory.from_config(database._alembic()).get_heads() == [SCHEMA_HEAD]


def shape(engine: Engine) -> dict[str, Any]:
    found = inspect(engine)
    return {
        table: {
            "columns": {
                column["name"]: (str(column["type"]), column["nullable"], column["default"])
                for column in found.get_columns(table)
            },
            "key": found.get_pk_constraint(table)["constrained_columns"],
            "foreign": sorted(
                (key["constrained_columns"], key["referred_table"], key["referred_columns"])
                for key in found.get_foreign_keys(table)
            ),
            "indexes": sorted(
                (str(index["name"]), index["column_names"], bool(index["unique"]))
                for index in found.get_indexes(table)
            ),
            "unique": sorted(
                constraint["column_names"] for constraint in found.get_unique_constraints(table)
            ),
        }
        for table in found.get_table_names()
    }


def test_the_quick_way_to_a_new_embedded_catalog_equals_the_migrations(tmp_path: Path) -> None:
    quick = open_database(f"sqlite:///{tmp_path}/quick.sqlite")
    upgrade(quick)
    migrated = open_database(f"sqlite:///{tmp_path}/migrated.sqlite")
    with migrated.begin() as connection:
        database._migrate(connection)
    assert shape(quick) == shape(migrated)
    assert schema_revision(quick) == schema_revision(migrated) == SCHEMA_HEAD
    quick.dispose()
    migrated.dispose()


def test_many_upgrade_at_once(database_url: str) -> None:
    def one(_: int) -> str | None:
        engine = open_database(database_url)
        upgrade(engine)
        revision = schema_revision(engine)
        engine.dispose()
        return revision

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(6))) == [SCHEMA_HEAD] * 6


def test_foreign_keys_hold(engine: Engine) -> None:
    from sqlalchemy.exc import IntegrityError

    row = PinRow(
        revision="0" * 64,
        project="p",
        version="1",
        filename="f",
        sha256="0" * 64,
        cuda="cu130",
        arch="x86_64",
    )
    with pytest.raises(IntegrityError), writing(engine) as session:
        session.add(row)


def test_what_raises_is_rolled_back(engine: Engine) -> None:
    class Oops(Exception):
        pass

    with pytest.raises(Oops), writing(engine) as session:
        record.create_token(session, name="x", scopes=["read"])
        raise Oops
    with reading(engine) as session:
        assert session.exec(select(Token)).all() == []


def test_writers_wait_for_each_other(engine: Engine) -> None:
    with writing(engine) as session:
        token, _ = record.create_token(session, name="counter", scopes=[])

    def add(_: int) -> None:
        with writing(engine) as session:
            kept = session.get(Token, token.id, with_for_update=True)
            assert kept is not None
            kept.scopes = [*kept.scopes, "x"]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    with reading(engine) as session:
        kept = session.get(Token, token.id)
        assert kept is not None
        assert len(kept.scopes) == 40


def test_moments_keep_their_zone(engine: Engine) -> None:
    before = record.now()
    with writing(engine) as session:
        token, _ = record.create_token(session, name="x", scopes=["read"])
    with reading(engine) as session:
        kept = session.get(Token, token.id)
        assert kept is not None
        assert before <= kept.created_at <= record.now()
        assert kept.expires_at is None


@pytest.mark.parametrize("url", ["mysql://host/x", "nonsense", "sqlite://", "postgresql+asyncpg://h/x"])
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(DatabaseUrlInvalid):
        open_database(url)


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    engine = open_database("postgresql://user:hidden@127.0.0.1:9/depot")
    with pytest.raises(DatabaseUnreachable) as caught:
        schema_revision(engine)
    assert "hidden" not in str(caught.value)
    engine.dispose()
