"""What `kernel-depot sync` does, without typer, whose import takes longer than a small sync."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_depot.worker.location import default_cache

if TYPE_CHECKING:
    from kernel_depot.worker.blobs import Meter
    from kernel_depot.worker.sync import SyncReport


def run_sync(
    *,
    server: str | None = None,
    token: str | None = None,
    cuda: str = "auto",
    arch: str = "auto",
    sm: str = "auto",
    modules: str = "all",
    groups: Sequence[str] = (),
    pins: Sequence[str] = (),
    cache: Path | str | None = None,
    views: str | None = None,
    with_wheels: bool = False,
    offline: bool = False,
    allow_incomplete: bool = False,
    compression: str = "zstd",
    jobs: int = 0,
    as_json: bool = False,
) -> int:
    """Sync as the options of the command say, print the report, return the exit status."""
    from kernel_depot.worker.blobs import Meter
    from kernel_depot.worker.cache import Cache
    from kernel_depot.worker.client import Endpoint
    from kernel_depot.worker.facts import AUTO, find_platform
    from kernel_depot.worker.sync import SyncRequest, sync_offline
    from kernel_depot.worker.sync import sync as sync_online
    from kernel_depot.worker.views import View

    request = SyncRequest(
        modules=None if modules == "all" else _words(modules),
        groups=tuple(groups),
        pins=tuple(pins),
        views=tuple(View.parse(word) for word in _words(views)) if views is not None else (),
        with_wheels=with_wheels,
        allow_incomplete=allow_incomplete,
        zstd=compression == "zstd",
        jobs=jobs,
    )
    place = Cache(Path(cache) if cache else default_cache())
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
    return 0


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
