"""Alembic's entry: runs on the connection `kernel-depot db upgrade` hands over, or opens its own.

`alembic check` and `alembic revision --autogenerate` open the database that KERNEL_DEPOT_DATABASE_URL
names, else a fresh in-memory one brought to the newest revision.
"""

from __future__ import annotations

from alembic import context
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine
from sqlmodel import SQLModel

import kernel_depot.catalog.tables  # noqa: F401
from kernel_depot.catalog.database import open_database
from kernel_depot.settings import load_settings


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=SQLModel.metadata,
        compare_type=True,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


def run_offline() -> None:
    url = load_settings().database_url or "sqlite://"
    context.configure(url=url, target_metadata=SQLModel.metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


def migrate_fresh(connection: Connection) -> None:
    """Run every migration on a new database, so that it can be compared with the tables."""
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    scripts = ScriptDirectory.from_config(context.config)
    fresh = MigrationContext.configure(
        connection, opts={"fn": lambda revision, _: scripts._upgrade_revs("head", revision)}
    )
    with Operations.context(fresh), fresh.begin_transaction():
        fresh.run_migrations()


connection = context.config.attributes.get("connection")
if context.is_offline_mode():
    run_offline()
elif connection is not None:
    run(connection)
elif (url := load_settings().database_url) is not None:
    with open_database(url).connect() as opened:
        run(opened)
        opened.commit()
else:
    with create_engine("sqlite://").connect() as memory:
        migrate_fresh(memory)
        run(memory)
