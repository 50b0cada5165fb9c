"""From a wheel's bytes to staged, inspected artifacts: what happens before the catalog is told.

This module and what it imports stay clear of the database, so that work on a wheel that lies on this
machine can begin while the catalog's libraries are still being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore

from kernel_depot.bundle import ArtifactKind
from kernel_depot.jobs.progress import Progress, Stage, Step
from kernel_depot.pins.pin import Pin
from kernel_depot.platform import Arch
from kernel_depot.store.blobs import StagedBlob
from kernel_depot.wheels.extract import Expectation, ExtractedWheel, extract
from kernel_depot.wheels.fetch import Fetched, fetch
from kernel_depot.wheels.inspect import Inspection, inspect
from kernel_depot.wheels.policy import FetchPolicy

_extracting = Semaphore(1)  # one wheel at a time: each uses all threads, and memory is bounded by the wheel
_INSPECTED = frozenset({ArtifactKind.MODULE, ArtifactKind.TVM_FFI, ArtifactKind.CUBIN})


@dataclass(frozen=True, slots=True)
class Ready:
    """A verified wheel whose artifacts lie in a private directory, inspected. `wheel` are its own bytes.

    `publish` publishes them beside this process, where somebody stands by for that.
    """

    wheel: Path
    extracted: ExtractedWheel
    fetched: Fetched | None
    publish: Callable[[], None] | None = None

    @property
    def blob_count(self) -> int:
        """How many blobs there are to publish."""
        members = self.extracted.members
        found = {member.sha256 for member in members if member.staging is not None}
        return len(found) + (self.fetched is not None)

    def staged(self, *, sha256: str) -> list[StagedBlob]:
        """Return what is to be published: the distinct artifacts, and a fetched wheel's own bytes."""
        blobs = [
            StagedBlob(digest, member.size, path)
            for digest, member in self.extracted.blobs.items()
            if (path := member.staged) is not None
        ]
        if self.fetched is not None:
            blobs.append(StagedBlob(sha256, self.extracted.size, self.wheel))
        return blobs


def fetch_pinned(
    pin: Pin,
    url: str,
    *,
    dest: Path,
    policy: FetchPolicy,
    progress: Progress,
    verify_files: bool = True,
) -> Fetched:
    """Bring a pin's file to `dest`, verified; `verify_files` as in `fetch`. Raise FetchError."""

    def tell(done: int, total: int | None) -> None:
        progress(Step(pin.filename, Stage.FETCHING, bytes_done=done, bytes_total=total or pin.size))

    tell(0, None)
    return fetch(
        url,
        sha256=pin.sha256,
        dest=dest,
        policy=policy,
        size=pin.size,
        on_progress=tell,
        verify_files=verify_files,
    )


def ready(
    pin: Pin,
    wheel: Path,
    *,
    staging: Path,
    threads: int,
    forks: int = 0,
    progress: Progress,
    fetched: Fetched | None = None,
    verified: bool = True,
) -> Ready:
    """Extract and inspect a wheel; `verified` False has its own SHA-256 checked too. Raise WheelError.

    `forks` beside 0 works with so many processes in place of threads.
    """
    totals: list[int | None] = [None, None]

    def tell_totals(size: int, members: int) -> None:
        totals[:] = [size, members]
        tell(0, 0)

    def tell(size: int, members: int) -> None:
        progress(Step(pin.filename, Stage.EXTRACTING, size, totals[0], members, totals[1]))

    arch = pin_arch(pin)

    def look(path: str, kind: ArtifactKind, sha256: str, content: memoryview | Path) -> Inspection | None:
        del sha256
        if kind not in _INSPECTED:
            return None
        return inspect(content, kind=kind, arch=arch, where=f"{pin.filename}: {path}")

    with _extracting:
        extracted = extract(
            wheel,
            staging=staging,
            expect=Expectation(
                filename=pin.filename,
                sha256=None if verified else pin.sha256,
                arch=arch,
                record_sha256=pin.record_sha256,
            ),
            on_totals=tell_totals,
            on_progress=tell,
            look=look,
            threads=threads,
            forks=forks,
        )
    return Ready(wheel, extracted, fetched)


def pin_arch(pin: Pin) -> Arch | None:
    """Return the CPU a pin's wheel is built for, None when its filename says any."""
    return None if pin.filename.endswith("-any.whl") else pin.arch
