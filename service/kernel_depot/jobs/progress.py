"""How a wheel's way into the store is told to whoever watches: a terminal, a log, a job's row."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from time import monotonic
from typing import Protocol


class Stage(str, Enum):
    """The steps of a wheel, in their order."""

    WAITING = "waiting"
    FETCHING = "fetching"
    EXTRACTING = "extracting"
    PUBLISHING = "publishing"
    RECORDING = "recording"

    def __str__(self) -> str:
        return self.value


_STAGES = tuple(Stage)
_STEP = struct.Struct("=BQQQQ")


@dataclass(frozen=True, slots=True)
class Step:
    """Where a wheel is. Bytes are those of the stage: downloaded or unpacked."""

    filename: str
    stage: Stage
    bytes_done: int = 0
    bytes_total: int | None = None
    members_done: int = 0
    members_total: int | None = None
    note: str | None = None


class Progress(Protocol):
    """Whoever watches; called from any thread, one call at a time for one wheel."""

    def __call__(self, step: Step) -> None:
        """Take note of where a wheel is."""


def silent(step: Step) -> None:
    """Watch nothing."""


class Throttled:
    """Passes on a change of stage at once, and otherwise at most one step in `seconds`."""

    def __init__(self, target: Progress, *, seconds: float) -> None:
        self._target = target
        self._seconds = seconds
        self._lock = Lock()
        self._last: dict[str, tuple[Stage, float]] = {}

    def __call__(self, step: Step) -> None:
        """Pass the step on, or not."""
        with self._lock:
            stage, moment = self._last.get(step.filename, (None, 0.0))
            if stage is step.stage and monotonic() - moment < self._seconds:
                return
            self._last[step.filename] = (step.stage, monotonic())
        self._target(step)


class SharedStep:
    """The latest step of one wheel, in memory that a forked child process writes and its parent reads."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _STEP.size)

    def __call__(self, step: Step) -> None:
        """Note the step. Totals that are not known are noted as 0."""
        stage = _STAGES.index(step.stage) + 1
        totals = (step.bytes_total or 0, step.members_total or 0)
        _STEP.pack_into(self._memory, 0, stage, step.bytes_done, step.members_done, *totals)

    def read(self, filename: str) -> Step | None:
        """Return the step noted last, None before the first; a figure may be of the step before it."""
        stage, bytes_done, members_done, bytes_total, members_total = _STEP.unpack_from(self._memory)
        if not stage:
            return None
        return Step(
            filename, _STAGES[stage - 1], bytes_done, bytes_total or None, members_done, members_total or None
        )
