"""Start commands under `supervise`, and stop them when the build is stopped."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

TAIL_LINES = 30
_TAIL_BYTES = 1 << 16
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended. `exit` is negative for a signal; `peak` is bytes, all its processes together.

    `reason` is memory, time or stopped for one that was ended, None for one that ended by itself.
    `isolated` tells whether it had no network.
    """

    exit: int
    reason: str | None
    peak: int
    seconds: float
    isolated: bool


def run(
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    log: Path,
    memory: int,
    seconds: float,
    stop: Event | None = None,
) -> Outcome:
    """Run a command to its end, its output appended to `log`. `memory` is bytes.

    When `stop` is set, or this process ends in whatever way, the command and all it started are killed.
    """
    order = {
        "command": list(command),
        "cwd": str(cwd),
        "environment": dict(environment),
        "log": str(log),
        "memory": memory,
        "seconds": seconds,
    }
    script = Path(__file__).with_name("supervise.py")
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"LC_ALL": "C.UTF-8"},
        start_new_session=True,
    ) as process:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise AssertionError("pipes were asked for")
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            while not select.select([process.stdout], [], [], _POLL_SECONDS)[0]:
                if stop is not None and stop.is_set():
                    process.stdin.close()
                    break
            said = process.stdout.read()
            errors = process.stderr.read()
        except BaseException:
            process.stdin.close()
            raise
    if not said:
        with log.open("ab") as file:
            file.write(errors)
        return Outcome(process.returncode or -1, None, 0, 0.0, isolated=False)
    return Outcome(**json.loads(said))


def tail(log: Path) -> list[str]:
    """Return the last lines of a log, none when there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line[:400] for line in text.splitlines()[-TAIL_LINES:]]
