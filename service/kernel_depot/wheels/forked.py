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
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO, Any, Generic, NoReturn, TypeVar

from kernel_depot.errors import DepotError

_PR_SET_PDEATHSIG = 1  # prctl(2)

_Value = TypeVar("_Value")


class ChildDied(DepotError):
    """A child process ended without an answer: it was killed, or ran out of memory."""

    slug = "child-died"
    title = "A child process died"
    status = 500


def may_fork() -> bool:
    """Tell whether this process has one thread, so that a child finds no lock held for ever.

    Threads of libraries count too (an S3 client's), which Python knows nothing of.
    """
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208


class Forked(Generic[_Value]):
    """A call under way in a child, which dies with the thread that started it. Reap it in every case."""

    def __init__(self, call: Callable[[], _Value], *, then: Callable[[_Value], None] | None = None) -> None:
        """Start `call` in a child; its value, or the exception it raises, must be picklable.

        `then` is what the child does with the value, which it has at hand, once `proceed` says so.
        """
        parent = os.getpid()
        reader, writer = os.pipe()
        heard, said = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reader)
            os.close(said)
            _serve(call, then, writer, heard, parent)
        os.close(writer)
        os.close(heard)
        self._reader = open(reader, "rb")  # noqa: SIM115
        self._said = said

    def wait(self, seconds: float) -> bool:
        """Wait for so long at most; tell whether the child has begun to answer."""
        return bool(select.select([self._reader], [], [], seconds)[0])

    def result(self) -> _Value:
        """Wait for the value and return it. Raise what the call raised, or ChildDied."""
        value: _Value = self._answer()
        return value

    def proceed(self) -> None:
        """After `result`: let the child do what is to be done then, and wait for it. Raise as `result`."""
        os.write(self._said, b"1")
        self._answer()

    def _answer(self) -> Any:
        try:
            # Bytes that our own child made a moment ago, not bytes from elsewhere.
            value, error = pickle.load(self._reader)  # noqa: S301
        except (EOFError, pickle.UnpicklingError) as torn:
            raise ChildDied(
                "a child process ended without an answer",
                where=f"pid {self._pid}",
                remedy="look for the kernel's out-of-memory killer, and run the command again",
            ) from torn
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the child, at once if it is still at work, and reap it; children of its own die with it."""
        if self._reader.closed:
            return
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._reader.close()
        os.close(self._said)
        os.waitpid(self._pid, 0)


def _serve(
    call: Callable[[], _Value],
    then: Callable[[_Value], None] | None,
    writer: int,
    heard: int,
    parent: int,
) -> NoReturn:
    """Run the calls in the child and write their outcomes; nothing of the parent's is flushed or closed."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            with open(writer, "wb") as answers:
                value = _tell(call, answers)
                if value is not None and then is not None and os.read(heard, 1):
                    _tell(partial(then, value), answers)
    finally:
        os._exit(0)


def _tell(call: Callable[[], _Value], answers: IO[bytes]) -> _Value | None:
    value: _Value | None = None
    failure: BaseException | None = None
    try:
        value = call()
    except BaseException as error:
        failure = error
    pickle.dump((value, failure), answers, protocol=5)
    answers.flush()
    return value
