"""One blob from the server into the cache: streamed, resumed, hashed on the way, published when right."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING, cast

from kernel_depot.worker.cache import Cache, storage_error
from kernel_depot.worker.client import Endpoint
from kernel_depot.worker.errors import BlobMismatch, ServerProtocol
from kernel_depot.worker.transport import PIECE, Response, Transport, follow, retrying, unreachable

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

HASHED_ASIDE = 16 << 20  # from this size on a blob is hashed beside its thread


@dataclass
class Meter:
    """What has been moved so far; several threads add, one draws."""

    blobs_total: int = 0
    bytes_total: int = 0
    blobs: int = 0
    bytes: int = 0
    wire_bytes: int = 0
    requests: int = 0
    refetched: list[str] = field(default_factory=list)
    stage: str = "resolving"
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, *, blobs: int = 0, size: int = 0, wire: int = 0, requests: int = 0) -> None:
        """Add to the counters."""
        with self._lock:
            self.blobs += blobs
            self.bytes += size
            self.wire_bytes += wire
            self.requests += requests

    def wrong(self, sha256: str) -> None:
        """Note a blob that came with wrong bytes and is asked for again."""
        with self._lock:
            self.refetched.append(sha256)


class Stopped(Exception):
    """Another thread failed, so this one gives up."""


@dataclass(frozen=True)
class Intake:
    """What one thread needs to bring blobs in.

    `stop` raises Stopped when the work is to end; `crowded` tells whether other threads use every core.
    """

    transport: Transport
    endpoint: Endpoint
    cache: Cache
    private: Path
    meter: Meter
    stop: Callable[[], None]
    zstd: bool = True
    crowded: Callable[[], bool] = lambda: False
    buffers: list[memoryview] = field(default_factory=list)  # of PIECE bytes each, used again

    def send(self, method: str, path: str, headers: dict[str, str], content: bytes | None = None) -> Response:
        """Send a request to the endpoint, counted."""
        self.meter.add(requests=1)
        return follow(
            self.transport,
            method,
            self.endpoint.address(path),
            headers=headers,
            content=content,
            token=self.endpoint.token,
        )


def publish(intake: Intake, *, sha256: str, data: memoryview) -> bool:
    """Verify a small blob's bytes and publish them; False when they have another digest."""
    if hashlib.sha256(data).hexdigest() != sha256:
        return False
    staged = f"{intake.private}/{sha256}"
    try:
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o444)
        try:
            _write(descriptor, data)
            os.fchmod(descriptor, 0o444)
        finally:
            os.close(descriptor)
        os.rename(staged, f"{intake.cache.blobs}/{sha256[:2]}/{sha256}")  # noqa: PTH104
    except OSError as error:
        raise storage_error(error, where=intake.cache.root) from error
    return True


def fetch_blob(intake: Intake, *, sha256: str, size: int) -> None:
    """Bring one blob in by a request of its own.

    A body that breaks off is resumed from where it stopped. Bytes with a wrong digest are dropped and
    asked for again, as identity; when these are wrong too, raise BlobMismatch. Raise ServerRefused,
    ServerUnreachable, CacheFull.
    """
    zstd = intake.zstd
    wrong_identities = 0
    while True:
        download = _Download(intake, sha256=sha256, size=size, zstd=zstd)
        try:
            retrying(download.attempt, patience=intake.endpoint.patience)
            found = download.digest
            if found == sha256:
                download.publish()
                intake.meter.add(blobs=1)
                return
        finally:
            download.close()
        intake.meter.add(size=-download.offset)
        intake.meter.wrong(sha256)
        zstd = False
        wrong_identities += not download.decoded
        if wrong_identities == 2:
            raise BlobMismatch(
                "the server sends bytes that do not match their digest, also on a second try",
                where=intake.endpoint.address(f"/v1/blobs/sha256/{sha256}"),
                expected=f"{sha256} ({size} bytes)",
                found=f"{found} ({download.offset} bytes)",
                remedy="nothing was published; let the server's administrator check its store",
            )


