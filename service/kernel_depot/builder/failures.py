"""From a compiler's log to the error that names the module and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

from kernel_depot.builder.errors import (
    BuildDiskFull,
    BuildError,
    CompileFailed,
    CompilerOutOfMemory,
    CompileTimeout,
    HeaderMissing,
    LibraryMissing,
    SmUnsupported,
)
from kernel_depot.builder.plan import Limits
from kernel_depot.builder.supervised import Outcome, tail

_HEADER = re.compile(r"fatal error: ([^\s:]+): No such file or directory")
_LIBRARY = re.compile(r"cannot find -l([^\s:]+)")
_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded")
_NO_MEMORY = re.compile(
    r"died due to signal 9|Killed signal terminated program|virtual memory exhausted|"
    r"[Oo]ut of memory|std::bad_alloc|Cannot allocate memory"
)
_NO_TARGET = re.compile(
    r"Unsupported gpu architecture '([^']+)'|'([^']+)' is not defined for option 'gpu-name'"
)
_FIRST_ERROR = re.compile(r"(?:^|: )(?:fatal )?error\b", re.I)
_PARTS = (("cublas", "cublas"), ("curand", "curand"), ("nvrtc", "nvrtc"))


def failure(uri: str, outcome: Outcome, limits: Limits, *, log: Path) -> BuildError:
    """Return the error for a command that did not succeed."""
    lines = tail(log)
    text = "\n".join(lines)
    where = f"{uri}, log {log}"
    if outcome.reason == "time":
        return CompileTimeout(
            f"{uri} is not compiled after {limits.seconds / 60:g} minutes",
            where=where,
            expected=f"at most {limits.seconds / 60:g} minutes",
            remedy="raise limits.minutes in the plan; the next build goes on where it was",
            module=uri,
            tail=lines,
        )
    if outcome.reason == "memory" or (outcome.exit != 0 and _NO_MEMORY.search(text)):
        over = outcome.reason == "memory"
        return CompilerOutOfMemory(
            f"the compilers of {uri} took more memory than "
            + ("the plan allows" if over else "there was, and were killed"),
            where=where,
            expected=f"at most {limits.memory / (1 << 30):g} GiB" if over else None,
            found=f"{outcome.peak / (1 << 30):.1f} GiB seen",
            remedy="build with fewer --jobs"
            + (", or raise limits.memory_gib in the plan" if over else ", or on a machine with more memory"),
            module=uri,
            tail=lines,
        )
    if _NO_ROOM.search(text):
        return BuildDiskFull(
            f"the disk became full while {uri} was compiled",
            where=where,
            remedy="free space, or choose another --cache directory; finished modules are kept",
            module=uri,
            tail=lines,
        )
    if match := _HEADER.search(text):
        return HeaderMissing(
            f"{uri} includes a header that no directory has: {match[1]}",
            where=where,
            expected=match[1],
            remedy=_remedy(match[1]),
            module=uri,
            tail=lines,
        )
    if match := _LIBRARY.search(text):
        return LibraryMissing(
            f"{uri} is linked against a library that no directory has: {match[1]}",
            where=where,
            expected=f"lib{match[1]}.so",
            remedy=_remedy(match[1]),
            module=uri,
            tail=lines,
        )
    if match := _NO_TARGET.search(text):
        return SmUnsupported(
            f"{uri}: the compiler has no code for {match[1] or match[2]}",
            where=where,
            remedy="choose another SM, or a plan with another CUDA tag",
            module=uri,
            tail=lines,
        )
    first = next((line.strip() for line in lines if _FIRST_ERROR.search(line)), None)
    return CompileFailed(
        f"{uri} does not compile" + (f": {first}" if first else ""),
        where=where,
        found=f"exit {outcome.exit}",
        remedy="read the log; the plan's source, SM and CUDA must fit each other",
        module=uri,
        tail=lines,
    )


def _remedy(name: str) -> str:
    for start, part in _PARTS:
        if name.startswith(start):
            return f'add "{part}" to the plan\'s `needs`, which brings it from its pinned wheel'
    return "install the CUDA or system package that has it"
