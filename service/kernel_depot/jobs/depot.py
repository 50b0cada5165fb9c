"""The depot: one catalog, one store, and the directory of downloads under way."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine

from kernel_depot.catalog import leases, record
from kernel_depot.catalog.database import check_schema, open_database, upgrade, writing
from kernel_depot.jobs import uploads
from kernel_depot.settings import Settings
from kernel_depot.store.blobs import Store
from kernel_depot.store.location import open_store

_ABANDONED = 7 * 86400.0  # seconds after which a partial download nobody came back for is removed
_WRITTEN_BACK = 60.0  # seconds after which the kernel has most likely written a batch by itself


@dataclass(frozen=True)
class Depot:
    """What every job and every request works on."""

    engine: Engine
    store: Store
    settings: Settings
    incoming: Path

    def close(self) -> None:
        """Give the database connections back."""
        self.engine.dispose()


def open_depot(settings: Settings, *, store: Store | None = None) -> Depot:
    """Open the depot the settings name, and clean what dead processes left in it.

    An embedded catalog is made or upgraded here; one named by a URL must have the schema this program
    knows. Raise CatalogError and StoreError.
    """
    engine = open_database(settings.catalog_url)
    if settings.database_url is None:
        upgrade(engine)
    else:
        check_schema(engine)
    depot = Depot(
        engine=engine,
        store=store or open_settings_store(settings),
        settings=settings,
        incoming=settings.data_dir.absolute() / "incoming",
    )
    depot.incoming.mkdir(parents=True, exist_ok=True)
    leases.remove_dead(engine)
    recovery = depot.store.recover()
    if recovery.dropped_forms:
        with writing(engine) as session:
            for sha256 in recovery.dropped_forms:
                record.record_zstd(session, sha256, state="pending")
    depot.store.settle(older_than=_WRITTEN_BACK)
    uploads.remove_abandoned(engine, depot.store)
    for path in depot.incoming.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()
    return depot


def open_settings_store(settings: Settings) -> Store:
    """Open the store the settings name."""
    return open_store(settings.store_location, staging_dir=settings.data_dir.absolute() / "outgoing")
