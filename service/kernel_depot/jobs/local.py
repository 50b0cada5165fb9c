"""Materialize pin set files in this process, as quickly as the machine allows.

The catalog's libraries take most of a second to import. Wheels that lie on this machine are extracted
meanwhile: that needs no catalog, and the store itself says when a wheel is there already.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_depot.jobs.ingest import Ready, fetch_pinned, ready
from kernel_depot.jobs.progress import Progress, SharedStep
from kernel_depot.pins.document import read_pin_set
from kernel_depot.pins.pin import Pin, PinSet, UrlOrigin
from kernel_depot.platform import Arch, CudaTag
from kernel_depot.settings import Settings
from kernel_depot.store.blobs import StagedBlob, Store
from kernel_depot.store.location import open_store
from kernel_depot.wheels.errors import WheelDigestMismatch
from kernel_depot.wheels.fetch_problems import WheelHashMismatch
from kernel_depot.wheels.forked import Forked, may_fork

if TYPE_CHECKING:
    from kernel_depot.jobs.materialize import MaterializeReport

_GLANCE = 0.1  # seconds between two looks at how far a child process is


def materialize_files(
    settings: Settings,
    paths: Sequence[Path],
    *,
    cuda: str,
    arch: str,
    progress: Progress,
) -> MaterializeReport:
    """Read pin set files and bring the selected wheels in; `cuda` and `arch` may be `all`.

    Raise PinSetInvalid, PlatformError, CatalogError, StoreError; a wheel's failure is in the report.
    """
    cudas = None if cuda == "all" else {CudaTag.parse(cuda)}
    archs = None if arch == "all" else {Arch.parse(arch)}
    pin_sets = [read_pin_set(path, allow_file_urls=settings.allow_file_urls) for path in paths]
    store = open_store(settings.store_location, staging_dir=settings.data_dir.absolute() / "outgoing")
    with _ahead(settings, store, _local_pin(pin_sets, cudas, archs), progress) as begun:
        from kernel_depot.jobs.materialize import materialize_pin_sets, open_depot

        depot = open_depot(settings, store=store)
        try:
            return materialize_pin_sets(
                depot, pin_sets, cuda=cudas, arch=archs, progress=progress, ahead=begun.take
            )
        finally:
            depot.close()


def _local_pin(pin_sets: Sequence[PinSet], cudas: set[CudaTag] | None, archs: set[Arch] | None) -> Pin | None:
    """Return the first selected pin whose file lies on this machine."""
    for pin_set in pin_sets:
        for pin in pin_set.pins:
            if (
                isinstance(pin.origin, UrlOrigin)
                and pin.origin.url.startswith("file:")
                and (cudas is None or pin.cuda in cudas)
                and (archs is None or pin.arch in archs)
            ):
                return pin
    return None


class _Begun:
    """Work on one wheel under way beside this thread; handed out once."""

    def __init__(self, pin: Pin | None, work: Callable[[], Ready] | None) -> None:
        self._pin = pin
        self._work = work

    def take(self, pin: Pin) -> Ready | None:
        """Wait for the work on `pin` and return it, None when there is none. Raise what it raised."""
        if self._work is None or self._pin is None or pin.sha256 != self._pin.sha256:
            return None
        work, self._work = self._work, None
        return work()


@contextmanager
def _ahead(settings: Settings, store: Store, pin: Pin | None, progress: Progress) -> Iterator[_Begun]:
    """Begin the work on `pin`, unless the store has it; its private files live as long as the block.

    It is done in processes where this one may fork, else in a thread.
    """
    if pin is None or store.size(pin.sha256) is not None:
        yield _Begun(None, None)
        return
    with ExitStack() as stack:
        staging = stack.enter_context(store.staging())
        if may_fork():
            told = SharedStep()
            begin = partial(_begin, settings, pin, staging, told, forks=settings.extract_threads)
            child = Forked(begin)
            stack.callback(child.abandon)
            publisher = _Publisher(store) if store.publishes_by_rename else None
            if publisher is not None:
                stack.callback(publisher.close)
            yield _Begun(pin, partial(_follow, child, publisher, pin, told, progress))
        else:
            pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="ahead"))
            yield _Begun(pin, pool.submit(_begin, settings, pin, staging, progress, forks=0).result)


def _follow(
    child: Forked[Ready], publisher: _Publisher | None, pin: Pin, told: SharedStep, progress: Progress
) -> Ready:
    """Pass on what a child tells of its progress until it is done."""
    while not child.wait(_GLANCE):
        step = told.read(pin.filename)
        if step is not None:
            progress(step)
    work = child.result()
    return work if publisher is None else replace(work, publish=publisher.publish)


class _Publisher:
    """A child that stands by to publish one batch: thousands of renames beside thousands of rows."""

    def __init__(self, store: Store) -> None:
        told, self._tell = os.pipe()
        self._child = Forked(partial(_publish_told, store, told, self._tell))
        os.close(told)

    def publish(self, staged: Sequence[StagedBlob]) -> None:
        """Publish a batch, once. Raise what `publish_many` raises."""
        with open(self._tell, "wb") as file:
            self._tell = -1
            pickle.dump([(blob.sha256, blob.size, str(blob.path)) for blob in staged], file)
        self._child.result()

    def close(self) -> None:
        """End the child, whether it was told anything or not."""
        if self._tell >= 0:
            os.close(self._tell)
        self._child.abandon()


def _publish_told(store: Store, told: int, tell: int) -> None:
    os.close(tell)
    with open(told, "rb") as file:
        data = file.read()
    if data:
        batch = pickle.loads(data)  # noqa: S301  our own parent's bytes
        store.publish_many([StagedBlob(sha256, size, Path(path)) for sha256, size, path in batch])


def _begin(settings: Settings, pin: Pin, staging: Path, progress: Progress, *, forks: int) -> Ready:
    fetched = fetch_pinned(
        pin,
        str(pin.origin),
        dest=staging / f"{pin.sha256}.whl",
        policy=settings.fetch_policy(),
        progress=progress,
        verify_files=False,
    )
    try:
        return ready(
            pin,
            fetched.path,
            staging=staging,
            threads=settings.extract_threads,
            forks=forks,
            progress=progress,
            fetched=fetched,
            verified=False,
        )
    except WheelDigestMismatch as error:
        # The same as for a file that came from elsewhere.
        raise WheelHashMismatch(
            error.what, where=fetched.url, expected=error.expected, found=error.found, remedy=error.remedy
        ) from error
