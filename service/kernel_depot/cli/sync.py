"""`kernel-depot sync`: bring a bundle from a server into this node's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_depot.cli.syncing import run_sync

app = typer.Typer(add_completion=False)


CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache", envvar="KERNEL_DEPOT_CACHE", help="The node's cache directory.", show_default="user cache"
    ),
]
ServerOption = Annotated[
    str | None, typer.Option("--server", envvar="KERNEL_DEPOT_SERVER", help="The server's URL.")
]
TokenOption = Annotated[
    str | None,
    typer.Option("--token", envvar="KERNEL_DEPOT_TOKEN", help="A bearer token with scope node or read."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command()
def sync(
    server: ServerOption = None,
    token: TokenOption = None,
    cuda: Annotated[str, typer.Option(help="CUDA version: cu130, 13.0, or auto.")] = "auto",
    arch: Annotated[str, typer.Option(help="CPU architecture, or auto.")] = "auto",
    sm: Annotated[str, typer.Option(help="GPU architecture: sm90a, none, or auto.")] = "auto",
    modules: Annotated[str, typer.Option(help="Comma-separated module names, or all.")] = "all",
    groups: Annotated[
        list[str] | None, typer.Option("--group", help="Also a module group, as opponent; may be repeated.")
    ] = None,
    pins: Annotated[list[str] | None, typer.Option(help="Take this pin set only; may be repeated.")] = None,
    cache: CacheOption = None,
    views: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: files, flashinfer, flashinfer-rs.", show_default="all that apply"
        ),
    ] = None,
    with_wheels: Annotated[
        bool, typer.Option("--with-wheels", help="Fetch the wheels too, which flashinfer-rs starts from.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Check the cache; ask no server.")] = False,
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Take a bundle though pinned wheels are missing.")
    ] = False,
    compression: Annotated[
        str, typer.Option(help="zstd, or identity where the network is faster than a core.")
    ] = "zstd",
    jobs: Annotated[int, typer.Option(min=0, max=64, help="Connections; 0 chooses.", show_default=False)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Resolve, fetch what is missing, verify, build views and switch `current`."""
    if compression not in ("zstd", "identity"):
        raise typer.BadParameter(f"{compression!r} is neither zstd nor identity", param_hint="--compression")
    if not offline and not server:
        raise typer.BadParameter("say which server, or work with --offline", param_hint="--server")
    run_sync(
        server=server,
        token=token,
        cuda=cuda,
        arch=arch,
        sm=sm,
        modules=modules,
        groups=groups or (),
        pins=pins or (),
        cache=cache,
        views=views,
        with_wheels=with_wheels,
        offline=offline,
        allow_incomplete=allow_incomplete,
        compression=compression,
        jobs=jobs,
        as_json=as_json,
    )
