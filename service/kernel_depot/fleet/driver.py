"""The thread of a server that drives warmups: each server has one, and any goes on with any warmup."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from threading import Event, Thread
from types import TracebackType
from typing import Final

from sqlalchemy import Engine

from kernel_depot.catalog.database import reading
from kernel_depot.fleet import warmups

_EVERY: Final = 1.0
_log = logging.getLogger(__name__)


class WarmupDriver(AbstractContextManager["WarmupDriver"]):
    """Drives the open warmups of a catalog while the block runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._done = Event()
        self._thread = Thread(target=self._work, name="warmups", daemon=True)

    def __enter__(self) -> WarmupDriver:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._done.wait(_EVERY):
            try:
                with reading(self._engine) as session:
                    open_ids = warmups.open_ids(session)
                for warmup_id in open_ids:
                    warmups.step(self._engine, warmup_id)
            except Exception:
                _log.exception("warmups could not be driven")
