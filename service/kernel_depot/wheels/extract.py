"""Verify a wheel as a whole and member by member, and write out its artifacts.

The wheel is mapped, not read: its pages are the page cache's. Members are inflated, hashed and written in
bounded pieces by a few threads, which do that without the interpreter's lock, or by a few forked processes,
which have no lock to wait for: a wheel of thousands of small members needs the interpreter all the time.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Lock, local
from typing import TYPE_CHECKING, NamedTuple

from kernel_depot.bundle import ArtifactKind
from kernel_depot.digest import sha256_bytes
from kernel_depot.platform import Arch
from kernel_depot.wheels.archive import DEFLATED, ArchiveLimits, Bytes, Member, read_members
from kernel_depot.wheels.errors import (
    ArchiveTruncated,
    MetadataMissing,
    RecordDigestMismatch,
    RecordMalformed,
    RecordMissing,
    WheelDigestMismatch,
    WheelError,
)
from kernel_depot.wheels.forked import Forked
from kernel_depot.wheels.inflate import ROOM, Inflater, open_inflater
from kernel_depot.wheels.inspect import Inspection
from kernel_depot.wheels.kinds import classify
from kernel_depot.wheels.metadata import WheelName, check_arch, check_metadata, find_dist_info, read_filename
from kernel_depot.wheels.record import RecordRow, check_digest, check_listing, read_record
from kernel_depot.wheels.unpack import read_whole, unpack

if TYPE_CHECKING:
    from concurrent.futures import Future

_MAX_LISTING = 32 << 20  # RECORD and METADATA are read whole
_BATCH_BYTES = 8 << 20  # members are handed to threads in batches of about this size
_MEMBER_COST = 16 << 10  # what a member costs besides its bytes, as bytes
_HASH_PIECE = 8 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NOTHING = hashlib.sha256(b"")
_NOTHING_SHA256 = _NOTHING.hexdigest()
_NOTHING_LISTED = ("sha256", urlsafe_b64encode(_NOTHING.digest()).rstrip(b"=").decode(), 0)
_NOTHING_DEFLATED = b"\x03\x00"  # one empty block of fixed codes (RFC 1951, 3.2.6)
_TICKET = struct.Struct("<L")
_WHOLE = 0xFFFFFFFF  # the ticket for the hash of the whole file
_DONE = 16  # bytes of two counters

Progress = Callable[[int, int], None]
Look = Callable[[str, ArtifactKind, str, "memoryview | Path"], "Inspection | None"]


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
        if self.staging is None:
            return None
        return Path(f"{self.staging}/{self.sha256[:2]}/{self.sha256}")  # thousands: `/` takes twice as long


@dataclass(frozen=True, slots=True)
class ExtractedWheel:
    """A verified wheel: every file recorded, in archive order; sizes in bytes.

    `inspections` are what `look` found, by the artifact's SHA-256.
    """

    filename: str
    project: str
    version: str
    size: int
    unpacked_size: int
    members: tuple[ExtractedMember, ...]
    inspections: Mapping[str, Inspection] = field(default_factory=dict)

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
    forks: int = 0,
) -> ExtractedWheel:
    """Verify `wheel` and write its artifacts into `staging`, each named by its SHA-256, mode 0444.

    They lie in directories named by its first two digits: whoever makes a file locks its directory.
    `staging` is the caller's and private; on failure it may hold files, which the caller removes. The file
    must not change meanwhile. `on_totals` is told once the unpacked bytes and the members there are,
    `on_progress` those done so far, from any thread but never from two at once. `look` is shown each distinct
    artifact once it is verified, from several threads: its path, kind, SHA-256, and its content, which is
    valid during the call, or the staged file of a large one; what it raises refuses the wheel.
    `forks` beside 0 is a number of processes to work with in place of `threads`, this one among them; the
    caller then has no other thread, and `look` works in any of them.
    Raise the errors of `wheels.errors`; the wheel's own digest, when expected, goes before any other.
    """
    name = read_filename(expect.filename)
    check_arch(name, expect.arch)
    with wheel.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ArchiveTruncated("the wheel is an empty file", where=name.filename)
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    job = _Extraction(data, name, expect, staging, limits or ArchiveLimits(), _Meter(on_progress), look)
    members = _in_processes(job, forks, on_totals) if forks else _in_threads(job, threads, on_totals)
    return ExtractedWheel(
        filename=name.filename,
        project=name.project,
        version=str(name.version),
        size=len(data),
        unpacked_size=sum([member.size for member in members]),
        members=job.outcome(members),
        inspections=job.inspections,
    )


def _in_threads(job: _Extraction, threads: int, on_totals: Progress | None) -> tuple[Member, ...]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="extract") as pool:
        whole = pool.submit(job.check_whole) if job.checks_whole else None
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
    return members


def _in_processes(job: _Extraction, forks: int, on_totals: Progress | None) -> tuple[Member, ...]:
    """Let this process and children of it draw numbered batches until none is left.

    The hash of the whole file is drawn first, so it is done, and told, whatever else is wrong.
    """
    try:
        members = job.survey(on_totals)
    except WheelError:
        job.check_whole()
        raise
    batches = list(_batches(members))
    numbers = [_WHOLE] * job.checks_whole + list(range(len(batches)))
    job.meter.share(forks)
    crew: list[Forked[_Findings]] = []
    errors: list[WheelError] = []
    with _Tickets(numbers) as tickets:
        try:
            crew += [Forked(partial(job.draw, tickets, batches, mate)) for mate in range(1, forks)]
            try:
                job.draw(tickets, batches, 0)
            except WheelError as error:
                errors.append(error)
            for child in crew:
                try:
                    job.take(child.result())
                except WheelError as error:
                    errors.append(error)
        finally:
            for child in crew:
                child.close()
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, WheelDigestMismatch))
    return members


class _Tickets:
    """Numbers that processes draw one by one: a file in memory whose offset they share (open(2))."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._file = os.memfd_create("tickets", os.MFD_CLOEXEC)
        with open(os.dup(self._file), "wb") as file:
            file.write(b"".join(map(_TICKET.pack, numbers)))
        os.lseek(self._file, 0, os.SEEK_SET)

    def __enter__(self) -> _Tickets:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def draw(self) -> int | None:
        """Take the next number, None when all are taken."""
        ticket = os.read(self._file, _TICKET.size)
        return int(_TICKET.unpack(ticket)[0]) if ticket else None

    def spoil(self) -> None:
        """Take away what is left."""
        os.lseek(self._file, 0, os.SEEK_END)


