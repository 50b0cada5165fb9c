"""A check in a process of its own: whatever happens to that process, here it is an outcome."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

from kernel_depot.smoke.report import Outcome, Status


def run_child(case: dict[str, Any], *, check: str, subject: str, timeout: float) -> Outcome:
    """Run one case in a child process: whatever it does to that process, here it is an outcome."""
    started = time.monotonic()
    command = [sys.executable, "-m", "kernel_depot.smoke.child"]
    try:
        child = subprocess.run(
            command, input=json.dumps(case).encode(), capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(
            check, subject, Status.CRASHED, f"no answer in {timeout:g} s", time.monotonic() - started
        )
    seconds = time.monotonic() - started
    try:
        answer = json.loads(child.stdout)
        return Outcome(check, subject, Status(answer["status"]), str(answer["detail"]), seconds)
    except (ValueError, KeyError, TypeError):
        last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return Outcome(check, subject, Status.CRASHED, ": ".join([death(child.returncode), *last]), seconds)


def death(code: int) -> str:
    """Say how a process ended: its status, or the signal's name."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
