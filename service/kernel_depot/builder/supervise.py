"""Run one command within limits, and nothing of it any longer than the process that asked for it.

A program of its own, standard library only: `python -I -S supervise.py` reads one line of JSON, the
order, from standard input and writes one line, the outcome, to standard output. It must lead a session of
its own, which the command shares; when the order's sender closes standard input or dies, or a limit is
passed, every process of the session is killed.
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
_POLL_SECONDS = 0.25
_GRACE_SECONDS = 5.0


def main() -> None:
    """Carry out the order on standard input."""
    order = json.loads(sys.stdin.buffer.readline())
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
            used = memory_of_session(os.getpid())
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


def memory_of_session(session: int) -> int:
    """Return the resident bytes of a session's processes but its leader (proc(5), fields 6 and 24)."""
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(int(fields[21]) * page for _, fields in _members(session))


def _members(session: int) -> list[tuple[int, list[str]]]:
    found: list[tuple[int, list[str]]] = []
    for entry in Path("/proc").iterdir():
        name = entry.name
        if not name.isdigit() or int(name) == session:
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in ("Z", "X"):
            found.append((int(name), fields))
    return found


def _end(process: subprocess.Popen[bytes], *, gently: bool) -> None:
    """End the command and all it started; ninja, when asked gently, removes half-written files."""
    if gently and process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    while members := _members(os.getpid()):
        for pid, _ in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.01)
    process.wait()


if __name__ == "__main__":
    main()