class _Findings(NamedTuple):
    """What one process found: digests by path, inspections by digest."""

    digests: dict[str, str]
    inspections: dict[str, Inspection]


def _batches(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Group the members that have content: large ones first and alone, the rest in archive order."""
    large = [member for member in members if member.size > _BATCH_BYTES]
    for member in sorted(large, key=lambda member: member.size, reverse=True):
        yield [member]
    batch: list[Member] = []
    room = _BATCH_BYTES
    for member in members:
        if not 0 < member.size <= _BATCH_BYTES:
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
    from concurrent.futures import FIRST_EXCEPTION, wait

    done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
    for task in done:
        task.result()


class _Meter:
    """Adds up what the threads or processes have done and tells it to one listener, one call at a time."""

    def __init__(self, listener: Progress | None) -> None:
        self._listener = listener
        self._lock = Lock()
        self._done = memoryview(bytearray(_DONE)).cast("Q")
        self._mate = 0

    def share(self, mates: int) -> None:
        """Count in memory that forked processes share, each in a place of its own."""
        self._done = memoryview(mmap.mmap(-1, _DONE * mates)).cast("Q")

    def become(self, mate: int) -> None:
        """Count in the place of this process from here on."""
        self._mate = mate

    def add(self, size: int, members: int) -> None:
        if self._listener is None:
            return
        with self._lock:
            self._done[2 * self._mate] += size
            self._done[2 * self._mate + 1] += members
            self._listener(sum(self._done[::2]), sum(self._done[1::2]))


class _Extraction:
    """One wheel under way: what its threads share, or its processes inherit."""

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
        self.meter = meter
        self.inspections: dict[str, Inspection] = {}
        self.checks_whole = expect.sha256 is not None
        self._data = data
        self._name = name
        self._expect = expect
        self._staging = staging
        self._prefix = f"{staging}/"
        self._limits = limits
        self._look = look
        self._rows: dict[str, RecordRow] = {}
        self._digests: dict[str, str] = {}
        self._kinds: dict[str, tuple[ArtifactKind | None, str | None]] = {}
        self._mine = local()

    def check_whole(self) -> None:
        """Hash the whole file, when its digest is expected. Raise WheelDigestMismatch."""
        if not self.checks_whole:
            return
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
            on_totals(sum([member.size for member in members]), len(members))
        self._check_empty(members)
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

    def _check_empty(self, members: Sequence[Member]) -> None:
        """Verify the members without content: half the files of a cubin wheel are locks."""
        empty = [member for member in members if not member.size and not member.is_directory]
        for member in empty:
            row = self._rows.get(member.name)
            plain = member.method == DEFLATED and member.packed == 2 and not member.crc
            if (
                not plain
                or (row is not None and row != _NOTHING_LISTED)
                or self._data[member.start : member.start + 2] != _NOTHING_DEFLATED
                or self._kinds[member.name][0] is not None
            ):
                self._digests[member.name] = self._verify_small(member)
            else:
                self._digests[member.name] = _NOTHING_SHA256
        self.meter.add(0, len(members) - sum([member.size > 0 for member in members]))

    def draw(self, tickets: _Tickets, batches: Sequence[Sequence[Member]], mate: int) -> _Findings:
        """Work off the batches whose numbers this process draws; an error takes the rest from all."""
        self.meter.become(mate)
        if mate:
            self._digests = {}  # of what it inherited, the one it came from knows
        try:
            while (number := tickets.draw()) is not None:
                if number == _WHOLE:
                    self.check_whole()
                else:
                    self.run(batches[number])
        except BaseException:
            tickets.spoil()
            raise
        return _Findings(self._digests, self.inspections)

    def take(self, findings: _Findings) -> None:
        """Add what another process found."""
        self._digests.update(findings.digests)
        self.inspections.update(findings.inspections)

    def run(self, batch: Sequence[Member]) -> None:
        """Verify the members of one batch and write their artifacts."""
        size = 0
        for member in batch:
            if self.stop.is_set():
                return
            if member.size > ROOM:
                self._digests[member.name] = self._verify_large(member)
                self.meter.add(0, 1)
            else:
                self._digests[member.name] = self._verify_small(member)
                size += member.size
        small = sum([member.size <= ROOM for member in batch])
        if small:
            self.meter.add(size, small)

    def _verify_small(self, member: Member) -> str:
        content = self._content(member)
        digest = hashlib.sha256(content)
        row = self._rows.get(member.name)
        if row is not None and row.digest:
            proof = digest if row.algorithm == "sha256" else hashlib.new(row.algorithm, content)
            self._check_row(member, row, proof.digest())
        sha256 = digest.hexdigest()
        if self._is_kept(member) and self._stage(sha256, content):
            self._show(member, sha256, content)
        return sha256

    def _content(self, member: Member) -> memoryview:
        """Inflate a member into this thread's memory; a wrong one is read again to tell what is wrong."""
        if member.method == DEFLATED and member.packed <= ROOM:
            inflater: Inflater | None = getattr(self._mine, "inflater", None)
            if inflater is None:
                inflater = self._mine.inflater = open_inflater()
            packed = self._data[member.start : member.start + member.packed]
            content = inflater.inflate(packed, member.size)
            if content is not None and inflater.crc32(content) == member.crc:
                return content
        return memoryview(read_whole(self._data, member, where=self._name.filename))

    def _stage(self, sha256: str, content: memoryview) -> bool:
        """Write an artifact's bytes; False when another member's are the same and are there."""
        name = f"{self._prefix}{sha256[:2]}/{sha256}"
        try:
            descriptor = os.open(name, _CREATE, 0o444)
        except FileExistsError:
            return False
        except FileNotFoundError:
            (self._staging / sha256[:2]).mkdir(exist_ok=True)
            return self._stage(sha256, content)
        try:
            _write(descriptor, content)
        finally:
            os.close(descriptor)
        return True

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
                self.meter.add(len(piece), 0)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if row is not None and row.digest:
            self._check_row(member, row, proof.digest())
        sha256 = digest.hexdigest()
        if kept:
            staged = self._staging / sha256[:2] / sha256
            staged.parent.mkdir(exist_ok=True)
            try:
                os.link(private, staged)
            except FileExistsError:
                private.unlink()
                return sha256
            except OSError:  # a file system without hard links; equal bytes may replace each other
                private.rename(staged)
            else:
                private.unlink()
            self._show(member, sha256, staged)
        return sha256

    def _check_row(self, member: Member, row: RecordRow, digest: bytes) -> None:
        check_digest(row, digest, where=self._name.filename, path=member.name)

    def _is_kept(self, member: Member) -> bool:
        kind, _ = self._kinds.get(member.name, (None, None))
        return kind is not None

    def _show(self, member: Member, sha256: str, content: memoryview | Path) -> None:
        kind, _ = self._kinds[member.name]
        if self._look is not None and kind is not None:
            found = self._look(member.name, kind, sha256, content)
            if found is not None:
                self.inspections[sha256] = found

    def outcome(self, members: Sequence[Member]) -> tuple[ExtractedMember, ...]:
        """Describe the members once all are verified."""
        found = []
        for member in members:
            if not member.is_directory:
                kind, module = self._kinds[member.name]
                staging = self._staging if kind is not None else None
                sha256 = self._digests[member.name]
                found.append(ExtractedMember(member.name, sha256, member.size, kind, module, staging))
        return tuple(found)


def _write(descriptor: int, content: memoryview | bytes) -> None:
    written = os.write(descriptor, content)
    while written < len(content):
        written += os.write(descriptor, memoryview(content)[written:])
