"""A node's cache directory: verified blobs, manifests, views, and the one link to what is current."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kernel_depot import liveness
from kernel_depot.bundle import Bundle, read_bundle
from kernel_depot.digest import is_sha256, sha256_file
from kernel_depot.errors import DepotError
from kernel_depot.worker.errors import CacheFull, CacheUnusable

FOREIGN_AGE: Final = 24 * 3600.0
"""Seconds after which the private files of a process that cannot be looked up here are taken for dead."""

SETTLED_AGE: Final = 120.0
"""Seconds after which the kernel has begun to write back what was written (by default after 30 s)."""


def storage_error(error: OSError, *, where: Path | str) -> CacheFull | CacheUnusable:
    """Name an operating system error met while writing to the cache."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CacheFull(
            "the disk is full; nothing partial was published",
            where=str(where),
            found=error.strerror,
            remedy="free space, or point --cache at a larger disk, and sync again: what is verified is kept",
        )
    return CacheUnusable(
        "the cache cannot be written",
        where=str(where),
        found=error.strerror or repr(error),
        remedy="give a writable directory with --cache",
    )


class Cache:
    """The directory of `docs/worker.md`; several processes may use one at a time.

    Published names are only ever added. Private names live under `tmp/`, in one directory a process,
    whose name tells whether that process still runs.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.blobs = self.root / "blobs" / "sha256"
        self.bundles = self.root / "bundles"
        self.views = self.root / "views"
        self.current = self.root / "current"
        self.tmp = self.root / "tmp"
        self.unsynced = self.root / "unsynced"

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep collections away while blobs that were found here are relied on; any number may at once."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Wait until nobody relies on blobs, and keep others waiting until this is over."""
        with self._locked(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        try:
            descriptor = os.open(self.blobs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(error, where=self.blobs) from error
        try:
            fcntl.flock(descriptor, kind)  # gone with the process that holds it, however that ends
            yield
        finally:
            os.close(descriptor)

    def touch(self, digest: str) -> None:
        """Note that a bundle was used now, which decides what a collection takes first."""
        with suppress(OSError):
            os.utime(self.bundle_path(digest))

    def prepare(self) -> None:
        """Create what is missing, drop what dead processes left. Raise CacheUnusable or CacheFull."""
        try:
            for directory in (self.blobs, self.bundles, self.views, self.tmp, self.unsynced):
                directory.mkdir(parents=True, exist_ok=True)
            self._drop_dead()
        except OSError as error:
            raise storage_error(error, where=self.root) from error

    def blob_path(self, sha256: str) -> Path:
        """Where a blob's bytes lie once they are verified."""
        return self.blobs / sha256[:2] / sha256

    def bundle_path(self, digest: str) -> Path:
        """Where a manifest lies."""
        return self.bundles / f"{digest}.json"

    def view_dir(self, digest: str) -> Path:
        """The directory of all views of a bundle."""
        return self.views / digest

    def missing(self, sizes: dict[str, int]) -> dict[str, int]:
        """Return the blobs, of those named with their sizes, that are not here whole; opens no file."""
        absent: dict[str, int] = {}
        stat = os.stat
        base = f"{self.blobs}/"
        for sha256, size in sizes.items():
            try:
                if stat(f"{base}{sha256[:2]}/{sha256}").st_size == size:
                    continue
            except FileNotFoundError:
                pass
            absent[sha256] = size
        return absent

    def fan_out(self, sha256s: Iterable[str]) -> None:
        """Create the directories that the blobs named go into."""
        for prefix in {sha256[:2] for sha256 in sha256s}:
            (self.blobs / prefix).mkdir(exist_ok=True)

    def current_digest(self) -> str | None:
        """Return the digest of the bundle that `current` points at, if it points at one."""
        try:
            digest = self.current.readlink().name
        except OSError:
            return None
        return digest if is_sha256(digest) else None

    def bundle(self, digest: str) -> Bundle | None:
        """Read a manifest that is here and whole; None when it is absent or torn."""
        path = self.bundle_path(digest)
        try:
            return read_bundle(path.read_bytes(), digest=digest, where=str(path))
        except FileNotFoundError:
            return None
        except DepotError:
            return None

    @contextmanager
    def private(self) -> Iterator[Path]:
        """Give this use a private directory on the cache's filesystem; it is gone afterwards."""
        try:
            self.tmp.mkdir(parents=True, exist_ok=True)
            directory = self.tmp / _owner()
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise storage_error(error, where=self.tmp) from error
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def write_bundle(self, digest: str, data: bytes, *, private: Path) -> None:
        """Publish a manifest's bytes, which the caller has checked against `digest`."""
        staged = private / f"{digest}.json"
        try:
            _write_synced(staged, data)
            staged.replace(self.bundle_path(digest))
        except OSError as error:
            raise storage_error(error, where=self.bundles) from error

    def switch(self, digest: str, *, private: Path) -> None:
        """Point `current` at a bundle's views, atomically."""
        staged = private / "current"
        try:
            staged.unlink(missing_ok=True)
            staged.symlink_to(Path("views") / digest, target_is_directory=True)
            staged.replace(self.current)
        except OSError as error:
            raise storage_error(error, where=self.current) from error

    def mark_unsynced(self, sha256s: Iterable[str]) -> None:
        """Note, durably, that the bytes of these blobs may not survive a crash of the machine yet.

        The blobs are not fsynced one by one: the page cache outlives a process, and a machine that
        dies leaves this note from another boot, after which `recover` hashes the blobs again.
        """
        name = self.unsynced / f"{boot_id()}_{_owner()}_{time.time_ns()}"
        try:
            self._settle()
            _write_synced(name, json.dumps(sorted(sha256s)).encode())
            directory = os.open(self.unsynced, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise storage_error(error, where=self.unsynced) from error

    def recover(self) -> list[str]:
        """Hash again what an earlier boot may have torn; remove and return what is wrong.

        Without notes of another boot this lists one directory and opens nothing.
        """
        dropped: list[str] = []
        here = boot_id()
        try:
            notes = sorted(self.unsynced.iterdir())
        except OSError:
            return dropped
        for note in notes:
            if note.name.startswith(here + "_"):
                continue
            try:
                sha256s = json.loads(note.read_bytes())
            except (OSError, ValueError):
                sha256s = [path.name for path in self.blobs.glob("*/*")]
            for sha256 in sha256s:
                if not isinstance(sha256, str) or not is_sha256(sha256):
                    continue
                path = self.blob_path(sha256)
                with suppress(FileNotFoundError):
                    if sha256_file(path) != sha256:
                        path.unlink()
                        dropped.append(sha256)
            note.unlink(missing_ok=True)
        return dropped

    def _settle(self) -> None:
        """Drop this boot's older notes, whose blobs the kernel has mostly written back by itself."""
        here = boot_id() + "_"
        old = [
            note
            for note in self.unsynced.iterdir()
            if note.name.startswith(here) and time.time() - note.stat().st_mtime > SETTLED_AGE
        ]
        if not old:
            return
        import ctypes

        directory = os.open(self.root, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(directory) == 0:
                for note in old:
                    note.unlink(missing_ok=True)
        finally:
            os.close(directory)

    def _drop_dead(self) -> None:
        for directory in self.tmp.iterdir():
            if not _alive(directory):
                shutil.rmtree(directory, ignore_errors=True)


def boot_id() -> str:
    """The kernel's name for this boot (random(4)); `unknown` where it tells none."""
    try:
        return liveness.boot_id()
    except OSError:
        return "unknown"


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())


def _owner() -> str:
    """Return a name for a private directory; where the host tells too little, one nobody can look up."""
    try:
        return liveness.process_name()
    except OSError:
        return f"unknown.0.{os.getpid()}.0.{os.urandom(6).hex()}"


def _alive(directory: Path) -> bool:
    """Tell whether the process that owns a private directory may still write to it."""
    try:
        dead = liveness.is_dead(directory.name)
    except OSError:
        dead = None
    if dead is not None:
        return not dead
    try:
        newest = max(
            (entry.lstat().st_mtime for entry in [directory, *directory.rglob("*")]),
        )
    except (OSError, ValueError):
        return False
    return time.time() - newest < FOREIGN_AGE
