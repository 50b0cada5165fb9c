"""Numeric cases of many modules, one after another in a child process, and in another after each crash."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

from kernel_depot.kernels.memory import Device
from kernel_depot.smoke.process import death
from kernel_depot.smoke.report import Outcome, Status

CHECK: Final = "numeric"
NEEDED: Final = {"tvm_ffi": "apache-tvm-ffi", "numpy": "numpy"}
START: Final = 120.0
"""Seconds that a child may take at least before its first case: it imports numpy and wakes the GPU."""

DEVICE_LOST: Final = 3
"""Exit status of a child whose device cannot be used any more; the outcome that it told last says why."""

CRASHES: Final = 2
"""After so many crashes of one module its other cases are not run."""


def lacking() -> str | None:
    """Say what numeric cases need and this environment lacks; None when all is there."""
    lacks = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    return f"needs {' and '.join(lacks)}: pip install 'kernel-depot[kernels]'" if lacks else None


def judge(
    cache: Path, bundle: str, modules: Sequence[str], *, device: Device, timeout: float
) -> list[Outcome]:
    """Run every case of these modules of a bundle, on a device. `timeout` is seconds for one case.

    Modules must have cases (families.parameters_of). Whatever a case does to its process is its outcome:
    `crashed` also for one that does not end in time.
    """
    progress = _Progress(list(modules))
    while progress.rest:
        child = _Child(
            {
                "cache": str(cache),
                "bundle": bundle,
                "device": [device.type, device.id],
                "modules": [(name, progress.number * (not at)) for at, name in enumerate(progress.rest)],
            }
        )
        try:
            _follow(child, progress, timeout=timeout)
        finally:
            child.end()
    return progress.outcomes


class _Progress:
    """What is done: `rest` are the modules that are not, `number` the next case of the first of them."""

    def __init__(self, modules: list[str]) -> None:
        self.rest = modules
        self.number = 0
        self.outcomes: list[Outcome] = []
        self._crashes = 0

    def ended(self, outcome: Outcome) -> None:
        """Count a case that ended, however."""
        self.outcomes.append(outcome)
        self.number += 1
        if outcome.status is Status.CRASHED:
            self._crashes += 1
            if self._crashes >= CRASHES:
                why = f"the cases behind it were not run, after {CRASHES} crashes"
                self.outcomes.append(Outcome(CHECK, self.rest[0], Status.SKIPPED, why))
                self.next_module()

    def next_module(self) -> None:
        """Go on to the next module."""
        self.rest = self.rest[1:]
        self.number = self._crashes = 0

    def give_up(self, status: Status, detail: str) -> None:
        """End all that is left with one outcome a module."""
        self.outcomes += [Outcome(CHECK, name, status, detail) for name in self.rest]
        self.rest = []


def _follow(child: _Child, progress: _Progress, *, timeout: float) -> None:
    """Take a child's outcomes until it ends, or has to be ended."""
    ready = False
    begun: tuple[str, float] | None = None
    while progress.rest:
        said = child.next(timeout if ready else max(timeout, START))
        event = said["event"]
        if event == "ready":
            ready = True
        elif event == "begin":
            begun = said["case"], time.monotonic()
        elif event == "end" and begun is not None:
            progress.ended(_outcome(progress.rest[0], begun[0], said))
            begun = None
        elif event == "done":
            progress.next_module()
        elif event == "fatal":
            progress.give_up(Status.REFUSED, said["detail"])
        elif begun is not None:
            seconds = time.monotonic() - begun[1]
            progress.ended(
                Outcome(CHECK, progress.rest[0], Status.CRASHED, said["detail"], seconds, case=begun[0])
            )
            return
        elif said.get("status") == DEVICE_LOST and ready:
            return
        elif ready:
            progress.outcomes.append(
                Outcome(CHECK, progress.rest[0], Status.CRASHED, f"between its cases: {said['detail']}")
            )
            progress.next_module()
            return
        else:
            progress.give_up(Status.CRASHED, f"before the first case: {said['detail']}")


def _outcome(module: str, case: str, said: dict[str, Any]) -> Outcome:
    return Outcome(
        CHECK,
        module,
        Status(said["status"]),
        said["detail"],
        said["seconds"],
        expected=said.get("expected"),
        found=said.get("found"),
        case=case,
        error=said.get("error"),
        limit=said.get("limit"),
    )


class _Child:
    """A process that runs cases, and the thread that reads what it says."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kernel_depot.smoke.numerics.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(job).encode())

    def next(self, timeout: float) -> dict[str, Any]:
        """Return what it says next. A dead one says `dead`, one silent for `timeout` seconds `silent`."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            return {"event": "silent", "detail": f"no answer in {timeout:g} s"}
        if line:
            members: dict[str, Any] = json.loads(line)
            return members
        status = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        return {"event": "dead", "status": status, "detail": ": ".join([death(status), *last])}

    def end(self) -> None:
        """Leave nothing of it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(b"")
