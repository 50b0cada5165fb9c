"""Many small blobs in one answer: a tar stream (POSIX ustar) whose members are published as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from kernel_depot.worker.blobs import BadZstd, Intake, ZstdBody, fetch_blob, publish
from kernel_depot.worker.errors import ServerProtocol
from kernel_depot.worker.transport import PIECE, Response, Transient, retrying, unreachable

BLOCK = 512
Wanted = Sequence[tuple[str, int]]


def fetch_many(intake: Intake, wanted: Wanted) -> None:
    """Bring in blobs, named with their sizes, through as few requests as the network allows.

    Every blob is published as soon as it is whole and right, so a broken stream goes on after the last
    one. A blob whose bytes are wrong, or at which the stream breaks twice, is asked for on its own, which
    either heals it or tells why not. Raise what `fetch_blob` raises.
    """
    left = list(wanted)
    wrong: list[tuple[str, int]] = []
    zstd = intake.zstd
    stuck_at: str | None = None

    def attempt() -> None:
        nonlocal zstd, stuck_at
        before = len(left)
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/x-tar",
            "Accept-Encoding": "zstd" if zstd else "identity",
        }
        content = json.dumps(
            {
                "sha256": [sha256 for sha256, _ in left],
                "accept": ["zstd", "identity"] if zstd else ["identity"],
            }
        ).encode()
        try:
            with intake.send("POST", "/v1/blobs/stream", headers, content) as response:
                try:
                    _take(intake, response, left, wrong)
                finally:
                    intake.meter.add(wire=response.received)
        except BadZstd as error:
            zstd = False
            raise unreachable(
                intake.endpoint.address("/v1/blobs/stream"), error, progress=len(left) < before
            ) from error
        except Transient as failure:
            if left and left[0][0] == stuck_at:
                wrong.append(left.pop(0))
            stuck_at = left[0][0] if left else None
            if len(left) < before:
                failure.cause.data["progress"] = True
            raise

    def until_done() -> None:
        while left:
            attempt()

    retrying(until_done, patience=intake.endpoint.patience)
    for sha256, size in wrong:
        intake.meter.wrong(sha256)
        fetch_blob(
            Intake(**{**vars(intake), "zstd": False}),
            sha256=sha256,
            size=size,
        )


def _take(
    intake: Intake, response: Response, left: list[tuple[str, int]], wrong: list[tuple[str, int]]
) -> None:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "zstd"):
        raise ServerProtocol(
            "the server sends an encoding that was not asked for", where=response.url, found=encoding
        )
    readinto = ZstdBody(response).readinto if encoding == "zstd" else response.readinto
    for sha256, data in read_members(readinto, tuple(left), where=response.url):
        intake.stop()
        if publish(intake, sha256=sha256, data=data):
            intake.meter.add(blobs=1, size=len(data))
        else:
            wrong.append((sha256, len(data)))
        left.pop(0)


def read_members(
    readinto: Callable[[memoryview], int], wanted: Wanted, *, where: str
) -> Iterator[tuple[str, memoryview]]:
    """Read the members of a ustar stream, which must be `sha256/<hex>` files as wanted, in that order.

    The server may end the archive after any number of members. The bytes of a member are valid until
    the next is asked for. Raise ServerProtocol for another member than wanted, Transient at a broken end.
    """
    largest = max(size for _, size in wanted)
    buffer = memoryview(bytearray(max(2 * PIECE, largest + 3 * BLOCK)))
    start = end = 0

    def fill(count: int) -> bool:
        """Have `count` bytes in the buffer; False when the stream ends before the first of them."""
        nonlocal start, end
        if start + count > len(buffer):
            buffer[: end - start] = buffer[start:end]
            start, end = 0, end - start
        while end - start < count:
            got = readinto(buffer[end : end + max(PIECE, count)])
            if not got:
                if start == end:
                    return False
                raise unreachable(where, ConnectionError("the stream ended within a member"), progress=True)
            end += got
        return True

    for sha256, size in wanted:
        if not fill(BLOCK):
            raise unreachable(where, ConnectionError("the stream ended without its end mark"))
        header = bytes(buffer[start : start + BLOCK])
        if not header.strip(b"\0"):
            break
        name = header[:100].rstrip(b"\0").decode("ascii", "replace")
        length = _octal(header[124:136], where=where)
        if name != f"sha256/{sha256}" or length != size or header[156:157] not in (b"0", b"\0"):
            raise ServerProtocol(
                "the stream holds another member than asked for",
                where=where,
                expected=f"sha256/{sha256}, {size} bytes",
                found=f"{name}, {length} bytes",
            )
        start += BLOCK
        padded = -(-size // BLOCK) * BLOCK
        if padded and not fill(padded):
            raise unreachable(where, ConnectionError("the stream ended within a member"), progress=True)
        yield sha256, buffer[start : start + size]
        start += padded
    # Read the end mark, so that the connection can be used again.
    while readinto(buffer):
        pass


def _octal(field: bytes, *, where: str) -> int:
    try:
        return int(field.strip(b" \0"), 8)
    except ValueError:
        raise ServerProtocol("the stream has a broken header", where=where, found=repr(field)) from None
