"""Job slots that several ninjas share: a named pipe with one byte a slot (GNU make 4.4, jobserver)."""

from __future__ import annotations

import os
import select
from pathlib import Path
from threading import Event, Lock
from types import TracebackType

_POLL_SECONDS = 0.2


class Slots:
    """`count` slots. Each module takes one; its ninja takes more while others leave them free."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self._count = count
        self._active = 0
        self._lock = Lock()

    def __enter__(self) -> Slots:
        os.mkfifo(self.path, 0o600)
        self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._refill()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._pipe)
        self.path.unlink(missing_ok=True)

    def take(self, stop: Event) -> bool:
        """Wait for a slot; False when `stop` is set first."""
        while not stop.is_set():
            with self._lock:
                try:
                    if os.read(self._pipe, 1):
                        self._active += 1
                        return True
                except BlockingIOError:
                    pass
            select.select([self._pipe], [], [], _POLL_SECONDS)
        return False

    def give(self) -> None:
        """Give a slot back. When no module is under way, those that a killed ninja kept come back too."""
        with self._lock:
            self._active -= 1
            if self._active:
                os.write(self._pipe, b"+")
            else:
                self._refill()

    def _refill(self) -> None:
        try:
            while os.read(self._pipe, 4096):
                pass
        except BlockingIOError:
            pass
        os.write(self._pipe, b"+" * self._count)
