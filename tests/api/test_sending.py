from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.types import Message

from kernel_depot.api.sending import (
    MAPPED_PIECE,
    READ_PIECE,
    BlobDamaged,
    Body,
    FileBody,
    IteratedBody,
    Piece,
    SizedResponse,
)

SHA256 = "ab" * 32
SIZE = 2 * MAPPED_PIECE + 12_345


@pytest.fixture(scope="module")
def data() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> Path:
    path = tmp_path_factory.mktemp("sending") / "blob"
    path.write_bytes(data)
    return path


async def collected(body: Body) -> list[bytes]:
    pieces = [bytes(piece) async for piece in body.pieces()]
    body.close()
    return pieces


def opened(path: Path, *, start: int = 0, end: int = SIZE, mapped: bool, size: int = SIZE) -> FileBody:
    return FileBody(path, sha256=SHA256, size=size, start=start, end=end, mapped=mapped)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    ("start", "end"),
    [
        (0, SIZE),
        (0, 0),
        (0, 1),
        (SIZE - 1, SIZE),
        (4095, 4097),
        (MAPPED_PIECE - 1, MAPPED_PIECE + 1),
        (READ_PIECE, 3 * READ_PIECE),
        (12_345, 2 * MAPPED_PIECE + 1),
    ],
)
def test_file_body_yields_exactly_the_range(
    path: Path, data: bytes, start: int, end: int, mapped: bool
) -> None:
    pieces = asyncio.run(collected(opened(path, start=start, end=end, mapped=mapped)))
    assert b"".join(pieces) == data[start:end]
    assert all(0 < len(piece) <= (MAPPED_PIECE if mapped else READ_PIECE) for piece in pieces)


def test_empty_file_has_no_pieces(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert asyncio.run(collected(opened(empty, end=0, size=0, mapped=True))) == []


@pytest.mark.parametrize("mapped", [True, False])
def test_file_of_another_length_is_damaged_before_anything_is_sent(path: Path, mapped: bool) -> None:
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(BlobDamaged) as refused:
            opened(path, end=1, size=size, mapped=mapped)
        assert refused.value.found == f"{SIZE} bytes"


def test_file_that_is_gone_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(BlobDamaged):
        opened(tmp_path / "nothing", mapped=True)


@pytest.mark.parametrize("mapped", [True, False])
def test_file_cut_while_it_is_sent_ends_in_an_error_not_in_other_bytes(
    tmp_path: Path, data: bytes, mapped: bool
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(data)
    body = opened(victim, mapped=mapped)

    async def send() -> bytes:
        got = b""
        try:
            async for piece in body.pieces():
                got += bytes(piece)
                os.truncate(victim, MAPPED_PIECE)
        except BlobDamaged:
            return got
        finally:
            body.close()
        raise AssertionError("the cut went unseen")

    got = asyncio.run(send())
    assert data.startswith(got)
    assert len(got) == MAPPED_PIECE


async def answered(response: SizedResponse, *, method: str = "GET", leave_after: int = -1) -> list[Message]:
    """Run a response; the client disconnects after so many body messages."""
    messages: list[Message] = []
    left = asyncio.Event()

    async def send(message: Message) -> None:
        messages.append(message)
        if len(messages) - 1 == leave_after:
            left.set()
        await asyncio.sleep(0)

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    await response({"type": "http", "method": method}, receive, send)
    return messages


class Watched:
    """An iterator that knows how far it was read and whether it was closed."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.produced = 0
        self.closed = False
        self._pieces = pieces

    def __call__(self) -> Iterator[Piece]:
        try:
            for piece in self._pieces:
                self.produced += 1
                yield piece
        finally:
            self.closed = True


def test_sized_response_ends_with_its_last_byte() -> None:
    watched = Watched([b"ab", b"cd"])
    response = SizedResponse(IteratedBody(watched()), length=4, media_type="x/y", headers={"a": "b"})
    start, *body = asyncio.run(answered(response))
    assert (b"content-length", b"4") in start["headers"]
    assert [(message["body"], message["more_body"]) for message in body] == [(b"ab", True), (b"cd", False)]
    assert watched.closed


def test_sized_response_that_comes_short_never_says_it_is_over() -> None:
    watched = Watched([b"ab", b"cd"])
    response = SizedResponse(IteratedBody(watched()), length=5, media_type="x/y", headers={})
    assert all(message["more_body"] for message in asyncio.run(answered(response))[1:])


def test_sized_response_stops_reading_when_the_client_leaves() -> None:
    watched = Watched([b"x"] * 1000)
    response = SizedResponse(IteratedBody(watched()), length=1000, media_type="x/y", headers={})
    messages = asyncio.run(answered(response, leave_after=3))
    assert len(messages) < 10
    assert watched.closed
    assert watched.produced < 10


def test_head_sends_the_length_alone(path: Path) -> None:
    response = SizedResponse(opened(path, mapped=True), length=SIZE, media_type="x/y", headers={})
    start, body = asyncio.run(answered(response, method="HEAD"))
    assert (b"content-length", str(SIZE).encode()) in start["headers"]
    assert body == {"type": "http.response.body", "body": b"", "more_body": False}
