"""`kernel-depot materialize`: from pins to catalog on one box, without HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_depot.cli.materializing import run_materialize

app = typer.Typer()


@app.command()
def materialize(
    pins: Annotated[
        list[Path], typer.Argument(metavar="PINS...", help="Pin set files (TOML, or a Cargo.toml).")
    ],
    cuda: Annotated[str, typer.Option(help="A CUDA tag such as cu130, or all.")] = "all",
    arch: Annotated[str, typer.Option(help="A CPU such as x86_64 or aarch64, or all.")] = "all",
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the embedded catalog and store lie; ./.depot by default.")
    ] = None,
    database_url: Annotated[
        str | None, typer.Option(help="A PostgreSQL URL, in place of the embedded SQLite catalog.")
    ] = None,
    store_url: Annotated[str | None, typer.Option(help="s3://BUCKET/PREFIX, or another directory.")] = None,
    allow_file_urls: Annotated[
        bool, typer.Option("--allow-file-urls", help="Accept pins whose url is a local file.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Fetch, verify, extract, inspect, store and record every wheel that is pinned; skip what is there.

    Exits 1 when a wheel could not be brought in, after trying all of them.
    """
    status = run_materialize(
        pins=pins,
        cuda=cuda,
        arch=arch,
        data_dir=data_dir,
        database_url=database_url,
        store_url=store_url,
        allow_file_urls=allow_file_urls,
        as_json=as_json,
    )
    if status:
        raise typer.Exit(status)
