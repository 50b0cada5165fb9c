"""What an agent makes of the server's answers about what its node is to have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from kernel_depot.agent.control import Control
from kernel_depot.worker.client import Endpoint
from kernel_depot.worker.errors import ServerProtocol

DIGEST = "5d" * 32
ANSWER = {
    "bundle": DIGEST,
    "complete": True,
    "problem": None,
    "prefetch": [{"warmup": "w", "bundle": DIGEST}],
}


class Answers(HTTPServer):
    """Gives each request the next answer: headers and members."""

    def __init__(self) -> None:
        self.queue: list[tuple[dict[str, str], object]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_GET(self) -> None:
        headers, members = self.server.queue.pop(0)
        content = json.dumps(members).encode()
        self.send_response(200)
        for name, value in {"etag": '"a"', **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Answers]:
    with Answers() as made:
        thread = Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def control(server: Answers) -> Iterator[Control]:
    made = Control(Endpoint(f"http://127.0.0.1:{server.server_port}"), node="a", longest_wait=1.0)
    yield made
    made.close()


@pytest.mark.parametrize(("header", "spread"), [({}, 0.0), ("12.5", 12.5), ("-3", 0.0), ("1e9", 300.0)])
def test_the_server_says_for_how_long_to_wait_before_beginning(
    server: Answers, control: Control, header: object, spread: float
) -> None:
    headers = {"kernel-depot-spread": header} if isinstance(header, str) else {}
    server.queue.append((headers, ANSWER))
    desired = control.desired(etag='"old"', wait=0.0)
    assert desired is not None
    assert (desired.bundle, desired.etag, desired.spread) == (DIGEST, '"a"', spread)
    assert [item.warmup for item in desired.prefetch] == ["w"]


@pytest.mark.parametrize(
    ("headers", "members"),
    [
        ({}, {**ANSWER, "bundle": "../../etc"}),
        ({}, {"bundle": DIGEST}),
        ({}, [1]),
        ({"kernel-depot-spread": "soon"}, ANSWER),
        ({}, {**ANSWER, "prefetch": [{}]}),
    ],
)
def test_an_answer_that_says_something_else_is_refused(
    server: Answers, control: Control, headers: dict[str, str], members: object
) -> None:
    server.queue.append((headers, members))
    with pytest.raises(ServerProtocol):
        control.desired(etag=None, wait=0.0)
