"""Become another program: no process is left in between."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from kernel_depot.worker.errors import ProgramNotRun


def become(command: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Replace this process by `command`, found on the PATH of `variables`. Raise ProgramNotRun."""
    # Python ignores these, and what is ignored stays so through exec: `CMD | head` would never end.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), dict(variables))  # noqa: S606
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        raise ProgramNotRun(
            f"the program cannot be run: {error.strerror}",
            exit_status=127 if missing else 126,
            where=command[0],
            remedy="give its path, or put its directory on PATH" if missing else None,
        ) from error
