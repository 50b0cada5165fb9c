"""Materialize pin set files in this process, as quickly as the machine allows.

The catalog's libraries take most of a second to import. Wheels that lie on this machine are extracted
meanwhile: that needs no catalog, and the store itself says when a wheel is there already.
"""

from __future__ import annotations

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
from kernel_depot.store.blobs import Store
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
            publish = partial(_publish, store, pin) if store.publishes_by_rename else None
            child = Forked(begin, then=publish)
            stack.callback(child.close)
            yield _Begun(pin, partial(_follow, child, pin, told, progress, publishes=publish is not None))
        else:
            pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="ahead"))
            yield _Begun(pin, pool.submit(_begin, settings, pin, staging, progress, forks=0).result)


def _follow(
    child: Forked[Ready], pin: Pin, told: SharedStep, progress: Progress, *, publishes: bool
) -> Ready:
    """Pass on what a child tells of its progress until it is done."""
    while not child.wait(_GLANCE):
        step = told.read(pin.filename)
        if step is not None:
            progress(step)
    work = child.result()
    return replace(work, publish=child.proceed) if publishes else work


def _publish(store: Store, pin: Pin, work: Ready) -> None:
    """Publish in the child: thousands of renames beside the parent's thousands of rows."""
    store.publish_many(work.staged(sha256=pin.sha256))


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
