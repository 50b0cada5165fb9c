"""Where the files shipped beside the code lie: in a source checkout or inside the installed package."""

from __future__ import annotations

from pathlib import Path


def shipped_dir(name: str) -> Path:
    """Return the directory `pins`, `builds` or `migrations`, wherever this installation keeps it."""
    package = Path(__file__).resolve().parent
    packed = package / "_shipped" / name
    if packed.is_dir():
        return packed
    return package.parents[1] / name
