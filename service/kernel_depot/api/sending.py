"""Bodies of known length: bytes move from the store to the socket in big pieces, whole or not at all."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Protocol, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kernel_depot.api.problems import ApiError

Piece: TypeAlias = bytes | bytearray | memoryview

# A mapped piece is not copied in this process; 4 MiB hide the hop to the thread that reads it in.
MAPPED_PIECE = 4 << 20
READ_PIECE = 1 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14: reads pages in, fails beyond the file's end
_threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix="depot-body")


class BlobDamaged(ApiError):
    """A blob whose stored bytes are gone, or not as many as the catalog says."""

    slug = "blob-damaged"
    title = "The stored blob is damaged"
    status = 500


def damaged(sha256: str, *, expected: int, found: object) -> BlobDamaged:
    """Describe a blob that must not be sent."""
    return BlobDamaged(
        f"the store's copy of {sha256} is damaged and is not served",
        where=f"blobs/sha256/{sha256}",
        expected=f"{expected} bytes",
        found=found,
        remedy="materialize the wheel it came from again",
    )


class Body(Protocol):
    """Bytes to send. They are opened, and their length checked, before the body is made."""

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the bytes in order. A piece is never changed after it was yielded."""
        ...

    def close(self) -> None:
        """Let go of what is open, also when nothing was read."""
        ...


def _maps_ahead() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as probe:
        try:
            probe.madvise(_POPULATE_READ)
        except OSError:
            return False
    return True


class FileBody:
    """Bytes `start` to `end` of a file that must be `size` bytes long. Raise BlobDamaged otherwise."""

    def __init__(
        self, path: Path, *, sha256: str, size: int, start: int, end: int, mapped: bool | None = None
    ) -> None:
        self._start, self._end = start, end
        self._sha256 = sha256
        self._file: int | None = None
        self._map: mmap.mmap | None = None
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise damaged(sha256, expected=size, found=error.strerror) from error
        try:
            found = os.fstat(file).st_size
            if found != size:
                raise damaged(sha256, expected=size, found=f"{found} bytes")
            if size and (_MAPS_AHEAD if mapped is None else mapped):
                self._map = mmap.mmap(file, size, prot=mmap.PROT_READ)
            else:
                self._file, file = file, -1
        finally:
            if file >= 0:
                os.close(file)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the bytes; the pages of a mapped piece are read in by a thread before the loop sees them."""
        loop = asyncio.get_running_loop()
        position = self._start
        if self._map is not None:
            view = memoryview(self._map)
            while position < self._end:
                page = position - position % mmap.PAGESIZE
                after = min(position - position % MAPPED_PIECE + MAPPED_PIECE, self._end)
                try:
                    await loop.run_in_executor(
                        _threads, self._map.madvise, _POPULATE_READ, page, after - page
                    )
                except OSError as error:
                    raise damaged(self._sha256, expected=self._end, found=error.strerror) from error
                yield view[position:after]
                position = after
            return
        assert self._file is not None
        while position < self._end:
            count = min(READ_PIECE, self._end - position)
            piece = await loop.run_in_executor(_threads, os.pread, self._file, count, position)
            if not piece:
                raise damaged(self._sha256, expected=self._end, found=f"{position} bytes")
            yield piece
            position += len(piece)

    def close(self) -> None:
        """Close the file. The map goes with the last piece that the socket still holds."""
        self._map = None
        if self._file is not None:
            os.close(self._file)
            self._file = None


_MAPS_AHEAD = _maps_ahead()


class IteratedBody:
    """Bytes that a blocking iterator produces; it runs in a thread, one piece at a time."""

    def __init__(self, iterator: Iterator[Piece]) -> None:
        self._iterator = iterator

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield what the iterator yields, made one piece ahead of the socket."""
        loop = asyncio.get_running_loop()
        ahead = loop.run_in_executor(_threads, next, self._iterator, None)
        try:
            while (piece := await ahead) is not None:
                ahead = loop.run_in_executor(_threads, next, self._iterator, None)
                yield piece
        finally:
            await asyncio.wait([ahead])
            if not ahead.cancelled():
                ahead.exception()

    def close(self) -> None:
        """Close the iterator when it is a generator."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class SizedResponse(Response):
    """An answer whose Content-Length is known before its first byte; `body` None sends the head alone.

    When the body ends early or fails, the answer stays unfinished and the server cuts the connection.
    """

    def __init__(
        self,
        source: Body | None,
        *,
        length: int,
        status: int = 200,
        media_type: str,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            status_code=status,
            media_type=media_type,
            headers={**headers, "content-length": str(length)},
        )
        self._source = source
        self._length = length

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then the pieces as fast as the client takes them."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._source is None or self._length == 0 or scope["method"] == "HEAD":
            if self._source is not None:
                self._source.close()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        gone = asyncio.ensure_future(_disconnected(receive))
        left = self._length
        try:
            async with aclosing(self._source.pieces()) as pieces:
                async for piece in pieces:
                    if gone.done():
                        return
                    left -= len(piece)
                    await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
        finally:
            gone.cancel()
            self._source.close()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
