"""How a wheel's way into the store is told to whoever watches: a terminal, a log, a job's row."""

from __future__ import annotations

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
