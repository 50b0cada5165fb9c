"""A download under way: a private file, its running hash, and what is needed to go on after a crash.

The file is `<dest>.<token>.part`; `<dest>.<token>.part.json` beside it holds the URL, the validator and
the length the bytes came with. A live process holds a lock on its file, so a file whose lock can be
taken has no owner any more and is adopted; two processes never write the same file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from glob import escape
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from kernel_depot.digest import READ_SIZE
from kernel_depot.wheels.fetch_problems import DiskFull, FetchError, IncomingUnwritable

_NO_COPY_RANGE = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a partial's bytes came from: enough to ask for the rest of the very same file.

    `url` is without its query, which is where signatures are and changes from one answer to the next.
    """

    url: str
    etag: str | None = None
    last_modified: str | None = None
    length: int | None = None

    @property
    def validator(self) -> str | None:
        """What `If-Range` may carry: a strong entity tag, else the modification date (RFC 9110, 13.1.5)."""
        if self.etag is not None and self.etag.startswith('"'):
            return self.etag
        return self.last_modified


class Partial:
    """The private file of one download; use as a context manager, which closes but keeps it.

    `pieced` tells that the bytes come from more than one answer, so that a wrong hash may be the fault
    of the seam. Raise DiskFull or IncomingUnwritable from every method that writes.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size = 0
        self.pieced = False
        self.origin: Origin | None = None
        self._descriptor = descriptor
        self._hash = hashlib.sha256()

    @classmethod
    def open(cls, dest: Path, *, url: str) -> Partial:
        """Adopt the longest ownerless partial of `dest` that came from `url`, else begin a new one.

        Other ownerless partials of `dest` are removed.
        """
        try:
            dest.parent.mkdir(parents=True, exist_ok=True)
            found = sorted(dest.parent.glob(f"{escape(dest.name)}.*.part"), key=_size, reverse=True)
            adopted: Partial | None = None
            for path in found:
                descriptor = _take(path)
                if descriptor is None:
                    continue
                candidate = cls(path, descriptor)
                if adopted is None and candidate._revive(url):
                    adopted = candidate
                else:
                    candidate.discard()
            if adopted is not None:
                return adopted
            return cls(*_create(dest))
        except OSError as error:
            raise _write_failure(error, dest) from error

    @property
    def sha256(self) -> str:
        """The SHA-256 of the bytes so far, lower-case hexadecimal."""
        return self._hash.hexdigest()

    def restart(self, origin: Origin | None = None) -> None:
        """Drop all bytes and begin again with those that `origin` is about to send."""
        try:
            os.ftruncate(self._descriptor, 0)
            self._note(origin)
        except OSError as error:
            raise _write_failure(error, self.path) from error
        self.size = 0
        self.pieced = False
        self.origin = origin
        self._hash = hashlib.sha256()

    def write(self, data: bytes | memoryview, *, hasher: Executor | None = None) -> None:
        """Append `data` to the file and to the hash, which `hasher` takes at the same time if given."""
        hashing = hasher.submit(self._hash.update, data) if hasher is not None else None
        if hashing is None:
            self._hash.update(data)
        view = memoryview(data)
        while view:
            try:
                count = os.pwrite(self._descriptor, view, self.size)
            except OSError as error:
                raise _write_failure(error, self.path) from error
            self.size += count
            view = view[count:]
        if hashing is not None:
            hashing.result()

    def copy(self, source: FileIO, count: int) -> int:
        """Append up to `count` bytes from `source`, unhashed; return how many, 0 at its end."""
        try:
            copied = os.copy_file_range(source.fileno(), self._descriptor, count, offset_dst=self.size)
        except OSError as error:
            if error.errno not in _NO_COPY_RANGE:
                raise _write_failure(error, self.path) from error
            os.lseek(self._descriptor, self.size, os.SEEK_SET)
            copied = os.sendfile(self._descriptor, source.fileno(), None, count)
        self.size += copied
        return copied

    def publish(self, dest: Path) -> None:
        """Give the finished file its final name, atomically."""
        try:
            self._sidecar.unlink(missing_ok=True)
            self.path.rename(dest)
        except OSError as error:
            raise _write_failure(error, dest) from error
        self.close()

    def discard(self) -> None:
        """Remove the file and its sidecar."""
        self._remove()
        self.close()

    def close(self) -> None:
        """Let go of the file; its lock ends with it. An empty file is not worth keeping."""
        if self._descriptor < 0:
            return
        if self.size == 0:
            self._remove()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Partial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _remove(self) -> None:
        self._sidecar.with_name(self._sidecar.name + ".new").unlink(missing_ok=True)
        self._sidecar.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    @property
    def _sidecar(self) -> Path:
        return self.path.with_name(self.path.name + ".json")

    def _note(self, origin: Origin | None) -> None:
        if origin is None or origin.validator is None:
            self._sidecar.unlink(missing_ok=True)
            return
        private = self._sidecar.with_name(self._sidecar.name + ".new")
        private.write_text(json.dumps(asdict(origin)), encoding="utf-8")
        private.replace(self._sidecar)

    def _revive(self, url: str) -> bool:
        """Hash what an earlier process left and tell whether it can be continued."""
        self.origin = _read_origin(self._sidecar)
        if self.origin is None or self.origin.url != url or self.origin.validator is None:
            return False
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        while piece := os.read(self._descriptor, READ_SIZE):
            self._hash.update(piece)
            self.size += len(piece)
        self.pieced = True
        return self.size > 0


def _take(path: Path) -> int | None:
    """Open and lock a partial whose owner is gone; None when it has one, or vanished meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _create(dest: Path) -> tuple[Path, int]:
    """Make and lock a new partial; another process may adopt and remove it before the lock is taken."""
    while True:
        path = dest.with_name(f"{dest.name}.{secrets.token_hex(4)}.part")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                os.close(descriptor)
                continue
            # A file system without locks: nobody can adopt the file, which is safe too.
        if os.fstat(descriptor).st_nlink > 0:
            return path, descriptor
        os.close(descriptor)


def _read_origin(path: Path) -> Origin | None:
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        origin = Origin(**data)
    except (OSError, ValueError, TypeError):
        return None
    texts = (origin.url, origin.etag or "", origin.last_modified or "")
    if not all(isinstance(text, str) for text in texts) or not isinstance(origin.length, int | None):
        return None
    return origin


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _write_failure(error: OSError, path: Path) -> FetchError:
    if error.errno in _FULL:
        return DiskFull(
            f"the disk ran full while downloading: {error.strerror}",
            where=str(path.parent),
            remedy="free space or point the data directory at a larger disk",
        )
    return IncomingUnwritable(
        f"the download cannot be written: {error.strerror}",
        where=str(path),
        remedy="give this process write access to the data directory",
    )
