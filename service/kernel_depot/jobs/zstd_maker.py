"""Makes the zstd forms of blobs in the background, one maker at a time however many servers share a store.

What is left to do is in the catalog (`blob.zstd_state`), so a maker that dies is simply followed by another.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from threading import Event, Thread, get_native_id

from kernel_depot.catalog import leases, queries, record
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import Blob
from kernel_depot.errors import DepotError
from kernel_depot.jobs.depot import Depot
from kernel_depot.store.blobs import Form
from kernel_depot.store.errors import BlobMissing
from kernel_depot.store.zstd_forms import ZstdForm, compress

_log = logging.getLogger(__name__)

_BATCH_BLOBS = 256
_BATCH_BYTES = 256 << 20
_IDLE = 15.0  # seconds between looks, for what another server ingested
_NICENESS = 10


class ZstdMaker:
    """A thread of low priority; `wake` tells it that there may be work."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self._work = Event()
        self._stop = Event()
        self._thread = Thread(target=self._run, name="zstd forms", daemon=True)

    def start(self) -> None:
        """Begin with what is pending."""
        self._work.set()
        self._thread.start()

    def wake(self) -> None:
        """Look for work now."""
        self._work.set()

    def close(self) -> None:
        """Stop after the blob under way."""
        self._stop.set()
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICENESS)
        while not self._stop.is_set():
            self._work.clear()
            try:
                make_pending(self._depot, stop=self._stop)
                self._depot.store.settle()
            except DepotError as error:
                _log.warning("zstd forms wait: %s", error.what)
            except Exception:
                _log.exception("zstd forms wait")
            self._work.wait(_IDLE)


def make_pending(depot: Depot, *, stop: Event | None = None) -> int:
    """Make every pending zstd form, unless another process is at it; return how many blobs were tried."""
    lease = leases.acquire(depot.engine, "zstd", seconds=depot.settings.lease_seconds)
    if not isinstance(lease, leases.Acquired):
        return 0
    tried = 0
    with leases.kept(depot.engine, lease, seconds=depot.settings.lease_seconds):
        while stop is None or not stop.is_set():
            with reading(depot.engine) as session:
                pending = queries.pending_zstd(session, limit=_BATCH_BLOBS)
            if not pending:
                break
            tried += _make(depot, pending, stop)
    return tried


def _make(depot: Depot, pending: Sequence[Blob], stop: Event | None) -> int:
    """Make the forms of one batch: publish them together, then record them."""
    made: list[tuple[str, ZstdForm | None]] = []
    room = _BATCH_BYTES
    with depot.store.staging() as staging:
        for blob in pending:
            if room <= 0 or (stop is not None and stop.is_set()):
                break
            room -= blob.size
            try:
                made.append(
                    (blob.sha256, compress(depot.store, blob.sha256, size=blob.size, staging=staging))
                )
            except BlobMissing:
                made.append((blob.sha256, None))
        depot.store.publish_many([form.staged for _, form in made if form is not None], form=Form.ZSTD)
    with writing(depot.engine) as session:
        for sha256, form in made:
            if form is None:
                record.record_zstd(session, sha256, state="not_worth")
            else:
                record.record_zstd(
                    session,
                    sha256,
                    state="made",
                    size=form.staged.size,
                    form_sha256=form.form_sha256,
                )
    return len(made)
