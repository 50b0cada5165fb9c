"""Bring pinned wheels into the store and the catalog: fetch, verify, extract, inspect, publish, record."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kernel_depot.catalog import leases, queries, record
from kernel_depot.catalog.database import reading, writing
from kernel_depot.errors import DepotError
from kernel_depot.jobs.depot import Depot, open_depot
from kernel_depot.jobs.ingest import Ready, fetch_pinned, pin_arch, ready
from kernel_depot.jobs.progress import Progress, Stage, Step, silent
from kernel_depot.liveness import process_name
from kernel_depot.pins.pin import IndexOrigin, Pin, PinSet, StoreOrigin
from kernel_depot.platform import Arch, CudaTag
from kernel_depot.wheels.fetch import Fetched
from kernel_depot.wheels.fetch_problems import WheelHashMismatch, WheelNotUploaded

__all__ = ["Depot", "materialize_pin_set", "materialize_pin_sets", "materialize_wheel", "open_depot"]

_PARALLEL_WHEELS = 4  # downloads at a time; extraction is one wheel at a time, it uses all threads itself
_POLL = (0.1, 1.0)  # seconds between looks at a wheel that another process is bringing: first, longest


@dataclass(frozen=True, slots=True)
class Ingested:
    """The wheel is in the store now. `downloaded` and `resumed` are bytes."""

    pin: Pin
    size: int
    unpacked_size: int
    member_count: int
    blob_count: int
    downloaded: int
    resumed: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        return {
            **_about(self.pin),
            "outcome": "ingested",
            "size": self.size,
            "unpacked_size": self.unpacked_size,
            "member_count": self.member_count,
            "blob_count": self.blob_count,
            "downloaded": self.downloaded,
            "resumed": self.resumed,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class AlreadyThere:
    """Nothing was downloaded: the wheel was in the store, or `waited` for another process to bring it."""

    pin: Pin
    waited: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        return {**_about(self.pin), "outcome": "already-there", "waited": self.waited, "downloaded": 0}


@dataclass(frozen=True, slots=True)
class Failed:
    """The wheel is not in the store; `problem` says why."""

    pin: Pin
    problem: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        return {**_about(self.pin), "outcome": "failed", "problem": self.problem}


WheelOutcome = Ingested | AlreadyThere | Failed


@dataclass(frozen=True, slots=True)
class MaterializeReport:
    """What became of every wheel of the selection, in the order of the pins."""

    pin_sets: tuple[tuple[str, str], ...]
    wheels: tuple[WheelOutcome, ...]

    @property
    def failed(self) -> tuple[Failed, ...]:
        """The wheels that are not in the store."""
        return tuple(outcome for outcome in self.wheels if isinstance(outcome, Failed))

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "pin_sets": [{"name": name, "revision": revision} for name, revision in self.pin_sets],
            "wheels": [outcome.to_json() for outcome in self.wheels],
            "failed": len(self.failed),
        }


def _about(pin: Pin) -> dict[str, Any]:
    return {
        "project": pin.project,
        "version": pin.version,
        "filename": pin.filename,
        "sha256": pin.sha256,
        "cuda": str(pin.cuda),
        "arch": str(pin.arch),
    }


def selected(
    pin_set: PinSet, *, cuda: Collection[CudaTag] | None = None, arch: Collection[Arch] | None = None
) -> list[Pin]:
    """Return the pins of the CUDA tags and CPUs asked for (None: all), each wheel once."""
    found: dict[str, Pin] = {}
    for pin in pin_set.pins:
        if (cuda is None or pin.cuda in cuda) and (arch is None or pin.arch in arch):
            found.setdefault(pin.sha256, pin)
    return list(found.values())


def materialize_pin_set(
    depot: Depot,
    pin_set: PinSet,
    *,
    cuda: Collection[CudaTag] | None = None,
    arch: Collection[Arch] | None = None,
    progress: Progress = silent,
) -> MaterializeReport:
    """Record a pin set and bring the selected wheels in; a wheel that fails does not stop the others."""
    return materialize_pin_sets(depot, [pin_set], cuda=cuda, arch=arch, progress=progress)


def materialize_pin_sets(
    depot: Depot,
    pin_sets: Sequence[PinSet],
    *,
    cuda: Collection[CudaTag] | None = None,
    arch: Collection[Arch] | None = None,
    progress: Progress = silent,
    ahead: Callable[[Pin], Ready | None] | None = None,
) -> MaterializeReport:
    """Record pin sets and bring the selected wheels in; a wheel that fails does not stop the others.

    `ahead` hands out work on a wheel that was begun before, once.
    """
    with writing(depot.engine) as session:
        for pin_set in pin_sets:
            record.record_pin_set(session, pin_set, who="materialize")
    pins: dict[str, Pin] = {}
    for pin_set in pin_sets:
        for pin in selected(pin_set, cuda=cuda, arch=arch):
            pins.setdefault(pin.sha256, pin)
    with ThreadPoolExecutor(_PARALLEL_WHEELS, thread_name_prefix="wheel") as pool:
        outcomes = list(
            pool.map(lambda pin: materialize_wheel(depot, pin, progress=progress, ahead=ahead), pins.values())
        )
    return MaterializeReport(
        pin_sets=tuple((pin_set.name, pin_set.digest) for pin_set in pin_sets), wheels=tuple(outcomes)
    )


def materialize_wheel(
    depot: Depot,
    pin: Pin,
    *,
    progress: Progress = silent,
    ahead: Callable[[Pin], Ready | None] | None = None,
    again: bool = False,
) -> WheelOutcome:
    """Bring one wheel in; while another process does so, wait for it. `again`: though all of it is there.

    A failure of the wheel, its source or the store is an outcome and is recorded; anything else is raised.
    """
    waited = False
    delay = _POLL[0]
    while True:
        if not again and is_there(depot, pin.sha256):
            return AlreadyThere(pin, waited)
        lease = leases.acquire(depot.engine, f"wheel:{pin.sha256}", seconds=depot.settings.lease_seconds)
        if isinstance(lease, leases.Acquired):
            break
        waited = True
        progress(Step(pin.filename, Stage.WAITING, note=f"{lease.holder} is bringing it"))
        time.sleep(delay)
        delay = min(delay * 1.5, _POLL[1])
    with leases.kept(depot.engine, lease, seconds=depot.settings.lease_seconds):
        # Whoever held the lease a moment ago may have brought the wheel between our two looks.
        if not again and is_there(depot, pin.sha256):
            return AlreadyThere(pin, waited)
        try:
            return _bring(depot, pin, progress, ahead)
        except DepotError as error:
            problem = error.problem()
            with writing(depot.engine) as session:
                record.record_failure(session, sha256=pin.sha256, filename=pin.filename, problem=problem)
            return Failed(pin, problem)


def is_there(depot: Depot, sha256: str) -> bool:
    """Tell whether a wheel is recorded and the store holds every one of its artifacts."""
    with reading(depot.engine) as session:
        if not queries.wheels(session, [sha256]):
            return False
        blobs = queries.wheel_blobs(session, sha256)
    return len(depot.store.has(blobs)) == len(blobs)


def _bring(
    depot: Depot, pin: Pin, progress: Progress, ahead: Callable[[Pin], Ready | None] | None
) -> Ingested:
    started = time.monotonic()
    begun = ahead(pin) if ahead is not None else None
    if begun is not None:
        return _publish(depot, pin, begun, progress, started)
    wheel = depot.store.path(pin.sha256)
    fetched = None
    if wheel is None:
        fetched = _fetch(depot, pin, progress)
        wheel = fetched.path
    with depot.store.staging() as staging:
        try:
            work = ready(
                pin,
                wheel,
                staging=staging,
                threads=depot.settings.extract_threads,
                progress=progress,
                fetched=fetched,
                verified=fetched is not None,
            )
        except DepotError:
            if fetched is not None:
                wheel.unlink(missing_ok=True)
            raise
        return _publish(depot, pin, work, progress, started)


def _fetch(depot: Depot, pin: Pin, progress: Progress) -> Fetched:
    hosts: list[str] = []
    if isinstance(pin.origin, StoreOrigin):
        return _from_store(depot, pin)
    if isinstance(pin.origin, IndexOrigin):
        from kernel_depot.pins.index import locate

        url = locate(
            index=pin.origin.name,
            project=pin.project,
            version=pin.version,
            filename=pin.filename,
            sha256=pin.sha256,
            indexes=depot.settings.index,
        )
        hosts = [host for host in (urlsplit(url).hostname,) if host]
    else:
        url = pin.origin.url
    return fetch_pinned(
        pin,
        url,
        dest=depot.incoming / pin.sha256,
        policy=depot.settings.fetch_policy(*hosts),
        progress=progress,
    )


def _from_store(depot: Depot, pin: Pin) -> Fetched:
    """Copy an uploaded wheel out of a store that has no file of it, verified. Raise WheelNotUploaded."""
    dest = depot.incoming / pin.sha256
    if depot.store.size(pin.sha256) is None:
        raise WheelNotUploaded(
            f"{pin.filename} is pinned as one of this depot's own, but it was not uploaded",
            where=f"the store, sha256:{pin.sha256}",
            remedy="publish it again: kernel-depot build PLAN --publish URL",
        )
    private = dest.with_name(f"{dest.name}.{process_name()}")
    digest = hashlib.sha256()
    try:
        with private.open("xb") as file:
            for piece in depot.store.read(pin.sha256):
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != pin.sha256:
            raise WheelHashMismatch(
                "the store's bytes are not those that the pin names",
                where=f"the store, sha256:{pin.sha256}",
                expected=pin.sha256,
                found=digest.hexdigest(),
                remedy="publish the wheel again",
            )
        private.rename(dest)
    finally:
        private.unlink(missing_ok=True)
    return Fetched(dest, dest.stat().st_size, attempts=0, resumed_bytes=0, url=str(pin.origin))


def _publish(depot: Depot, pin: Pin, work: Ready, progress: Progress, started: float) -> Ingested:
    """Publish the bytes and record the rows, which are committed once every byte is public."""
    extracted = work.extracted
    count = work.blob_count
    publish = work.publish or partial(depot.store.publish_many, work.staged(sha256=pin.sha256))
    progress(Step(pin.filename, Stage.PUBLISHING, members_total=count))
    arch = pin_arch(pin)
    with ThreadPoolExecutor(1, thread_name_prefix="publish") as pool:
        published = pool.submit(publish)
        if not depot.store.publishes_by_rename:
            published.result()  # no transaction is held open over a network
        progress(Step(pin.filename, Stage.RECORDING, members_total=len(extracted.members)))
        with writing(depot.engine) as session:
            record.record_wheel(
                session,
                extracted,
                extracted.inspections,
                sha256=pin.sha256,
                arch=str(arch) if arch is not None else None,
                kept=True,
            )
            published.result()  # bytes first: the rows become visible after this
    if work.fetched is not None:
        with suppress(FileNotFoundError):  # a store elsewhere copies
            Path(work.wheel).unlink()
    fetched = work.fetched
    return Ingested(
        pin=pin,
        size=extracted.size,
        unpacked_size=extracted.unpacked_size,
        member_count=len(extracted.members),
        blob_count=count,
        downloaded=fetched.size - fetched.resumed_bytes if fetched is not None and fetched.attempts else 0,
        resumed=fetched.resumed_bytes if fetched is not None else 0,
        seconds=time.monotonic() - started,
    )
