"""Where a node keeps its kernels when nothing else is said."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    """Return `KERNEL_DEPOT_CACHE`, else the user's cache directory (XDG Base Directory Specification)."""
    if chosen := os.environ.get("KERNEL_DEPOT_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kernel-depot"
