"""`kernel-depot sync`: bring a bundle from a server into this node's cache."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_depot.worker.location import default_cache

if TYPE_CHECKING:
    from kernel_depot.worker.blobs import Meter
    from kernel_depot.worker.sync import SyncReport

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
    from kernel_depot.worker.blobs import Meter
    from kernel_depot.worker.cache import Cache
    from kernel_depot.worker.client import Endpoint
    from kernel_depot.worker.facts import AUTO, find_platform
    from kernel_depot.worker.sync import SyncRequest, sync_offline
    from kernel_depot.worker.sync import sync as sync_online
    from kernel_depot.worker.views import View

    if compression not in ("zstd", "identity"):
        raise typer.BadParameter(f"{compression!r} is neither zstd nor identity", param_hint="--compression")
    if not offline and not server:
        raise typer.BadParameter("say which server, or work with --offline", param_hint="--server")
    request = SyncRequest(
        modules=None if modules == "all" else _words(modules),
        pins=tuple(pins or ()),
        views=tuple(View.parse(word) for word in _words(views)) if views is not None else (),
        with_wheels=with_wheels,
        allow_incomplete=allow_incomplete,
        zstd=compression == "zstd",
        jobs=jobs,
    )
    place = Cache(cache or default_cache())
    if offline or server is None:
        said = cuda != AUTO and arch != AUTO
        platform = find_platform(cuda=cuda, arch=arch, sm="none" if sm == AUTO else sm) if said else None
        report = sync_offline(request, platform=platform, cache=place)
    else:
        endpoint = Endpoint(server, token=token)
        platform = find_platform(cuda=cuda, arch=arch, sm=sm)
        meter = Meter()
        with _progress(meter, quiet=as_json):
            report = sync_online(request, endpoint=endpoint, platform=platform, cache=place, meter=meter)
    if as_json:
        from kernel_depot.cli.render import print_json

        print_json(report.to_json())
    else:
        print(report_text(report))


def report_text(report: SyncReport) -> str:
    """Say in a few lines what a sync did."""
    from kernel_depot.cli.render import size_text

    lines = [f"bundle {report.digest[:12]} for {report.platform}: {report.artifacts} files, "]
    lines[0] += size_text(report.total_size)
    if report.fetched_blobs:
        speed = report.fetched_bytes / max(report.seconds, 1e-9)
        lines.append(
            f"fetched {report.fetched_blobs} blobs, {size_text(report.fetched_bytes)} verified, "
            f"{size_text(report.wire_bytes)} on the wire, in {report.seconds:.1f} s ({size_text(speed)}/s)"
        )
    elif report.offline:
        lines.append("complete; no server was asked")
    else:
        lines.append("nothing new" if not report.changed else "every blob was here already")
    if report.refetched:
        lines.append(f"{len(report.refetched)} blobs came with wrong bytes and were fetched again")
    if report.dropped:
        lines.append(f"{len(report.dropped)} blobs were torn by a crash of the machine and were dropped")
    lines += [f"missing: {wheel.filename}: {wheel.reason}" for wheel in report.missing]
    lines += [f"{name}: {path}" for name, path in report.views.items()]
    return "\n".join(lines)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


@contextmanager
def _progress(meter: Meter, *, quiet: bool) -> Iterator[None]:
    """Draw a bar on a terminal, print a line every few seconds elsewhere, nothing when quiet."""
    if quiet:
        yield
        return
    done = threading.Event()
    draw = _bar if sys.stderr.isatty() else _lines
    thread = threading.Thread(target=draw, args=(meter, done), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _lines(meter: Meter, done: threading.Event) -> None:
    from kernel_depot.cli.render import size_text

    while not done.wait(5.0):
        print(
            f"{meter.stage}: {meter.blobs}/{meter.blobs_total} blobs, "
            f"{size_text(meter.bytes)} of {size_text(meter.bytes_total)}",
            file=sys.stderr,
            flush=True,
        )


def _bar(meter: Meter, done: threading.Event) -> None:
    # A sync with nothing to do is over before a bar would help, and rich takes a while to import.
    if done.wait(0.3):
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(meter.stage, total=None)
        while not done.wait(0.1):
            progress.update(
                task, description=meter.stage, completed=meter.bytes, total=meter.bytes_total or None
            )
