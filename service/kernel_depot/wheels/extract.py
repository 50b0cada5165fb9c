"""Verify a wheel as a whole and member by member, and write out its artifacts.

The wheel is mapped, not read: its pages are the page cache's. Members are inflated, hashed and written in
bounded pieces by a few threads; hashing, inflating and writing all run without the interpreter's lock.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple

from kernel_depot.bundle import ArtifactKind
from kernel_depot.digest import sha256_bytes
from kernel_depot.platform import Arch
from kernel_depot.wheels.archive import ArchiveLimits, Bytes, Member, read_members
from kernel_depot.wheels.errors import (
    ArchiveTruncated,
    MetadataMissing,
    RecordDigestMismatch,
    RecordMalformed,
    RecordMissing,
    WheelDigestMismatch,
    WheelError,
)
from kernel_depot.wheels.kinds import classify
from kernel_depot.wheels.metadata import WheelName, check_arch, check_metadata, find_dist_info, read_filename
from kernel_depot.wheels.record import RecordRow, check_digest, check_listing, read_record
from kernel_depot.wheels.unpack import PIECE, read_whole, unpack

_MAX_LISTING = 32 << 20  # RECORD and METADATA are read whole
_BATCH_BYTES = 8 << 20  # members are handed to threads in batches of about this size
_MEMBER_COST = 16 << 10  # what a member costs besides its bytes, as bytes
_HASH_PIECE = 8 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

Progress = Callable[[int, int], None]
Look = Callable[[str, ArtifactKind, str, "bytes | Path"], None]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the pin says of the wheel. `sha256` None: the caller has verified the file as a whole."""

    filename: str
    sha256: str | None = None
    arch: Arch | None = None
    record_sha256: str | None = None


class ExtractedMember(NamedTuple):
    """One file of the wheel. `staging` is where its bytes were written when it is an artifact, else None.

    Artifacts with the same content share one staged file.
    """

    path: str
    sha256: str
    size: int
    kind: ArtifactKind | None
    module: str | None
    staging: Path | None

    @property
    def staged(self) -> Path | None:
        """The private file that holds the artifact's bytes."""
        return None if self.staging is None else self.staging / self.sha256


@dataclass(frozen=True, slots=True)
class ExtractedWheel:
    """A verified wheel: every file recorded, in archive order; sizes in bytes."""

    filename: str
    project: str
    version: str
    size: int
    unpacked_size: int
    members: tuple[ExtractedMember, ...]

    @property
    def blobs(self) -> dict[str, ExtractedMember]:
        """The distinct staged contents by SHA-256, each by the first member that has it."""
        found: dict[str, ExtractedMember] = {}
        for member in self.members:
            if member.staging is not None:
                found.setdefault(member.sha256, member)
        return found


def extract(
    wheel: Path,
    *,
    staging: Path,
    expect: Expectation,
    limits: ArchiveLimits | None = None,
    on_progress: Progress | None = None,
    on_totals: Progress | None = None,
    look: Look | None = None,
    threads: int = 2,
) -> ExtractedWheel:
    """Verify `wheel` and write its artifacts into `staging`, each named by its SHA-256, mode 0444.

    `staging` is the caller's and private; on failure it may hold files, which the caller removes. The file
    must not change meanwhile. `on_totals` is told once the unpacked bytes and the members there are,
    `on_progress` those done so far, from any thread but never from two at once. `look` is shown each distinct
    artifact once it is verified, from several threads: its path, kind, SHA-256, and its content while that is
    in memory or the staged file of a large one; what it raises refuses the wheel.
    Raise the errors of `wheels.errors`; the wheel's own digest, when expected, goes before any other.
    """
    name = read_filename(expect.filename)
    check_arch(name, expect.arch)
    with wheel.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ArchiveTruncated("the wheel is an empty file", where=name.filename)
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    job = _Extraction(data, name, expect, staging, limits or ArchiveLimits(), _Meter(on_progress), look)
    with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="extract") as pool:
        whole = pool.submit(job.check_whole) if expect.sha256 is not None else None
        try:
            members = job.survey(on_totals)
            tasks = [pool.submit(job.run, batch) for batch in _batches(members)]
            _finish([*tasks, whole] if whole is not None else tasks)
        except WheelError:
            job.stop.set()
            if whole is not None:
                whole.result()
            raise
        except BaseException:
            job.stop.set()
            job.abandoned.set()
            raise
    return ExtractedWheel(
        filename=name.filename,
        project=name.project,
        version=str(name.version),
        size=len(data),
        unpacked_size=sum(member.size for member in members),
        members=tuple(job.outcome(member) for member in members if not member.is_directory),
    )


