"""A call in a forked child process: a second interpreter with a lock of its own, and no imports to repeat.

For programs of one thread only: what other threads hold at the moment of the fork, the child never gets.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, NoReturn, TypeVar

from kernel_depot.errors import DepotError

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PIECE = 1 << 20

_Value = TypeVar("_Value")


class ChildDied(DepotError):
    """A child process ended without an answer: it was killed, or ran out of memory."""

    slug = "child-died"
    title = "A child process died"
    status = 500


def may_fork() -> bool:
    """Tell whether this process has one thread, so that a child finds no lock held for ever."""
    return sys.platform == "linux" and threading.active_count() == 1


class Forked(Generic[_Value]):
    """A call under way in a child, which dies with the thread that started it. Reap it in every case."""

    def __init__(self, call: Callable[[], _Value]) -> None:
        """Start `call` in a child; its value, or the exception it raises, must be picklable."""
        parent = os.getpid()
        reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reader)
            _serve(call, writer, parent)
        os.close(writer)
        self._reader = reader

    def wait(self, seconds: float) -> bool:
        """Wait for so long at most; tell whether the child has begun to answer."""
        return bool(select.select([self._reader], [], [], seconds)[0])

    def result(self) -> _Value:
        """Wait for the value and return it. Raise what the call raised, or ChildDied."""
        data = bytearray()
        while piece := os.read(self._reader, _PIECE):
            data += piece
        status = self._reap()
        if not data:
            raise ChildDied(
                "a child process ended without an answer",
                where=f"pid {self._pid}",
                found=f"exit status {os.waitstatus_to_exitcode(status)}",
                remedy="look for the kernel's out-of-memory killer, and run the command again",
            )
        # Bytes that our own child made a moment ago, not bytes from elsewhere.
        value, error = pickle.loads(data)  # noqa: S301
        if error is not None:
            raise error
        result: _Value = value
        return result

    def abandon(self) -> None:
        """Kill the child if it still runs, and reap it; children of its own die with it."""
        if self._reader >= 0:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> int:
        os.close(self._reader)
        self._reader = -1
        return os.waitpid(self._pid, 0)[1]


def _serve(call: Callable[[], _Value], writer: int, parent: int) -> NoReturn:
    """Run the call in the child and write its outcome; nothing of the parent's is flushed or closed."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            outcome: tuple[object, BaseException | None]
            try:
                outcome = (call(), None)
            except BaseException as error:
                outcome = (None, error)
            view = memoryview(pickle.dumps(outcome, protocol=5))
            while view:
                view = view[os.write(writer, view) :]
    finally:
        os._exit(0)
