"""Names for processes, so that whoever finds what one left behind can tell whether it still lives.

A name is `<boot>.<pid namespace>.<pid>.<start>.<random>`: the kernel's boot id, the inode of the PID
namespace, the PID and the start time in clock ticks since boot (proc(5), /proc/PID/stat field 22).
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of this boot of the machine, 32 hexadecimal digits."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def process_name() -> str:
    """Return a new name that this process can be recognized by."""
    pid = int(Path("/proc/self").readlink().name)
    return f"{boot_id()}.{_namespace()}.{pid}.{_start_of(pid)}.{os.urandom(6).hex()}"


def is_dead(name: str) -> bool | None:
    """Tell whether the process of that name is gone; None when it cannot be told from here."""
    parts = name.split(".")
    if len(parts) != 5 or not parts[2].isdigit():
        return None
    boot, namespace, pid, start, _ = parts
    if boot != boot_id() or namespace != _namespace():
        return None
    return _start_of(int(pid)) != start


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def _start_of(pid: int) -> str | None:
    """Return a live process's start time, None for one that is gone or only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]
