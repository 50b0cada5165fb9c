"""Which of a cache's files running processes have mapped or open."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kernel_depot.digest import is_sha256
from kernel_depot.worker.cache import Cache

_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Usage:
    """Bundles whose views, and blobs whose files, are in use. `unseen`: processes that do not let us look."""

    bundles: frozenset[str]
    blobs: frozenset[str]
    unseen: int


def usage(cache: Cache) -> Usage:
    """Look through /proc: mappings, open files, working directories, environments and arguments.

    A mapped file is told by its inode too.

    A blob and its names in views are hard links of one file, so its inode finds it whatever name was mapped.
    """
    by_inode = _inodes(cache)
    views = f"{cache.views}/"
    bundles: set[str] = set()
    blobs: set[str] = set()
    unseen = 0
    for process in _processes():
        try:
            for path, identity in _files(process):
                if path.startswith(views):
                    digest = path[len(views) :].split("/", 1)[0]
                    if is_sha256(digest):
                        bundles.add(digest)
                if identity in by_inode:
                    blobs.add(by_inode[identity])
            bundles |= _given(process, views)
        except PermissionError:
            unseen += 1
        except OSError:
            continue
    return Usage(frozenset(bundles), frozenset(blobs), unseen)


def _inodes(cache: Cache) -> dict[tuple[int, int], str]:
    found: dict[tuple[int, int], str] = {}
    for path in cache.blobs.glob("*/*"):
        if is_sha256(path.name):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            found[facts.st_dev, facts.st_ino] = path.name
    return found


def _processes() -> Iterator[Path]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            yield entry


def _given(process: Path, views: str) -> set[str]:
    """Return the bundles whose views a process was given, in its environment or its arguments.

    It may not have opened a file of them yet, and will.
    """
    text = (process / "environ").read_bytes() + b"\0" + (process / "cmdline").read_bytes()
    found = re.findall(re.escape(os.fsencode(views)) + rb"([0-9a-f]{64})", text)
    return {digest.decode() for digest in found}


def _files(process: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Give each mapped or open path with its device and inode. Raise PermissionError, OSError."""
    for line in (process / "maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] != "0":
            major, _, minor = fields[3].partition(":")
            device = os.makedev(int(major, 16), int(minor, 16))
            yield fields[5].removesuffix(" (deleted)"), (device, int(fields[4]))
    links = [process / "cwd", *(process / "fd").iterdir()]
    for link in links:
        try:
            facts = link.stat()
            yield str(link.readlink()), (facts.st_dev, facts.st_ino)
        except FileNotFoundError:
            continue
