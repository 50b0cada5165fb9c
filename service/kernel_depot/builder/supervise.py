"""Run one command within limits, and nothing of it any longer than the process that asked for it.

A program of its own, standard library only: `python -I -S supervise.py` reads one line of JSON, the
order, from standard input and writes one line, the outcome, to standard output. When the order's sender
closes standard input or dies, when a limit is passed and when the command has ended, every process that
came of it is killed: orphans among them become children of this one (PR_SET_CHILD_SUBREAPER, prctl(2)).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_CLONE_NEWUSER = 0x10000000  # unshare(2)
_CLONE_NEWNET = 0x40000000
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_POLL_SECONDS = 0.25
_GRACE_SECONDS = 5.0


def main() -> None:
    """Carry out the order on standard input."""
    order = json.loads(sys.stdin.buffer.readline())
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print(json.dumps(run(order, isolated=leave_network())), flush=True)


def leave_network() -> bool:
    """Move into a network namespace without interfaces (unshare(2)); False where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) == 0:
        return True
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    except OSError:
        pass  # files are then owned as before, only named "nobody" by what runs inside
    return True


def run(order: dict[str, Any], *, isolated: bool) -> dict[str, Any]:
    """Run the order's command; its output goes to the order's log.

    `reason` says why it was ended: memory, time, stopped, or null when it ended by itself.
    """
    started = time.monotonic()
    with Path(order["log"]).open("ab") as log:
        process = subprocess.Popen(
            order["command"],
            cwd=order["cwd"],
            env=order["environment"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    reason: str | None = None
    peak = 0
    exited = os.pidfd_open(process.pid)
    try:
        while process.poll() is None:
            ready, _, _ = select.select([sys.stdin, exited], [], [], _POLL_SECONDS)
            if exited in ready:
                continue
            used = memory_of_descendants()
            peak = max(peak, used)
            if sys.stdin in ready:
                reason = "stopped"
            elif used > order["memory"]:
                reason = "memory"
            elif time.monotonic() - started > order["seconds"]:
                reason = "time"
            if reason is not None:
                _end(process, gently=True)
    finally:
        _end(process, gently=False)
        os.close(exited)
    return {
        "exit": process.returncode,
        "reason": reason,
        "peak": peak,
        "seconds": round(time.monotonic() - started, 3),
        "isolated": isolated,
    }


def memory_of_descendants() -> int:
    """Return the resident bytes of all processes that came of this one (proc(5), field 24)."""
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(int(fields[21]) * page for fields in _descendants().values())


def _descendants() -> dict[int, list[str]]:
    """Return what /proc/PID/stat tells of each live process that came of this one, from field 3 on."""
    everyone: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                everyone[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
    family = {os.getpid()}
    grown = True
    while grown:
        children = {pid for pid, fields in everyone.items() if int(fields[1]) in family}
        grown = not children <= family
        family |= children
    family.discard(os.getpid())
    return {pid: everyone[pid] for pid in family if everyone[pid][0] not in ("Z", "X")}


def _end(process: subprocess.Popen[bytes], *, gently: bool) -> None:
    """End the command and all it started; ninja, when asked gently, removes half-written files."""
    if gently and process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    while members := _descendants():
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    process.wait()
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
