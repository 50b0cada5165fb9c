"""What `kernel-depot materialize` does, without typer, so that work on the wheels begins sooner."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_depot.cli.render import print_json, problem_text, size_text

if TYPE_CHECKING:
    from kernel_depot.jobs.materialize import MaterializeReport, WheelOutcome
    from kernel_depot.jobs.progress import Progress, Step


def run_materialize(
    *,
    pins: Sequence[Path | str],
    cuda: str = "all",
    arch: str = "all",
    data_dir: Path | str | None = None,
    database_url: str | None = None,
    store_url: str | None = None,
    allow_file_urls: bool = False,
    as_json: bool = False,
) -> int:
    """Materialize as the options of the command say, print the report, return the exit status."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)  # imports and rows by the ten thousand, hardly any cycles among them
    sys.setswitchinterval(0.0005)  # extraction in threads needs the interpreter briefly but often

    from kernel_depot.jobs.local import materialize_files
    from kernel_depot.settings import load_settings

    settings = load_settings(
        data_dir=data_dir,
        database_url=database_url,
        store_url=store_url,
        allow_file_urls=allow_file_urls or None,
    )
    paths = [Path(path) for path in pins]
    with _watching(as_json=as_json) as progress:
        report = materialize_files(settings, paths, cuda=cuda, arch=arch, progress=progress)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    return 1 if report.failed else 0


@contextmanager
def _watching(*, as_json: bool) -> Iterator[Progress]:
    """Give what shows progress: bars on a terminal, lines elsewhere, nothing beside JSON."""
    from kernel_depot.jobs.progress import Throttled, silent

    if as_json:
        yield silent
    elif sys.stderr.isatty():
        with _bars() as progress:
            yield Throttled(progress, seconds=0.1)
    else:
        yield Throttled(_line, seconds=5.0)


def _line(step: Step) -> None:
    done = ""
    if step.bytes_done or step.bytes_total:
        done = f" {size_text(step.bytes_done)}"
        done += f" of {size_text(step.bytes_total)}" if step.bytes_total else ""
    if step.members_done and step.members_total:
        done += f", {step.members_done} of {step.members_total} members"
    print(f"{step.filename}: {step.stage}{done}{': ' + step.note if step.note else ''}", file=sys.stderr)


@contextmanager
def _bars() -> Iterator[Progress]:
    from threading import Lock

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Display

    display = Display(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[members]}"),
        console=Console(stderr=True),
        transient=True,
    )
    lock = Lock()
    tasks: dict[tuple[str, str], TaskID] = {}

    def show(step: Step) -> None:
        with lock:
            display.start()  # not before: its thread would keep the work from being done in processes
            key = (step.filename, step.stage.value)
            if key not in tasks:
                for other in [other for other in tasks if other[0] == step.filename]:
                    display.remove_task(tasks.pop(other))
                tasks[key] = display.add_task(f"{step.stage} {step.filename}", total=None, members="")
            members = f"{step.members_done}/{step.members_total} members" if step.members_total else ""
            display.update(tasks[key], completed=step.bytes_done, total=step.bytes_total, members=members)

    try:
        yield show
    finally:
        display.stop()


def _print(report: MaterializeReport) -> None:
    for outcome in report.wheels:
        print(_sentence(outcome))
    for failure in report.failed:
        print(problem_text(failure.problem), file=sys.stderr)
    there = sum(outcome.to_json()["outcome"] == "already-there" for outcome in report.wheels)
    downloaded = sum(outcome.to_json().get("downloaded", 0) for outcome in report.wheels)
    print(
        f"{len(report.wheels)} wheels: {len(report.wheels) - there - len(report.failed)} brought in, "
        f"{there} there already, {len(report.failed)} failed; {size_text(downloaded)} downloaded"
    )


def _sentence(outcome: WheelOutcome) -> str:
    from kernel_depot.jobs.materialize import AlreadyThere, Failed

    if isinstance(outcome, Failed):
        return f"{outcome.pin.filename}: failed ({outcome.problem['type']})"
    if isinstance(outcome, AlreadyThere):
        how = "another process brought it" if outcome.waited else "already there"
        return f"{outcome.pin.filename}: {how}, nothing downloaded"
    return (
        f"{outcome.pin.filename}: {outcome.member_count} members verified, {outcome.blob_count} blobs, "
        f"{size_text(outcome.unpacked_size)} unpacked, {outcome.seconds:.1f} s"
    )
