"""From a platform to a usable cache: resolve, fetch what is missing, build views, switch `current`."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kernel_depot.bundle import Bundle, MissingWheel, read_bundle
from kernel_depot.platform import Platform
from kernel_depot.worker.blobs import Intake, Meter, Stopped, fetch_blob
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.client import Client, Endpoint, Unchanged
from kernel_depot.worker.errors import BundleIncomplete, CacheDamaged, CacheEmpty, CacheFull
from kernel_depot.worker.stream import fetch_many
from kernel_depot.worker.views import DEFAULT_VIEWS, View, ViewChoice, build_views, rs_wheels, views_present

BIG: Final = 4 << 20
"""Blobs from this size on get a request of their own, which can be resumed."""
GROUP_BYTES: Final = 32 << 20
GROUP_BLOBS: Final = 256
_CORES: Final = len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class SyncRequest:
    """What to bring to a node. `modules` None means all; `jobs` is the number of connections."""

    platform: Platform | None = None
    modules: tuple[str, ...] | None = None
    groups: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    views: tuple[View, ...] = DEFAULT_VIEWS
    with_wheels: bool = False
    allow_incomplete: bool = False
    zstd: bool = True
    jobs: int = 0


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What a sync did. Sizes in bytes, `seconds` of wall time."""

    digest: str
    platform: Platform
    changed: bool
    offline: bool
    cache: Path
    views: dict[str, Path]
    artifacts: int
    total_size: int
    fetched_blobs: int = 0
    fetched_bytes: int = 0
    wire_bytes: int = 0
    requests: int = 0
    refetched: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    missing: tuple[MissingWheel, ...] = ()
    trace: tuple[Any, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON members."""
        return {
            "digest": self.digest,
            "platform": self.platform.to_json(),
            "changed": self.changed,
            "offline": self.offline,
            "cache": str(self.cache),
            "views": {name: str(path) for name, path in self.views.items()},
            "artifacts": self.artifacts,
            "total_size": self.total_size,
            "fetched_blobs": self.fetched_blobs,
            "fetched_bytes": self.fetched_bytes,
            "wire_bytes": self.wire_bytes,
            "requests": self.requests,
            "refetched": list(self.refetched),
            "dropped": list(self.dropped),
            "missing": [
                {
                    "project": wheel.project,
                    "filename": wheel.filename,
                    "sha256": wheel.sha256,
                    "reason": wheel.reason,
                }
                for wheel in self.missing
            ],
            "trace": list(self.trace),
            "seconds": round(self.seconds, 3),
        }


def sync(
    request: SyncRequest, *, endpoint: Endpoint, platform: Platform, cache: Cache, meter: Meter | None = None
) -> SyncReport:
    """Bring the platform's bundle into the cache and make it current.

    Raise a WorkerError; what was verified until then stays, and `current` stays what it was.
    """
    started = time.monotonic()
    meter = meter if meter is not None else Meter()
    cache.prepare()
    dropped = tuple(cache.recover())
    known = cache.current_digest()
    bundle = cache.bundle(known) if known is not None else None
    client = Client(endpoint)
    trace: tuple[Any, ...] = ()
    try:
        meter.add(requests=1)
        answer = client.resolve(
            platform,
            modules=request.modules,
            groups=request.groups,
            pins=request.pins,
            known=known if bundle is not None else None,
        )
        digest = answer.digest
        if not isinstance(answer, Unchanged):
            trace = tuple(answer.members.get("trace") or ())
            bundle = cache.bundle(digest)
        bundle, changed = _bring(
            client, digest, bundle, request=request, endpoint=endpoint, cache=cache, meter=meter
        )
    finally:
        client.close()
    return _report(
        request,
        digest=digest,
        platform=platform,
        bundle=bundle,
        changed=changed,
        cache=cache,
        meter=meter,
        dropped=dropped,
        trace=trace,
        seconds=time.monotonic() - started,
    )


def sync_bundle(
    request: SyncRequest,
    *,
    digest: str,
    endpoint: Endpoint,
    cache: Cache,
    current: bool = True,
    meter: Meter | None = None,
) -> SyncReport:
    """Bring a bundle that is known by its digest into the cache; with `current` False, only beside what is.

    Raise as `sync` does.
    """
    started = time.monotonic()
    meter = meter if meter is not None else Meter()
    cache.prepare()
    dropped = tuple(cache.recover())
    client = Client(endpoint)
    try:
        bundle, changed = _bring(
            client,
            digest,
            cache.bundle(digest),
            request=request,
            endpoint=endpoint,
            cache=cache,
            meter=meter,
            current=current,
        )
    finally:
        client.close()
    return _report(
        request,
        digest=digest,
        platform=bundle.platform,
        bundle=bundle,
        changed=changed,
        cache=cache,
        meter=meter,
        dropped=dropped,
        trace=(),
        seconds=time.monotonic() - started,
    )


def _bring(
    client: Client,
    digest: str,
    bundle: Bundle | None,
    *,
    request: SyncRequest,
    endpoint: Endpoint,
    cache: Cache,
    meter: Meter,
    current: bool = True,
) -> tuple[Bundle, bool]:
    """Fetch what a bundle lacks, build its views, make it current; tell whether any of that was needed."""
    choice = ViewChoice(request.views, with_wheels=request.with_wheels)
    if bundle is not None:
        _refuse_incomplete(bundle, allow=request.allow_incomplete)
        there = cache.current_digest() == digest or not current
        whole = there and not cache.missing(_sizes(bundle, choice))
        if whole and views_present(cache, digest, bundle, choice):
            cache.touch(digest)
            return bundle, False
    with cache.using(), cache.private() as private:
        # A collection may have come between: what was found before is looked for again.
        bundle = cache.bundle(digest)
        if bundle is None:
            meter.add(requests=1)
            bundle = _take_manifest(client, digest, cache=cache)
        _refuse_incomplete(bundle, allow=request.allow_incomplete)
        needed = cache.missing(_sizes(bundle, choice))
        if needed:
            _fetch(needed, request=request, endpoint=endpoint, cache=cache, private=private, meter=meter)
        meter.stage = "building views"
        build_views(cache, digest, bundle, choice, private=private)
        if current:
            cache.switch(digest, private=private)
        cache.touch(digest)
    meter.stage = "done"
    return bundle, True


def _report(
    request: SyncRequest,
    *,
    digest: str,
    platform: Platform,
    bundle: Bundle,
    changed: bool,
    cache: Cache,
    meter: Meter,
    dropped: tuple[str, ...],
    trace: tuple[Any, ...],
    seconds: float,
) -> SyncReport:
    return SyncReport(
        digest=digest,
        platform=platform,
        changed=changed,
        offline=False,
        cache=cache.root,
        views=_view_paths(cache, request.views),
        artifacts=len(bundle.artifacts),
        total_size=bundle.total_size,
        fetched_blobs=meter.blobs,
        fetched_bytes=meter.bytes,
        wire_bytes=meter.wire_bytes,
        requests=meter.requests,
        refetched=tuple(meter.refetched),
        dropped=dropped,
        missing=bundle.missing,
        trace=trace,
        seconds=seconds,
    )


def sync_offline(request: SyncRequest, *, platform: Platform | None, cache: Cache) -> SyncReport:
    """Check that the current bundle is whole without asking a server, and rebuild views that are gone.

    Raise CacheEmpty, CacheDamaged, BundleIncomplete.
    """
    started = time.monotonic()
    digest = cache.current_digest()
    bundle = cache.bundle(digest) if digest is not None else None
    if digest is None or bundle is None:
        raise CacheEmpty(
            "there is no synced bundle to work from offline",
            where=str(cache.root),
            remedy="sync once with --server, or point --cache at a synced cache",
        )
    if platform is not None and (bundle.platform.cuda, bundle.platform.arch) != (
        platform.cuda,
        platform.arch,
    ):
        raise CacheDamaged(
            "the current bundle is for another platform",
            where=str(cache.current),
            expected=str(platform),
            found=str(bundle.platform),
            remedy="sync with --server",
        )
    absent_groups = set(request.groups) - {group.name for group in bundle.groups}
    if absent_groups:
        raise CacheDamaged(
            "the current bundle lacks module groups that were asked for",
            where=str(cache.root),
            found=", ".join(sorted(absent_groups)),
            remedy="sync without --offline",
        )
    absent_modules = set(request.modules or ()) - {artifact.module for artifact in bundle.artifacts}
    if absent_modules:
        raise CacheDamaged(
            "the current bundle lacks modules that were asked for",
            where=str(cache.current),
            found=", ".join(sorted(absent_modules)),
            remedy="sync with --server",
        )
    _refuse_incomplete(bundle, allow=request.allow_incomplete)
    dropped = tuple(cache.recover())
    choice = ViewChoice(request.views, with_wheels=request.with_wheels)
    absent = cache.missing(_sizes(bundle, choice))
    if absent:
        paths = {artifact.sha256: artifact.path for artifact in bundle.artifacts}
        names = [paths.get(sha256, sha256) for sha256 in absent]
        raise CacheDamaged(
            f"{len(absent)} files of the current bundle are gone or have the wrong size",
            where=str(cache.root),
            found=", ".join(sorted(names)[:5]) + (", …" if len(names) > 5 else ""),
            remedy="sync with --server; what is whole is kept",
        )
    changed = False
    if not views_present(cache, digest, bundle, choice):
        with cache.private() as private:
            build_views(cache, digest, bundle, choice, private=private)
        changed = True
    return SyncReport(
        digest=digest,
        platform=bundle.platform,
        changed=changed,
        offline=True,
        cache=cache.root,
        views=_view_paths(cache, request.views),
        artifacts=len(bundle.artifacts),
        total_size=bundle.total_size,
        dropped=dropped,
        missing=bundle.missing,
        seconds=time.monotonic() - started,
    )


def _take_manifest(client: Client, digest: str, *, cache: Cache) -> Bundle:
    data = client.manifest(digest)
    bundle = read_bundle(data, digest=digest, where=client.endpoint.address(f"/v1/bundles/{digest}"))
    with cache.private() as private:
        cache.write_bundle(digest, data, private=private)
    return bundle


def _view_paths(cache: Cache, views: Iterable[View]) -> dict[str, Path]:
    return {
        view.value: cache.current / view.value
        for view in tuple(views) or tuple(View)
        if (cache.current / view.value).is_dir()
    }


def _refuse_incomplete(bundle: Bundle, *, allow: bool) -> None:
    if bundle.missing and not allow:
        raise BundleIncomplete(
            f"{len(bundle.missing)} pinned wheels are not in the depot yet",
            where=str(bundle.platform),
            found="; ".join(f"{wheel.filename}: {wheel.reason}" for wheel in bundle.missing),
            remedy="materialize them on the server, or take what is there with --allow-incomplete",
            missing=[
                {"project": wheel.project, "filename": wheel.filename, "reason": wheel.reason}
                for wheel in bundle.missing
            ],
        )


def _sizes(bundle: Bundle, choice: ViewChoice) -> dict[str, int]:
    sizes = {artifact.sha256: artifact.size for artifact in bundle.artifacts}
    if choice.with_wheels:
        sizes.update((wheel.sha256, wheel.size) for wheel in rs_wheels(bundle))
    return sizes


@dataclass
class _Tasks:
    """Work for the threads, largest first, and the first failure."""

    queue: deque[list[tuple[str, int]]]
    busy: int = 0
    failure: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stop(self) -> None:
        if self.failure is not None:
            raise Stopped

    def crowded(self) -> bool:
        """Tell whether as many threads are at work as there are cores."""
        return self.busy >= _CORES

    def fail(self, error: BaseException) -> None:
        with self.lock:
            if self.failure is None:
                self.failure = error


def _fetch(
    needed: dict[str, int],
    *,
    request: SyncRequest,
    endpoint: Endpoint,
    cache: Cache,
    private: Path,
    meter: Meter,
) -> None:
    total = sum(needed.values())
    _refuse_overfull(total, cache=cache)
    meter.blobs_total, meter.bytes_total, meter.stage = len(needed), total, "fetching"
    cache.fan_out(needed)
    cache.mark_unsynced(needed)
    tasks = _Tasks(deque(_groups(needed)))
    jobs = min(request.jobs or default_jobs(), len(tasks.queue))
    threads = [
        threading.Thread(
            target=_work,
            args=(tasks,),
            kwargs={
                "endpoint": endpoint,
                "cache": cache,
                "private": private,
                "meter": meter,
                "zstd": request.zstd,
            },
            name=f"sync-{number}",
        )
        for number in range(jobs)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        tasks.fail(error)
        for thread in threads:
            thread.join()
        raise
    if tasks.failure is not None:
        raise tasks.failure


def default_jobs() -> int:
    """The number of connections: receiving and hashing keep a core busy each."""
    return max(2, min(12, _CORES))


def _refuse_overfull(total: int, *, cache: Cache) -> None:
    free = os.statvfs(cache.root)
    available = free.f_bavail * free.f_frsize
    if total > available:
        raise CacheFull(
            "the bundle does not fit on the disk",
            where=str(cache.root),
            expected=f"{total} bytes free",
            found=f"{available} bytes free",
            remedy="free space, or point --cache at a larger disk",
        )


def _groups(needed: dict[str, int]) -> list[list[tuple[str, int]]]:
    """Split into tasks: each big blob alone, small ones in groups; the largest tasks first."""
    big = [[(sha256, size)] for sha256, size in needed.items() if size >= BIG]
    groups: list[list[tuple[str, int]]] = []
    group: list[tuple[str, int]] = []
    weight = 0
    for sha256, size in needed.items():
        if size >= BIG:
            continue
        group.append((sha256, size))
        weight += size
        if weight >= GROUP_BYTES or len(group) >= GROUP_BLOBS:
            groups.append(group)
            group, weight = [], 0
    if group:
        groups.append(group)
    return sorted(big + groups, key=lambda task: sum(size for _, size in task), reverse=True)


def _work(
    tasks: _Tasks, *, endpoint: Endpoint, cache: Cache, private: Path, meter: Meter, zstd: bool
) -> None:
    with tasks.lock:
        tasks.busy += 1
    try:
        transport = endpoint.open()
        try:
            intake = Intake(
                transport=transport,
                endpoint=endpoint,
                cache=cache,
                private=private,
                meter=meter,
                stop=tasks.stop,
                zstd=zstd,
                crowded=tasks.crowded,
            )
            while True:
                tasks.stop()
                try:
                    task = tasks.queue.popleft()
                except IndexError:
                    return
                if len(task) == 1:
                    fetch_blob(intake, sha256=task[0][0], size=task[0][1])
                else:
                    fetch_many(intake, task)
        finally:
            transport.close()
    except Stopped:
        return
    except BaseException as error:
        tasks.fail(error)
    finally:
        with tasks.lock:
            tasks.busy -= 1
