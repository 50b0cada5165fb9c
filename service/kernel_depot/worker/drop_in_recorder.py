"""Write down which modules FlashInfer asks for, and whether it finds them built.

Views carry this file as `flashinfer_jit_cache/recorder.py`. It runs in programs that have no kernel-depot, so
it uses the standard library alone. A line of the record is a JSON object: `module`, its URI; `found`, whether
it was there built; `flashinfer`, the version that asked.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

CORE = "flashinfer.jit.core"


class Watcher:
    """Waits in `sys.meta_path`, finds nothing, and leaves once FlashInfer's module class was wrapped."""

    def __init__(self, record: str) -> None:
        self.record = record

    def find_spec(self, *asked: object) -> None:  # noqa: ARG002
        """Look whether FlashInfer's core is imported whole: it imports more after it."""
        core = sys.modules.get(CORE)
        spec = getattr(core, "__spec__", None)
        if core is None or getattr(spec, "_initializing", False):
            return
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            for kind in list(vars(core).values()):
                if isinstance(kind, type) and "build_and_load" in vars(kind):
                    wrap(kind, self.record)


def watch(record: str) -> None:
    """Record what FlashInfer, which is being imported, asks for."""
    sys.meta_path.insert(0, Watcher(record))


def wrap(kind: Any, record: str) -> None:
    """Make a class whose instances are FlashInfer's modules tell when one is loaded or compiled."""
    load = kind.build_and_load

    def build_and_load(self: Any, *arguments: Any, **options: Any) -> Any:
        note(record, module=str(self.name), found=bool(getattr(self, "is_aot", False)))
        return load(self, *arguments, **options)

    kind.build_and_load = build_and_load


def note(record: str, *, module: str, found: bool) -> None:
    """Append one line; a line is one write, so that processes may share the file."""
    package = sys.modules.get("flashinfer")
    version = str(getattr(package, "__version__", ""))
    line = json.dumps({"module": module, "found": found, "flashinfer": version}) + "\n"
    file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
