from __future__ import annotations

import email.utils
import hashlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_depot.wheels import fetch_problems as problems
from kernel_depot.wheels.fetch import FetchPolicy, fetch
from kernel_depot.wheels.upstream import retry_after

BODY = hashlib.shake_256(b"a wheel").digest(3_000_000)
SHA256 = hashlib.sha256(BODY).hexdigest()
OTHER = hashlib.shake_256(b"another wheel").digest(3_000_000)
ETAG = '"v1"'


@dataclass
class Request:
    """What a client asked for."""

    path: str
    headers: dict[str, str]


class Reply:
    """The server's side of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def head(self, status: int, **headers: object) -> None:
        lines = [f"HTTP/1.1 {status} Because"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.send("\r\n".join([*lines, "Connection: close", "", ""]).encode())


Behaviour = Callable[["Request", "Reply"], None]


@dataclass
class Server:
    """A loopback HTTP server whose next answers are planned; with an empty plan it serves `body` rightly."""

    url: str
    body: bytes = BODY
    etag: str | None = ETAG
    plan: list[Behaviour] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def answer(self, request: Request, reply: Reply) -> None:
        headers = {"ETag": self.etag} if self.etag else {}
        wanted = request.headers.get("range", "")
        if wanted and request.headers.get("if-range") in (None, self.etag):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(self.body):
                reply.head(416, Content_Length=0)
                return
            rest = self.body[start:]
            span = f"bytes {start}-{len(self.body) - 1}/{len(self.body)}"
            reply.head(206, Content_Length=len(rest), Content_Range=span, **headers)
            reply.send(rest)
        else:
            reply.head(200, Content_Length=len(self.body), **headers)
            reply.send(self.body)

    def drop_after(self, count: int, **headers: object) -> Behaviour:
        def behave(request: Request, reply: Reply) -> None:
            known: dict[str, object] = {"Content_Length": len(self.body), "ETag": self.etag}
            known.update(headers)
            reply.head(200, **{name: value for name, value in known.items() if value is not None})
            reply.send(self.body[:count])

        return behave


def status(code: int, **headers: object) -> Behaviour:
    return lambda request, reply: reply.head(code, Content_Length=0, **headers)


def _serve(server: Server, listener: socket.socket, context: ssl.SSLContext | None) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_converse, args=(server, connection, context), daemon=True).start()


def _converse(server: Server, connection: socket.socket, context: ssl.SSLContext | None) -> None:
    try:
        with connection:
            stream = context.wrap_socket(connection, server_side=True) if context else connection
            with stream:
                data = b""
                while b"\r\n\r\n" not in data:
                    piece = stream.recv(65536)
                    if not piece:
                        return
                    data += piece
                first, *lines = data.decode().split("\r\n")
                pairs = (line.split(": ", 1) for line in lines if line)
                request = Request(first.split()[1], {name.lower(): value for name, value in pairs})
                server.requests.append(request)
                behave = server.plan.pop(0) if server.plan else server.answer
                behave(request, Reply(stream))
    except OSError:
        pass


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    listeners: list[socket.socket] = []

    def start(context: ssl.SSLContext | None = None) -> Server:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        scheme = "https" if context else "http"
        server = Server(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/wheel.whl")
        threading.Thread(target=_serve, args=(server, listener, context), daemon=True).start()
        return server

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    return start_server()


POLICY = FetchPolicy(
    allowed_hosts=frozenset({"127.0.0.1", "localhost"}),
    allow_private_addresses=True,
    allow_http=True,
    trust_env=False,
    backoff_initial=0.01,
    backoff_max=0.02,
    backoff_jitter=0.01,
    attempts=3,
    read_timeout=5,
)


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# The plain case


def test_downloads_and_verifies(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    found = fetch(
        server.url,
        sha256=SHA256,
        dest=tmp_path / "w",
        policy=POLICY,
        size=len(BODY),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert found.path.read_bytes() == BODY
    assert (found.size, found.attempts, found.resumed_bytes) == (len(BODY), 1, 0)
    assert left(tmp_path) == ["w"]
    assert seen[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert server.requests[0].headers["accept-encoding"] == "identity"


def test_a_finished_file_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(BODY)
    assert fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY).attempts == 0
    assert server.requests == []


def test_a_damaged_finished_file_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(BODY[:-1] + b"x")
    assert fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY).attempts == 1
    assert (tmp_path / "w").read_bytes() == BODY


def test_a_body_without_content_length_is_taken(server: Server, tmp_path: Path) -> None:
    def unsized(request: Request, reply: Reply) -> None:
        reply.head(200)
        reply.send(BODY)

    server.plan = [unsized]
    assert fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY).size == len(BODY)


# Drops and resumption


def test_a_drop_is_resumed_from_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.plan = [server.drop_after(1_500_000)]
    found = fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert found.attempts == 2
    again = server.requests[1].headers
    assert again["range"] == "bytes=1500000-"
    assert again["if-range"] == ETAG
    assert found.path.read_bytes() == BODY


def test_last_modified_serves_where_there_is_no_strong_etag(server: Server, tmp_path: Path) -> None:
    date = "Tue, 01 Sep 2026 10:00:00 GMT"
    server.etag = date
    server.plan = [server.drop_after(700_000, ETag='W/"weak"', Last_Modified=date)]
    fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert server.requests[1].headers["if-range"] == date
    assert server.requests[1].headers["range"] == "bytes=700000-"


def test_without_validator_it_starts_again(server: Server, tmp_path: Path) -> None:
    server.plan = [server.drop_after(700_000, ETag=None)]
    assert fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY).attempts == 2
    assert "range" not in server.requests[1].headers


def test_a_server_that_ignores_range_starts_again(server: Server, tmp_path: Path) -> None:
    server.plan = [server.drop_after(1_500_000), server.drop_after(len(BODY))]
    found = fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert found.path.read_bytes() == BODY
    assert "range" in server.requests[1].headers


def test_a_file_changed_upstream_starts_again(server: Server, tmp_path: Path) -> None:
    def old(request: Request, reply: Reply) -> None:
        reply.head(200, Content_Length=len(OTHER), ETag='"v0"')
        reply.send(OTHER[:1_000_000])

    server.plan = [old]
    found = fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert found.path.read_bytes() == BODY
    assert server.requests[1].headers["if-range"] == '"v0"'


def test_a_changed_file_under_the_old_etag_is_found_by_its_hash(server: Server, tmp_path: Path) -> None:
    def old(request: Request, reply: Reply) -> None:
        reply.head(200, Content_Length=len(OTHER), ETag=ETAG)
        reply.send(OTHER[:1_000_000])

    server.plan = [old]
    found = fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert found.path.read_bytes() == BODY
    assert found.attempts == 3
    assert "range" not in server.requests[2].headers


@pytest.mark.parametrize(
    "span",
    [
        "bytes 0-2999999/3000000",
        "bytes 1500001-2999999/3000000",
        "bytes 1500000-2999999/3000001",
        "bytes 1500000-2999998/3000000",
        "items 1500000-2999999/3000000",
        "nonsense",
        None,
    ],
)
def test_a_wrong_content_range_is_not_appended(server: Server, tmp_path: Path, span: str | None) -> None:
    def lie(request: Request, reply: Reply) -> None:
        reply.head(206, Content_Length=4, ETag=ETAG, **({"Content_Range": span} if span else {}))
        reply.send(b"evil")

    server.plan = [server.drop_after(1_500_000), lie]
    found = fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert found.path.read_bytes() == BODY
    assert "range" not in server.requests[2].headers


def test_another_etag_in_a_206_is_not_appended(server: Server, tmp_path: Path) -> None:
    def lie(request: Request, reply: Reply) -> None:
        reply.head(206, Content_Length=1_500_000, ETag='"v2"', Content_Range="bytes 1500000-2999999/3000000")
        reply.send(OTHER[1_500_000:])

    server.plan = [server.drop_after(1_500_000), lie]
    assert fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY).attempts == 3


def test_a_refused_range_starts_again(server: Server, tmp_path: Path) -> None:
    server.plan = [server.drop_after(1_500_000), status(416)]
    assert fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY).attempts == 3


def test_an_unasked_206_is_refused(server: Server, tmp_path: Path) -> None:
    server.plan = [status(206, Content_Range="bytes 0-0/1")]
    with pytest.raises(problems.UpstreamInvalid):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)


def test_progress_earns_new_attempts(server: Server, tmp_path: Path) -> None:
    policy = replace(POLICY, attempts=2, progress_bytes=100_000)

    def crumb(request: Request, reply: Reply) -> None:
        start = int(request.headers.get("range", "bytes=0-")[6:-1])
        code = 206 if "range" in request.headers else 200
        span = {"Content_Range": f"bytes {start}-{len(BODY) - 1}/{len(BODY)}"} if start else {}
        reply.head(code, Content_Length=len(BODY) - start, ETag=ETAG, **span)
        reply.send(BODY[start : start + 300_000])

    server.plan = [crumb] * 9
    assert fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=policy).attempts == 10


def test_the_same_bytes_over_and_over_are_no_progress(server: Server, tmp_path: Path) -> None:
    server.plan = [server.drop_after(1_500_000, ETag=None) for _ in range(20)]
    with pytest.raises(problems.UpstreamDropped):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert len(server.requests) == POLICY.attempts


def test_what_came_before_a_failure_is_used_by_the_next_call(server: Server, tmp_path: Path) -> None:
    policy = replace(POLICY, attempts=1)
    server.plan = [server.drop_after(2_000_000)]
    with pytest.raises(problems.UpstreamDropped):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=policy)
    assert not (tmp_path / "w").exists()
    found = fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=policy)
    assert (found.attempts, found.resumed_bytes) == (1, 2_000_000)
    assert server.requests[1].headers["range"] == "bytes=2000000-"
    assert left(tmp_path) == ["w"]


def test_a_new_signature_does_not_lose_what_came_and_none_is_kept(server: Server, tmp_path: Path) -> None:
    policy = replace(POLICY, attempts=1)
    server.plan = [server.drop_after(2_000_000)]
    with pytest.raises(problems.UpstreamDropped):
        fetch(server.url + "?sig=secret", sha256=SHA256, dest=tmp_path / "w", policy=policy)
    assert all(b"secret" not in path.read_bytes() for path in tmp_path.iterdir())
    found = fetch(server.url + "?sig=other", sha256=SHA256, dest=tmp_path / "w", policy=policy)
    assert found.resumed_bytes == 2_000_000
    assert "secret" not in found.url


def test_a_torn_partial_is_found_by_its_hash(server: Server, tmp_path: Path) -> None:
    policy = replace(POLICY, attempts=1)
    server.plan = [server.drop_after(2_000_000)]
    with pytest.raises(problems.UpstreamDropped):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=policy)
    (part,) = tmp_path.glob("*.part")
    part.write_bytes(bytes(1_000_000) + part.read_bytes()[1_000_000:])
    found = fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=policy)
    assert found.path.read_bytes() == BODY
    assert (found.attempts, found.resumed_bytes) == (2, 0)


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"url": 3}', b'{"url": "x", "more": 1}', None])
def test_a_partial_without_a_readable_note_is_not_used(
    server: Server, tmp_path: Path, note: bytes | None
) -> None:
    (tmp_path / "w.0123abcd.part").write_bytes(BODY[:1000])
    if note is not None:
        (tmp_path / "w.0123abcd.part.json").write_bytes(note)
    found = fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert "range" not in server.requests[0].headers
    assert found.resumed_bytes == 0
    assert left(tmp_path) == ["w"]


def test_a_partial_from_another_url_is_not_used(server: Server, tmp_path: Path) -> None:
    note = {"url": "https://elsewhere.example/w", "etag": ETAG, "last_modified": None, "length": len(BODY)}
    (tmp_path / "w.0123abcd.part").write_bytes(OTHER[:1000])
    (tmp_path / "w.0123abcd.part.json").write_text(json.dumps(note))
    fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert "range" not in server.requests[0].headers
    assert left(tmp_path) == ["w"]


def test_an_exception_of_the_progress_callback_ends_it_and_keeps_what_came(
    server: Server, tmp_path: Path
) -> None:
    class Stopped(Exception):
        pass

    def stop(done: int, total: int | None) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY, on_progress=stop)
    assert fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY).resumed_bytes >= 1 << 20


CHILD = """
import sys
from pathlib import Path
from kernel_depot.wheels.fetch import FetchPolicy, fetch
url, sha256, dest = sys.argv[1:]
policy = FetchPolicy(
    allowed_hosts=frozenset({"127.0.0.1"}), allow_private_addresses=True, allow_http=True, trust_env=False
)
print(fetch(url, sha256=sha256, dest=Path(dest), policy=policy).resumed_bytes)
"""


def test_a_killed_process_is_resumed_by_the_next(server: Server, tmp_path: Path) -> None:
    stalled = threading.Event()
    finish = threading.Event()

    def stall(request: Request, reply: Reply) -> None:
        reply.head(200, Content_Length=len(BODY), ETag=ETAG)
        reply.send(BODY[:2_000_000])
        stalled.set()
        finish.wait(60)

    server.plan = [stall]
    command = [sys.executable, "-c", CHILD, server.url, SHA256, str(tmp_path / "w")]
    child = subprocess.Popen(command)
    try:
        assert stalled.wait(60)
        while not any(path.stat().st_size == 2_000_000 for path in tmp_path.glob("*.part")):
            assert child.poll() is None
            time.sleep(0.02)
        # While it lives, another process neither shares its file nor waits for it.
        other = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        assert other.stdout.split() == ["0"]
        (tmp_path / "w").unlink()
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        finish.set()
    found = fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert found.resumed_bytes == 2_000_000
    assert found.path.read_bytes() == BODY
    assert left(tmp_path) == ["w"]


# Retries


def test_transient_statuses_are_retried(server: Server, tmp_path: Path) -> None:
    server.plan = [status(503), status(429, Retry_After=0)]
    assert fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY).attempts == 3


def test_other_statuses_are_not_retried(server: Server, tmp_path: Path) -> None:
    server.plan = [status(404)]
    with pytest.raises(problems.UpstreamStatus) as caught:
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert caught.value.found == 404
    assert len(server.requests) == 1
    assert left(tmp_path) == []


def test_retries_end(server: Server, tmp_path: Path) -> None:
    server.plan = [status(500)] * 10
    with pytest.raises(problems.UpstreamStatus):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert len(server.requests) == POLICY.attempts


def test_a_wait_longer_than_the_limit_is_not_waited_for(server: Server, tmp_path: Path) -> None:
    server.plan = [status(429, Retry_After=3600)]
    with pytest.raises(problems.UpstreamStatus) as caught:
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert caught.value.retry_after == 3600


def test_retry_after_is_waited_for(server: Server, tmp_path: Path) -> None:
    server.plan = [status(429, Retry_After=1)]
    start = time.monotonic()
    fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert time.monotonic() - start >= 1


def test_retry_after_as_a_date() -> None:
    now = 1_800_000_000.0
    date = email.utils.formatdate(now + 90, usegmt=True)
    assert retry_after(date, now=now) == 90
    assert retry_after(date, now=now + 100) == 0


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_retry_after_never_fails(text: str) -> None:
    found = retry_after(text)
    assert found is None or found >= 0


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(problems.UpstreamUnreachable):
        fetch(f"http://127.0.0.1:{port}/w", sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert left(tmp_path) == []


def test_a_silent_server_times_out(server: Server, tmp_path: Path) -> None:
    finish = threading.Event()
    server.plan = [lambda request, reply: finish.wait(60)] * 3
    with pytest.raises(problems.DownloadTimeout):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=replace(POLICY, read_timeout=0.1))
    assert len(server.requests) == 3
    finish.set()


def test_a_body_that_stalls_is_resumed(server: Server, tmp_path: Path) -> None:
    finish = threading.Event()

    def stall(request: Request, reply: Reply) -> None:
        server.drop_after(1_000_000)(request, reply)
        finish.wait(60)

    server.plan = [stall]
    found = fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=replace(POLICY, read_timeout=0.3))
    finish.set()
    assert found.attempts == 2
    assert server.requests[1].headers["range"] == "bytes=1000000-"


def test_a_trickle_ends_with_the_total_time(server: Server, tmp_path: Path) -> None:
    finish = threading.Event()

    def trickle(request: Request, reply: Reply) -> None:
        reply.head(200, Content_Length=len(BODY), ETag=ETAG)
        while not finish.wait(0.02):
            reply.send(b"x")

    server.plan = [trickle]
    with pytest.raises(problems.DownloadTimeout, match="longer than"):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=replace(POLICY, total_timeout=0.3))
    finish.set()


# Wrong bytes


def test_a_wrong_hash_names_both_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.body = OTHER
    with pytest.raises(problems.WheelHashMismatch) as caught:
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert caught.value.expected == SHA256
    assert caught.value.found == hashlib.sha256(OTHER).hexdigest()
    assert left(tmp_path) == []
    assert len(server.requests) == 1


def test_a_wrong_hash_after_a_resumption_is_refetched_once(server: Server, tmp_path: Path) -> None:
    server.body = OTHER
    server.plan = [server.drop_after(1_000_000)]
    with pytest.raises(problems.WheelHashMismatch):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert len(server.requests) == 3
    assert left(tmp_path) == []


def test_a_file_over_the_limit_is_refused_before_its_body(server: Server, tmp_path: Path) -> None:
    server.plan = [lambda request, reply: reply.head(200, Content_Length=2_000_001)]
    with pytest.raises(problems.WheelTooLarge) as caught:
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=replace(POLICY, max_bytes=2_000_000))
    assert caught.value.found == 2_000_001
    assert left(tmp_path) == []


def test_an_unannounced_file_over_the_limit_is_cut_off(server: Server, tmp_path: Path) -> None:
    def unsized(request: Request, reply: Reply) -> None:
        reply.head(200)
        reply.send(BODY)

    server.plan = [unsized]
    with pytest.raises(problems.WheelTooLarge):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=replace(POLICY, max_bytes=2_000_000))
    assert left(tmp_path) == []


@pytest.mark.parametrize("size", [len(BODY) - 1, len(BODY) + 1])
def test_the_size_in_the_pin_is_exact(server: Server, tmp_path: Path, size: int) -> None:
    with pytest.raises(problems.WheelSizeMismatch):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY, size=size)
    assert left(tmp_path) == []


def test_the_size_in_the_pin_outranks_the_limit(server: Server, tmp_path: Path) -> None:
    policy = replace(POLICY, max_bytes=10)
    assert fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=policy, size=len(BODY)).size == len(
        BODY
    )


def test_a_content_length_that_promises_too_much_is_a_drop(server: Server, tmp_path: Path) -> None:
    server.plan = [server.drop_after(len(BODY), Content_Length=len(BODY) + 5, ETag=None)] * 9
    with pytest.raises(problems.UpstreamDropped):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)


def test_a_content_length_that_promises_too_little_is_a_wrong_hash(server: Server, tmp_path: Path) -> None:
    server.plan = [server.drop_after(len(BODY), Content_Length=len(BODY) - 5)]
    with pytest.raises(problems.WheelHashMismatch):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)


def test_an_encoded_body_is_refused(server: Server, tmp_path: Path) -> None:
    server.plan = [server.drop_after(len(BODY), Content_Encoding="gzip")]
    with pytest.raises(problems.UpstreamInvalid):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-hello\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://\xff\xfe:x/\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://xn--\xc3\xa9.example/\r\n\r\n",
    ],
)
def test_nonsense_instead_of_http(server: Server, tmp_path: Path, answer: bytes) -> None:
    server.plan = [lambda request, reply: reply.send(answer)] * 3
    with pytest.raises(problems.FetchError):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert left(tmp_path) == []


def test_a_full_disk_is_said_before_the_body(server: Server, tmp_path: Path) -> None:
    server.plan = [lambda request, reply: reply.head(200, Content_Length=1 << 60)]
    with pytest.raises(problems.DiskFull):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=replace(POLICY, max_bytes=1 << 61))
    assert left(tmp_path) == []


def test_a_disk_that_runs_full_leaves_nothing(server: Server, tmp_path: Path) -> None:
    # A limit on the size of files makes the kernel refuse the write; it holds for the child alone.
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
    ignored = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    child = subprocess.run(
        [sys.executable, "-c", limited + ignored + CHILD, server.url, SHA256, str(tmp_path / "w")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 1
    assert "DiskFull" in child.stderr
    assert left(tmp_path) == []


def test_an_unwritable_directory_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(problems.IncomingUnwritable):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "file" / "w", policy=POLICY)


# Where downloads may go


def redirect(target: str, code: int = 302) -> Behaviour:
    return status(code, Location=target)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_followed(server: Server, tmp_path: Path, code: int) -> None:
    server.plan = [redirect("/elsewhere?signature=secret", code)]
    found = fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert [request.path for request in server.requests] == ["/wheel.whl", "/elsewhere?signature=secret"]
    assert found.path.read_bytes() == BODY


def test_a_redirect_that_is_no_url_leads_nowhere(server: Server, tmp_path: Path) -> None:
    server.plan = [redirect("http://[::1/w")] * 9
    with pytest.raises(problems.FetchError):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert left(tmp_path) == []


def test_redirects_are_limited(server: Server, tmp_path: Path) -> None:
    server.plan = [redirect("/again")] * 20
    with pytest.raises(problems.RedirectRefused):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert len(server.requests) == POLICY.max_redirects + 1


def test_a_redirect_without_target(server: Server, tmp_path: Path) -> None:
    server.plan = [status(302)]
    with pytest.raises(problems.RedirectRefused):
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("ftp://127.0.0.1/w", problems.RedirectRefused),
        ("file:///etc/passwd", problems.RedirectRefused),
        ("http://user:secret@127.0.0.1/w", problems.RedirectRefused),
        ("http://evil.example/w?token=secret", problems.HostNotAllowed),
        ("http://169.254.169.254/latest/meta-data", problems.HostNotAllowed),
    ],
)
def test_redirects_to_elsewhere_are_refused(
    server: Server, tmp_path: Path, target: str, error: type[problems.FetchError]
) -> None:
    server.plan = [redirect(target)]
    with pytest.raises(error) as caught:
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert "secret" not in str(caught.value)
    assert len(server.requests) == 1
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://github.com/w", problems.UrlRefused),
        ("ftp://github.com/w", problems.UrlRefused),
        ("github.com/w", problems.UrlRefused),
        ("https:///w", problems.UrlRefused),
        ("https://github.com:99999/w", problems.UrlRefused),
        ("https://[github.com/w", problems.UrlRefused),
        ("https://user@github.com/w", problems.UrlRefused),
        ("https://user:secret@github.com/w", problems.UrlRefused),
        ("https://github.com/a b", problems.UrlRefused),
        ("https://github.com/\r\nX: y", problems.UrlRefused),
        ("https://gïthub.com/w", problems.UrlRefused),
        ("https://github.com.evil.example/w", problems.HostNotAllowed),
        ("https://127.0.0.1/w", problems.HostNotAllowed),
    ],
)
def test_urls_are_refused_before_anything_is_written(
    tmp_path: Path, url: str, error: type[problems.FetchError]
) -> None:
    with pytest.raises(error) as caught:
        fetch(url, sha256=SHA256, dest=tmp_path / "new" / "w", policy=FetchPolicy())
    assert "secret" not in str(caught.value)
    assert left(tmp_path) == []


def test_an_allowed_host_at_a_private_address_is_refused(server: Server, tmp_path: Path) -> None:
    policy = replace(POLICY, allow_private_addresses=False)
    with pytest.raises(problems.AddressRefused) as caught:
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=policy)
    assert caught.value.found == "127.0.0.1"
    assert server.requests == []


def test_a_name_is_resolved_once_and_the_checked_address_is_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def rebinding(host: str, *args: object, **kwargs: object) -> object:
        if host != "mirror.example":
            return resolve(host, *args, **kwargs)
        asked.append(host)
        return resolve("127.0.0.1" if len(asked) == 1 else "192.0.2.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    policy = replace(POLICY, allowed_hosts=frozenset({"mirror.example"}))
    url = server.url.replace("127.0.0.1", "mirror.example")
    fetch(url, sha256=SHA256, dest=tmp_path / "w", policy=policy)
    assert asked == ["mirror.example"]
    assert server.requests[0].headers["host"] == url.split("/")[2]


def test_the_next_address_is_tried(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def two(host: str, port: int, *args: object, **kwargs: object) -> list[object]:
        if host != "mirror.example":
            return resolve(host, port, *args, **kwargs)
        return [*resolve("127.0.0.2", port, *args, **kwargs), *resolve("127.0.0.1", port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    policy = replace(POLICY, allowed_hosts=frozenset({"mirror.example"}))
    url = server.url.replace("127.0.0.1", "mirror.example")
    assert fetch(url, sha256=SHA256, dest=tmp_path / "w", policy=policy).attempts == 1


# TLS and proxies


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secure(authority: trustme.CA, start_server: Callable[..., Server]) -> Server:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    server = start_server(context)
    server.url = server.url.replace("127.0.0.1", "localhost")
    return server


@pytest.fixture
def trusting(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> FetchPolicy:
    bundle = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(bundle))
    return replace(POLICY, ca_bundle=bundle)


def test_https_with_the_hosts_own_name(secure: Server, trusting: FetchPolicy, tmp_path: Path) -> None:
    found = fetch(secure.url, sha256=SHA256, dest=tmp_path / "w", policy=trusting)
    assert found.path.read_bytes() == BODY


def test_an_unknown_authority_is_not_trusted(secure: Server, tmp_path: Path) -> None:
    with pytest.raises(problems.UpstreamUntrusted):
        fetch(secure.url, sha256=SHA256, dest=tmp_path / "w", policy=POLICY)
    assert left(tmp_path) == []


def test_a_certificate_for_another_name_is_not_trusted(
    secure: Server, trusting: FetchPolicy, tmp_path: Path
) -> None:
    url = secure.url.replace("localhost", "127.0.0.1")
    with pytest.raises(problems.UpstreamUntrusted):
        fetch(url, sha256=SHA256, dest=tmp_path / "w", policy=trusting)


def test_the_environment_names_the_authority(
    secure: Server, trusting: FetchPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(trusting.ca_bundle))
    monkeypatch.setenv("no_proxy", "*")
    policy = replace(POLICY, trust_env=True)
    assert fetch(secure.url, sha256=SHA256, dest=tmp_path / "w", policy=policy).size == len(BODY)


def test_an_unusable_bundle_is_named(secure: Server, tmp_path: Path) -> None:
    (tmp_path / "not.pem").write_text("no certificate")
    for bundle in (tmp_path / "absent.pem", tmp_path / "not.pem"):
        with pytest.raises(problems.CaBundleUnusable):
            fetch(secure.url, sha256=SHA256, dest=tmp_path / "w", policy=replace(POLICY, ca_bundle=bundle))


def test_a_redirect_never_leaves_https(
    secure: Server, server: Server, trusting: FetchPolicy, tmp_path: Path
) -> None:
    secure.plan = [redirect(server.url)]
    with pytest.raises(problems.RedirectRefused):
        fetch(secure.url, sha256=SHA256, dest=tmp_path / "w", policy=trusting)
    assert server.requests == []


def test_the_environments_proxy_is_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/wheel.whl"))
    monkeypatch.setenv("no_proxy", "")
    policy = replace(POLICY, trust_env=True, allowed_hosts=frozenset({"mirror.example"}))
    fetch("http://mirror.example/wheel.whl", sha256=SHA256, dest=tmp_path / "w", policy=policy)
    assert server.requests[0].path == "http://mirror.example/wheel.whl"


def test_a_proxy_does_not_lead_to_refused_addresses(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "")
    policy = replace(
        POLICY, trust_env=True, allow_private_addresses=False, allowed_hosts=frozenset({"169.254.169.254"})
    )
    with pytest.raises(problems.AddressRefused):
        fetch("http://169.254.169.254/w", sha256=SHA256, dest=tmp_path / "w", policy=policy)
    assert server.requests == []


def test_a_proxy_of_an_unknown_kind_is_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "gopher://user:secret@127.0.0.1:70")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(problems.ProxyUnusable) as caught:
        fetch(server.url, sha256=SHA256, dest=tmp_path / "w", policy=replace(POLICY, trust_env=True))
    assert "secret" not in str(caught.value)


# Local files

FILES = FetchPolicy(allow_file_urls=True, trust_env=False)


def test_a_file_url_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "a wheel+1.whl"
    source.write_bytes(BODY)
    found = fetch(source.as_uri(), sha256=SHA256, dest=tmp_path / "in" / "w", policy=FILES)
    assert found.path.read_bytes() == BODY
    assert not found.path.samefile(source)
    assert left(tmp_path / "in") == ["w"]


def test_file_urls_need_the_setting(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(BODY)
    with pytest.raises(problems.FileUrlNotAllowed):
        fetch((tmp_path / "x").as_uri(), sha256=SHA256, dest=tmp_path / "in" / "w", policy=POLICY)
    assert left(tmp_path) == ["x"]


def test_a_wrong_file_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(OTHER)
    with pytest.raises(problems.WheelHashMismatch) as caught:
        fetch((tmp_path / "x").as_uri(), sha256=SHA256, dest=tmp_path / "in" / "w", policy=FILES)
    assert caught.value.expected == SHA256
    assert left(tmp_path / "in") == []


def test_the_limits_hold_for_files(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(BODY)
    url = (tmp_path / "x").as_uri()
    with pytest.raises(problems.WheelTooLarge):
        fetch(url, sha256=SHA256, dest=tmp_path / "w", policy=replace(FILES, max_bytes=5))
    with pytest.raises(problems.WheelSizeMismatch):
        fetch(url, sha256=SHA256, dest=tmp_path / "w", policy=FILES, size=5)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "absent", Path("/dev/zero")):
        with pytest.raises(problems.FileUnreadable):
            fetch(path.as_uri(), sha256=SHA256, dest=tmp_path / "in" / "w", policy=FILES)


@pytest.mark.parametrize("url", ["file://elsewhere/x", "file:x", "file:///a%00b", "file://[/x"])
def test_odd_file_urls_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(problems.UrlRefused):
        fetch(url, sha256=SHA256, dest=tmp_path / "w", policy=FILES)


@given(st.text(max_size=60))
def test_no_text_makes_a_request_or_an_unnamed_error(text: str) -> None:
    with pytest.raises(problems.FetchError):
        fetch(text, sha256=SHA256, dest=Path("/nonexistent/w"), policy=FetchPolicy(allowed_hosts=frozenset()))
