"""Waiting for the fleet's version to change, without a thread or a query for each node that waits."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from threading import Lock
from typing import Final

from sqlalchemy import Engine
from starlette.concurrency import run_in_threadpool

from kernel_depot.catalog.changes import fleet_version
from kernel_depot.catalog.database import reading
from kernel_depot.catalog.tables import Node
from kernel_depot.fleet.desired import Outlook, Wanted, look, wanted_of
from kernel_depot.fleet.errors import NodeUnknown

EVERY: Final = 0.5
"""Seconds between looks at the version, by one task of the process, while nodes wait."""

_REMEMBERED: Final = 60.0
"""Seconds for which a node's own facts are believed; another server may have taken new ones meanwhile."""

_WOKEN_A_SECOND: Final = 125
"""Nodes that are woken in a second when something changes, so that others are still heard meanwhile."""

_LONGEST_WAKING: Final = 30.0
_BEGUN_A_SECOND: Final = 20
"""Nodes that a server can bear to begin a sync in a second; told of by `spread`."""

_LONGEST_SPREAD: Final = 240.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Remembered:
    wanted: Wanted
    until: float


class Watch:
    """The fleet as this server process sees it; `outlook` and `facts` may be used from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outlook: Outlook | None = None
        self._nodes: dict[str, _Remembered] = {}
        self._lock = Lock()
        self._version = -1
        self._changed = asyncio.Event()
        self._closed = asyncio.Event()
        self._waiting = 0
        self._crowd = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def spread(self) -> float:
        """Seconds over which nodes are to spread what they begin, for the number that waited lately."""
        crowd = max(self._crowd, self._waiting)
        return min(crowd / _BEGUN_A_SECOND, _LONGEST_SPREAD) if crowd > _BEGUN_A_SECOND else 0.0

    def close(self) -> None:
        """Let nobody wait any longer: the server ends."""
        self._closed.set()
        self._changed.set()

    def followed(self) -> Outlook | None:
        """Return the picture at the version that is followed while nodes wait, without a query, if any."""
        outlook = self._outlook
        following = self._task is not None and not self._task.done()
        return outlook if following and outlook is not None and outlook.version == self._version else None

    def outlook(self, *, version: int | None = None) -> Outlook:
        """Return the picture at `version`, or at the version that the catalog has now."""
        if version is None:
            with reading(self._engine) as session:
                version = fleet_version(session)
        with self._lock:
            if self._outlook is None or self._outlook.version < version:
                self._outlook = look(self._engine)
            return self._outlook

    def known_facts(self, name: str) -> Wanted | None:
        """Return what a node said of itself, when that is remembered."""
        known = self._nodes.get(name)
        return known.wanted if known is not None and known.until > time.monotonic() else None

    def facts(self, name: str, *, fresh: bool = False) -> Wanted:
        """Return what a node said of itself. Raise NodeUnknown."""
        moment = time.monotonic()
        known = self._nodes.get(name)
        if known is not None and not fresh and known.until > moment:
            return known.wanted
        with reading(self._engine) as session:
            node = session.get(Node, name)
        if node is None:
            raise NodeUnknown(
                f"no node {name!r} has registered",
                where="nodes",
                found=name,
                remedy="register it: PUT /v1/nodes/{name}, as `kernel-depot agent` does",
            )
        wanted = wanted_of(node)
        self._nodes[name] = _Remembered(wanted, moment + _REMEMBERED)
        return wanted

    def forget(self, name: str) -> None:
        """Drop what is remembered of a node, which has said something new."""
        self._nodes.pop(name, None)

    async def changed(self, seen: int, *, timeout: float) -> bool:
        """Wait until the version is another than `seen`; False when `timeout` seconds passed first."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        self._waiting += 1
        try:
            until = asyncio.get_running_loop().time() + timeout
            while self._version <= seen:
                left = until - asyncio.get_running_loop().time()
                if left <= 0 or self._closed.is_set():
                    return False
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except (TimeoutError, asyncio.TimeoutError):
                    return self._version > seen
            waking = min(self._crowd / _WOKEN_A_SECOND, _LONGEST_WAKING)
            if waking > 0.1 and not self._closed.is_set():
                await asyncio.sleep(random.random() * waking)  # noqa: S311
            return True
        finally:
            self._waiting -= 1

    async def _look(self) -> None:
        """Follow the version while anybody waits."""
        idle = 0
        while idle < 4:
            idle = 0 if self._waiting else idle + 1
            try:
                version = await run_in_threadpool(self._read)
            except Exception:
                _log.exception("the fleet's version could not be read")
            else:
                if version != self._version:
                    self._crowd = self._waiting
                    self._version = version
                    self._changed.set()
                    self._changed = asyncio.Event()
            await asyncio.sleep(EVERY)

    def _read(self) -> int:
        with reading(self._engine) as session:
            return fleet_version(session)
