"""`kernel-depot db`: the catalog's schema."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_depot.cli.render import print_json

if TYPE_CHECKING:
    from sqlalchemy import Engine

app = typer.Typer(no_args_is_help=True)
DataDir = Annotated[Path | None, typer.Option(help="Where the embedded catalog lies; ./.depot by default.")]
DatabaseUrl = Annotated[str | None, typer.Option(help="postgresql:// or sqlite:/// URL of another catalog.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("upgrade")
def upgrade_schema(data_dir: DataDir = None, database_url: DatabaseUrl = None, as_json: Json = False) -> None:
    """Create the catalog's schema, or bring it to this program's revision."""
    from kernel_depot.catalog.database import SCHEMA_HEAD, schema_revision, upgrade

    engine = _open(data_dir, database_url)
    before = schema_revision(engine)
    upgrade(engine)
    engine.dispose()
    if as_json:
        print_json({"before": before, "revision": SCHEMA_HEAD})
    elif before == SCHEMA_HEAD:
        typer.echo(f"the schema is at revision {SCHEMA_HEAD} already")
    else:
        typer.echo(f"the schema went from {before or 'nothing'} to revision {SCHEMA_HEAD}")


@app.command("check")
def check_revision(data_dir: DataDir = None, database_url: DatabaseUrl = None, as_json: Json = False) -> None:
    """Exit 1 unless the catalog's schema is the one this program knows."""
    from kernel_depot.catalog.database import SCHEMA_HEAD, check_schema

    engine = _open(data_dir, database_url)
    check_schema(engine)
    engine.dispose()
    if as_json:
        print_json({"revision": SCHEMA_HEAD})
    else:
        typer.echo(f"the schema is at revision {SCHEMA_HEAD}, the one this program knows")


def _open(data_dir: Path | None, database_url: str | None) -> Engine:
    from kernel_depot.catalog.database import open_database
    from kernel_depot.settings import load_settings

    return open_database(load_settings(data_dir=data_dir, database_url=database_url).catalog_url)