def _batches(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Group the members for the threads: large ones first and alone, the rest in archive order."""
    large = [member for member in members if member.size > _BATCH_BYTES]
    for member in sorted(large, key=lambda member: member.size, reverse=True):
        yield [member]
    batch: list[Member] = []
    room = _BATCH_BYTES
    for member in members:
        if member.size > _BATCH_BYTES:
            continue
        batch.append(member)
        room -= member.size + _MEMBER_COST
        if room <= 0:
            yield batch
            batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


def _finish(tasks: Sequence[Future[None]]) -> None:
    """Wait for all tasks, or for the first that fails, and raise what it raised."""
    done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
    for task in done:
        task.result()


class _Meter:
    """Adds up what the threads have done and tells it to one listener, one call at a time."""

    def __init__(self, listener: Progress | None) -> None:
        self._listener = listener
        self._lock = Lock()
        self._bytes = 0
        self._members = 0

    def add(self, size: int, members: int) -> None:
        if self._listener is None:
            return
        with self._lock:
            self._bytes += size
            self._members += members
            self._listener(self._bytes, self._members)


class _Extraction:
    """One wheel under way: what its threads share."""

    def __init__(
        self,
        data: Bytes,
        name: WheelName,
        expect: Expectation,
        staging: Path,
        limits: ArchiveLimits,
        meter: _Meter,
        look: Look | None,
    ) -> None:
        self.stop = Event()
        self.abandoned = Event()
        self._data = data
        self._name = name
        self._expect = expect
        self._staging = staging
        self._prefix = f"{staging}/"
        self._limits = limits
        self._meter = meter
        self._look = look
        self._rows: dict[str, RecordRow] = {}
        self._digests: dict[str, str] = {}
        self._kinds: dict[str, tuple[ArtifactKind | None, str | None]] = {}
        self._staged: set[str] = set()
        self._lock = Lock()

    def check_whole(self) -> None:
        """Hash the whole file. Raise WheelDigestMismatch."""
        digest = hashlib.sha256()
        with memoryview(self._data) as view:
            for start in range(0, len(view), _HASH_PIECE):
                if self.abandoned.is_set():
                    return
                with view[start : start + _HASH_PIECE] as piece:
                    digest.update(piece)
        if digest.hexdigest() != self._expect.sha256:
            raise WheelDigestMismatch(
                "the wheel's bytes are not those that were pinned",
                where=self._name.filename,
                expected=self._expect.sha256,
                found=digest.hexdigest(),
                remedy="fetch the wheel again; if it repeats, the pin or its source is wrong",
            )

    def survey(self, on_totals: Progress | None) -> tuple[Member, ...]:
        """Check all that can be checked before anything is unpacked, and read RECORD and METADATA."""
        where = self._name.filename
        members = read_members(self._data, where=where, limits=self._limits)
        by_path = {member.name: member for member in members}
        dist_info = find_dist_info(by_path, self._name)
        record = by_path.get(f"{dist_info}/RECORD")
        if record is None:
            raise RecordMissing("the wheel has no RECORD", where=where, expected=f"{dist_info}/RECORD")
        listing = self._read_listing(record, RecordMalformed)
        expected = self._expect.record_sha256
        if expected is not None and sha256_bytes(listing) != expected:
            raise RecordDigestMismatch(
                "RECORD is not the pinned one",
                where=f"{where}: {record.name!r}",
                expected=expected,
                found=sha256_bytes(listing),
            )
        self._rows = read_record(listing, where=f"{where}: {record.name!r}")
        files = ((member.name, member.size) for member in members if not member.is_directory)
        check_listing(self._rows, files, record=record.name, where=where)
        metadata = by_path.get(f"{dist_info}/METADATA")
        if metadata is None:
            raise MetadataMissing("the wheel has no METADATA", where=where, expected=f"{dist_info}/METADATA")
        check_metadata(
            self._read_listing(metadata, MetadataMissing), self._name, where=f"{where}: {metadata.name!r}"
        )
        self._kinds = {name: classify(name) for name in by_path if not name.endswith("/")}
        if on_totals is not None:
            on_totals(sum(member.size for member in members), len(members))
        return members

    def _read_listing(self, member: Member, error: type[WheelError]) -> bytes:
        if member.size > _MAX_LISTING:
            raise error(
                "the file is too large to be read whole",
                where=f"{self._name.filename}: {member.name!r}",
                expected=f"at most {_MAX_LISTING} bytes",
                found=member.size,
            )
        return read_whole(self._data, member, where=self._name.filename)

    def run(self, batch: Sequence[Member]) -> None:
        """Verify the members of one batch and write their artifacts."""
        size = 0
        for member in batch:
            if self.stop.is_set():
                return
            if member.size > PIECE:
                self._digests[member.name] = self._verify_large(member)
                self._meter.add(0, 1)
            else:
                self._digests[member.name] = self._verify_small(member)
                size += member.size
        small = sum(member.size <= PIECE for member in batch)
        if small:
            self._meter.add(size, small)

    def _verify_small(self, member: Member) -> str:
        content = read_whole(self._data, member, where=self._name.filename)
        digest = hashlib.sha256(content)
        row = self._rows.get(member.name)
        if row is not None and row.digest:
            proof = digest if row.algorithm == "sha256" else hashlib.new(row.algorithm, content)
            self._check_row(member, row, proof.digest())
        sha256 = digest.hexdigest()
        if self._is_kept(member) and self._claim(sha256):
            descriptor = os.open(self._prefix + sha256, _CREATE, 0o444)
            try:
                _write(descriptor, content)
            finally:
                os.close(descriptor)
            self._show(member, sha256, content)
        return sha256

    def _verify_large(self, member: Member) -> str:
        row = self._rows.get(member.name)
        digest = hashlib.sha256()
        proof = digest
        if row is not None and row.digest and row.algorithm != "sha256":
            proof = hashlib.new(row.algorithm)
        kept = self._is_kept(member)
        private = self._staging / f"{member.header}.part"
        descriptor = os.open(private, _CREATE, 0o444) if kept else None
        try:
            for piece in unpack(self._data, member, where=self._name.filename):
                if self.stop.is_set():
                    return ""
                digest.update(piece)
                if proof is not digest:
                    proof.update(piece)
                if descriptor is not None:
                    _write(descriptor, piece)
                self._meter.add(len(piece), 0)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if row is not None and row.digest:
            self._check_row(member, row, proof.digest())
        sha256 = digest.hexdigest()
        if kept and self._claim(sha256):
            staged = private.rename(self._staging / sha256)
            self._show(member, sha256, staged)
        elif kept:
            private.unlink()
        return sha256

    def _check_row(self, member: Member, row: RecordRow, digest: bytes) -> None:
        check_digest(row, digest, where=f"{self._name.filename}: {member.name!r}")

    def _is_kept(self, member: Member) -> bool:
        kind, _ = self._kinds.get(member.name, (None, None))
        return kind is not None

    def _show(self, member: Member, sha256: str, content: bytes | Path) -> None:
        kind, _ = self._kinds[member.name]
        if self._look is not None and kind is not None:
            self._look(member.name, kind, sha256, content)

    def _claim(self, sha256: str) -> bool:
        """Tell whether the caller is the first to have this content, who then stages it."""
        with self._lock:
            first = sha256 not in self._staged
            self._staged.add(sha256)
        return first

    def outcome(self, member: Member) -> ExtractedMember:
        """Describe a member once all are verified."""
        kind, module = self._kinds[member.name]
        staging = self._staging if kind is not None else None
        return ExtractedMember(member.name, self._digests[member.name], member.size, kind, module, staging)


def _write(descriptor: int, content: bytes | memoryview) -> None:
    written = os.write(descriptor, content)
    while written < len(content):
        written += os.write(descriptor, memoryview(content)[written:])