class _Download:
    """The state that survives a broken connection: what is written, and its hash so far."""

    def __init__(self, intake: Intake, *, sha256: str, size: int, zstd: bool) -> None:
        self._intake = intake
        self._sha256 = sha256
        self._size = size
        self._zstd = zstd
        self._staged = intake.private / sha256
        self._hashing = _Hashing(
            intake.buffers, piece=min(PIECE, size + 1), aside=size >= HASHED_ASIDE, crowded=intake.crowded
        )
        self.offset = 0
        self.decoded = False
        try:
            self._descriptor = os.open(
                self._staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o444
            )
        except OSError as error:
            raise storage_error(error, where=intake.cache.root) from error

    @property
    def digest(self) -> str:
        """The SHA-256 of all that was taken in."""
        return self._hashing.hexdigest()

    def attempt(self) -> None:
        """Read on from where the last attempt stopped, to the end of the body."""
        zstd = self._zstd and self.offset == 0
        headers = {"Accept-Encoding": "zstd" if zstd else "identity"}
        if self.offset:
            headers["Range"] = f"bytes={self.offset}-"
        with self._intake.send("GET", f"/v1/blobs/sha256/{self._sha256}", headers) as response:
            try:
                self._take(response)
            finally:
                self._intake.meter.add(wire=response.received)

    def _take(self, response: Response) -> None:
        if response.status == 206:
            start = response.headers.get("content-range", "").partition(" ")[2].partition("-")[0]
            if start != str(self.offset):
                raise ServerProtocol(
                    "the server sends another range than asked",
                    where=response.url,
                    expected=f"bytes {self.offset}-",
                    found=response.headers.get("content-range"),
                )
        else:
            self._rewind()
        encoding = response.headers.get("content-encoding", "identity")
        if encoding == "zstd":
            self.decoded = True
            self._read(ZstdBody(response).readinto, response)
        elif encoding == "identity":
            self._read(response.readinto, response)
        else:
            raise ServerProtocol(
                "the server sends an encoding that was not asked for", where=response.url, found=encoding
            )

    def _read(self, readinto: Callable[[memoryview], int], response: Response) -> None:
        hashing, meter = self._hashing, self._intake.meter
        begun = self.offset
        while True:
            self._intake.stop()
            buffer = hashing.buffer()
            try:
                count = readinto(buffer)
            except BadZstd:
                # What was decoded before may be wrong as well: leave it to the digest.
                hashing.update(memoryview(b"undecodable"))
                return
            if not count:
                break
            piece = buffer[:count]
            hashing.update(piece)
            try:
                _write(self._descriptor, piece)
            except OSError as error:
                raise storage_error(error, where=self._intake.cache.root) from error
            self.offset += count
            meter.add(size=count)
            if self.offset > self._size:
                return
        if self.offset < self._size and (self.decoded or "content-length" not in response.headers):
            raise unreachable(
                response.url, ConnectionError("the body ended early"), progress=self.offset > begun
            )

    def _rewind(self) -> None:
        if self.offset:
            self._intake.meter.add(size=-self.offset)
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            self.offset = 0
            self._hashing.restart()

    def publish(self) -> None:
        """Give the verified bytes their name."""
        try:
            os.fchmod(self._descriptor, 0o444)
            self._staged.replace(self._intake.cache.blob_path(self._sha256))
        except OSError as error:
            raise storage_error(error, where=self._intake.cache.root) from error

    def close(self) -> None:
        """Close the private file; it goes with the private directory, or by the next attempt."""
        self._hashing.close()
        os.close(self._descriptor)


class _Hashing:
    """A SHA-256 fed piece by piece; `aside` in a thread of its own, while the next piece is received.

    That pays where a core would idle. Where there is none, a piece is hashed at once, still in the cache.
    """

    def __init__(
        self, buffers: list[memoryview], *, piece: int, aside: bool, crowded: Callable[[], bool]
    ) -> None:
        """Use `buffers`, to which what is missing is added, `piece` bytes of each."""
        count = 4 if aside else 1
        while len(buffers) < count:
            buffers.append(memoryview(bytearray(PIECE)))
        self._buffers = [buffer[:piece] for buffer in buffers[:count]]
        self._pool: ThreadPoolExecutor | None = None
        self._aside = aside
        self._crowded = crowded
        self._pending: deque[Future[None]] = deque()
        self._digest = hashlib.sha256()
        self._next = 0

    def buffer(self) -> memoryview:
        """Return a buffer whose last content has been hashed."""
        if self._pending:
            if len(self._pending) == len(self._buffers):
                self._pending.popleft().result()
            self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next]

    def update(self, piece: memoryview) -> None:
        """Take in a piece, which stays as it is until its buffer is asked for again."""
        if not self._aside or self._crowded():
            self._drain()
            self._digest.update(piece)
            return
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._pending.append(self._pool.submit(self._digest.update, piece))

    def hexdigest(self) -> str:
        """Return the digest of all pieces."""
        self._drain()
        return self._digest.hexdigest()

    def restart(self) -> None:
        """Forget all pieces."""
        self._drain()
        self._digest = hashlib.sha256()

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown()

    def _drain(self) -> None:
        while self._pending:
            self._pending.popleft().result()


class BadZstd(Exception):
    """Bytes that are no zstd frames."""


class ZstdBody:
    """A response's body with its zstd frames decoded; frames may follow one another (RFC 8878, 3.1)."""

    def __init__(self, response: Response) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._reader = zstandard.ZstdDecompressor().stream_reader(
            cast("IO[bytes]", _Source(response)), read_size=1 << 18, read_across_frames=True, closefd=False
        )

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer` with decoded bytes; 0 at the end. Raise BadZstd or Transient."""
        try:
            return self._reader.readinto(buffer)
        except self._error as error:
            raise BadZstd(str(error)) from error


class _Source:
    def __init__(self, response: Response) -> None:
        self._response = response

    def read(self, size: int) -> bytes:
        return self._response.read(size)


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
