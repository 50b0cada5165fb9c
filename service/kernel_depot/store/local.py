"""The embedded store: a directory. How it publishes is told in docs/architecture.md, "Publication"."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from kernel_depot.digest import is_sha256, sha256_file
from kernel_depot.liveness import boot_id, is_dead, process_name
from kernel_depot.store.blobs import PIECE, Form, Recovery, StagedBlob
from kernel_depot.store.errors import BlobMissing, StoreUnreachable

_DIRECTORIES = {Form.IDENTITY: "blobs", Form.ZSTD: "zstd", Form.PART: "parts"}
_FOREIGN_GRACE = 3600.0  # seconds without a change until another machine's private names count as left behind
_SMALL_BATCH = 4  # up to so many files are fsynced one by one; more get a marker


class LocalStore:
    """A store in one directory of a POSIX file system; several processes may share it."""

    def __init__(self, root: Path) -> None:
        """Use the directory `root`, made when absent. Raise StoreUnreachable when it cannot be made."""
        self.root = root.absolute()
        self._tmp = self.root / "tmp"
        self._unsynced = self.root / "unsynced"
        try:
            for directory in (*_DIRECTORIES.values(), "tmp", "unsynced"):
                (self.root / directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnreachable(
                "the store's directory cannot be made", where=str(self.root), found=error.strerror
            ) from error
        self._roots = {form: f"{self.root}/{name}/sha256" for form, name in _DIRECTORIES.items()}
        self._fans: set[str] = set()

    @property
    def location(self) -> str:
        """The directory's path."""
        return str(self.root)

    @property
    def publishes_by_rename(self) -> bool:
        """A rename moves no bytes."""
        return True

    def _name(self, sha256: str, form: Form) -> str:
        return f"{self._roots[form]}/{sha256[:2]}/{sha256}"

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Give a private directory under `tmp/`, named by this process; removed on exit."""
        directory = self._tmp / process_name()
        directory.mkdir(mode=0o700)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def publish(self, staged: StagedBlob, *, form: Form = Form.IDENTITY) -> None:
        """Publish one file: fsync, then an atomic link."""
        self._publish_synced(staged, form)

    def publish_many(self, staged: Sequence[StagedBlob], *, form: Form = Form.IDENTITY) -> None:
        """Publish a batch under one marker instead of one fsync a file."""
        if len(staged) <= _SMALL_BATCH:
            for blob in staged:
                self._publish_synced(blob, form)
            return
        root = self._roots[form]
        empty = self._make_fans(root, {blob.sha256[:2] for blob in staged})
        self._write_marker([blob.sha256 for blob in staged], form)
        for blob in staged:
            final = f"{root}/{blob.sha256[:2]}/{blob.sha256}"
            if blob.sha256[:2] not in empty:
                self._move(blob, final)
                continue
            try:
                os.rename(blob.path, final)
            except OSError:
                self._move(blob, final)

    def _publish_synced(self, staged: StagedBlob, form: Form) -> None:
        root = self._roots[form]
        self._make_fans(root, {staged.sha256[:2]})
        descriptor = os.open(staged.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o444)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._move(staged, self._name(staged.sha256, form))
        _fsync_directory(f"{root}/{staged.sha256[:2]}")

    def _move(self, staged: StagedBlob, final: str) -> None:
        """Give a staged file its public name; where that is taken by a whole file, that file stays.

        Verified bytes of one digest are the same bytes, so losing a race between the look and the rename
        replaces a file by its equal, atomically.
        """
        try:
            size = os.stat(final).st_size
        except FileNotFoundError:
            size = -1
        if size == staged.size:
            os.unlink(staged.path)
            return
        try:
            os.rename(staged.path, final)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._move_across(staged, final)

    def _move_across(self, staged: StagedBlob, final: str) -> None:
        """Copy a file from another file system under a private name, then move that."""
        with self.staging() as directory:
            copy = directory / staged.sha256
            shutil.copyfile(staged.path, copy)
            copy.chmod(0o444)
            descriptor = os.open(copy, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(copy, final)
        os.unlink(staged.path)

    def _make_fans(self, root: str, prefixes: Iterable[str]) -> set[str]:
        """Make the directories of digests that begin so; return those that this call made."""
        made = set()
        for prefix in prefixes:
            if (fan := f"{root}/{prefix}") in self._fans:
                continue
            try:
                os.mkdir(fan)
                made.add(prefix)
            except FileExistsError:
                pass
            except FileNotFoundError:
                os.makedirs(fan, exist_ok=True)
            self._fans.add(fan)
        return made

    def _write_marker(self, sha256s: Sequence[str], form: Form) -> None:
        """Say, on the disk, which digests this boot publishes before their bytes are on the disk."""
        marker = self._unsynced / f"{boot_id()}.{secrets.token_hex(8)}.json"
        private = self._tmp / f"{process_name()}.marker"
        with private.open("w") as file:
            json.dump({"form": form.value, "sha256": list(sha256s)}, file)
            file.flush()
            os.fsync(file.fileno())
        private.rename(marker)
        _fsync_directory(str(self._unsynced))

    def has(self, sha256s: Iterable[str], *, form: Form = Form.IDENTITY) -> set[str]:
        """Return those digests that have a file."""
        return {sha256 for sha256 in sha256s if os.path.exists(self._name(sha256, form))}

    def size(self, sha256: str, *, form: Form = Form.IDENTITY) -> int | None:
        """Return the file's size."""
        try:
            return os.stat(self._name(sha256, form)).st_size
        except FileNotFoundError:
            return None

    def path(self, sha256: str, *, form: Form = Form.IDENTITY) -> Path | None:
        """Return the file's path when it is there."""
        name = self._name(sha256, form)
        return Path(name) if os.path.exists(name) else None

    def read(
        self, sha256: str, *, start: int = 0, end: int | None = None, form: Form = Form.IDENTITY
    ) -> Iterator[bytes]:
        """Yield the file's bytes; the file is opened before the first piece is asked for."""
        try:
            file = open(self._name(sha256, form), "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            raise BlobMissing(
                "the store does not hold these bytes", where=self.location, expected=f"sha256:{sha256}"
            ) from None
        return _pieces(file, start, end)

    def delete(self, sha256: str, *, form: Form = Form.IDENTITY) -> None:
        """Unlink the file; whoever has it open keeps its bytes."""
        with suppress(FileNotFoundError):
            os.unlink(self._name(sha256, form))

    def list(self, *, form: Form = Form.IDENTITY) -> Iterator[str]:
        """Yield the names of files that are digests; anything else in the directory is not ours."""
        root = Path(self._roots[form])
        if not root.is_dir():
            return
        for fan in sorted(entry.path for entry in os.scandir(root) if entry.is_dir()):
            yield from sorted(entry.name for entry in os.scandir(fan) if is_sha256(entry.name))

    def presign(self, sha256: str, *, expires: int, form: Form = Form.IDENTITY) -> str | None:  # noqa: ARG002
        """Return None: a directory signs nothing."""
        return None

    def recover(self) -> Recovery:
        """Remove dead processes' private names; re-hash what an earlier boot may have torn."""
        removed = sum(_remove(entry) for entry in os.scandir(self._tmp) if _is_left(entry))
        rehashed = 0
        dropped: dict[Form, list[str]] = {form: [] for form in Form}
        for marker in sorted(self._unsynced.iterdir()):
            if marker.name.partition(".")[0] == boot_id():
                continue
            try:
                batch = json.loads(marker.read_text())
            except FileNotFoundError:  # another opener was faster
                continue
            form = Form(batch["form"])
            for sha256 in batch["sha256"]:
                whole = self._is_whole(sha256, form)
                rehashed += whole is not None
                if whole is False:
                    self.delete(sha256, form=form)
                    dropped[form].append(sha256)
            self._sync()
            marker.unlink(missing_ok=True)
        return Recovery(removed, rehashed, tuple(dropped[Form.IDENTITY]), tuple(dropped[Form.ZSTD]))

    def _is_whole(self, sha256: str, form: Form) -> bool | None:
        """Tell whether a file holds what its name says, None when there is none."""
        path = Path(self._name(sha256, form))
        try:
            if form is not Form.ZSTD:
                return sha256_file(path) == sha256
            from kernel_depot.store.zstd_forms import decodes_to

            return decodes_to(self.read(sha256, form=form), sha256)
        except (FileNotFoundError, BlobMissing):
            return None

    def settle(self, *, older_than: float = 0.0) -> None:
        """Write this boot's batches to the disk with syncfs(2) and take their markers away.

        A batch's bytes are written before its marker, so a sync after the marker was seen covers them.
        """
        limit = time.time() - older_than
        markers = [
            entry.path
            for entry in os.scandir(self._unsynced)
            if entry.name.startswith(boot_id()) and entry.stat().st_mtime <= limit
        ]
        if markers:
            self._sync()
            for marker in markers:
                with suppress(FileNotFoundError):
                    os.unlink(marker)

    def _sync(self) -> None:
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                raise StoreUnreachable(
                    "the store's bytes cannot be written to the disk",
                    where=self.location,
                    found=os.strerror(ctypes.get_errno()),
                )
        finally:
            os.close(descriptor)


def _pieces(file: FileIO, start: int, end: int | None) -> Iterator[bytes]:
    """Yield pieces of an open file, closed after the last one or with the iterator."""
    position = start
    with file:
        while end is None or position < end:
            wanted = PIECE if end is None else min(PIECE, end - position)
            piece = os.pread(file.fileno(), wanted, position)
            if not piece:
                break
            position += len(piece)
            yield piece


def _is_left(entry: os.DirEntry[str]) -> bool:
    """Tell whether the owner of a private name is gone."""
    dead = is_dead(entry.name.removesuffix(".marker"))
    if dead is not None:
        return dead
    try:
        return time.time() - entry.stat().st_mtime > _FOREIGN_GRACE
    except FileNotFoundError:
        return False


def _remove(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            os.unlink(entry.path)
    return True


def _fsync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
