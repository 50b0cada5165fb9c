from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.platform import Arch, CudaTag, Platform
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.client import AddressInvalid, Endpoint
from kernel_depot.worker.errors import ServerProtocol, ServerRefused
from kernel_depot.worker.sync import SyncRequest, sync
from kernel_depot.worker.transport import (
    DirectTransport,
    Patience,
    ProxiedTransport,
    Transient,
    follow,
    open_transport,
    proxy_applies,
    retrying,
)

PLATFORM = Platform(CudaTag(13, 0), Arch.X86_64)
FILES = {"a/one": b"1" * 5000, "a/two": bytes(6 << 20), "a/three": b"3"}


def test_the_worker_imports_nothing_heavy() -> None:
    """Neither the server nor what only a running sync needs."""
    code = """
import sys, kernel_depot.worker.client, kernel_depot.worker.sync, kernel_depot.smoke.cases
heavy = {"httpx", "pydantic", "fastapi", "starlette", "sqlmodel", "sqlalchemy", "obstore", "alembic", "rich",
         "typer", "zstandard", "http.client", "pynvml", "cuda"}
rooms = {f"kernel_depot.{room}" for room in ("pins", "wheels", "store", "catalog", "jobs", "api", "settings")}
print(sorted(heavy & set(sys.modules)), sorted(name for name in sys.modules if name.startswith(tuple(rooms))))
"""
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout == "[] []\n"


def test_a_sync_with_nothing_new_opens_the_manifest_alone(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    digest = upstream.publish(make_bundle(upstream, FILES))
    cache = Cache(tmp_path / "cache")
    sync(SyncRequest(), endpoint=upstream.endpoint(), platform=PLATFORM, cache=cache)
    upstream.requests.clear()
    code = """
import os, sys
opened, root = [], sys.argv[2]
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.fsdecode(arguments[0])
        if path.startswith(root):
            opened.append(path)
sys.addaudithook(hook)
from kernel_depot.cli.main import main
sys.argv[1:] = ["sync", "--server", sys.argv[1], "--cache", sys.argv[2], "--cuda", "cu130", "--sm", "none",
                "--arch", "x86_64", "--json"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(opened, file=sys.stderr)
"""
    answer = subprocess.run(
        [sys.executable, "-c", code, upstream.url, str(cache.root)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stderr.strip().splitlines()[-1] == str([str(cache.bundle_path(digest))])
    assert upstream.paths() == ["GET /v1/resolve"]
    assert '"changed": false' in answer.stdout


def test_addresses_that_are_none_are_refused() -> None:
    for text in ("depot.example", "ftp://depot.example", "http://"):
        with pytest.raises(AddressInvalid):
            Endpoint(text)


class Proxy(http.server.BaseHTTPRequestHandler):
    """A forward proxy for plain HTTP, enough to see who comes through."""

    protocol_version = "HTTP/1.1"
    seen: list[str]

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.forward(None)

    def do_POST(self) -> None:
        self.forward(self.rfile.read(int(self.headers["Content-Length"])))

    def forward(self, body: bytes | None) -> None:
        import urllib.error
        import urllib.request

        self.seen.append(self.path)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "proxy-connection")}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        wanted = urllib.request.Request(self.path, data=body, headers=headers, method=self.command)
        try:
            answer = opener.open(wanted)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            data = answer.read()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    handler = type("Handler", (Proxy,), {"seen": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    yield handler.seen
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_proxy_from_the_environment_is_used(
    upstream: Any, make_bundle: Any, tmp_path: Path, proxy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.publish(make_bundle(upstream, FILES))
    endpoint = Endpoint(upstream.url)
    assert isinstance(endpoint.open(), ProxiedTransport)
    cache = Cache(tmp_path / "cache")
    sync(SyncRequest(), endpoint=endpoint, platform=PLATFORM, cache=cache)
    assert {name: (cache.current / "files" / name).read_bytes() for name in FILES} == FILES
    assert len(proxy) == len(upstream.requests)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert not proxy_applies(upstream.url)
    assert isinstance(endpoint.open(), DirectTransport)


def test_a_broken_stream_through_a_proxy_is_retried(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path, proxy: list[str]
) -> None:
    upstream.publish(make_bundle(upstream, FILES))
    upstream.faults.append(fault("/v1/blobs/", "status", at=503, times=2))
    endpoint = Endpoint(upstream.url, patience=Patience(first_delay=0.01))
    sync(SyncRequest(), endpoint=endpoint, platform=PLATFORM, cache=Cache(tmp_path / "cache"))


class Redirector(http.server.BaseHTTPRequestHandler):
    target: str
    authorizations: list[str | None]

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.authorizations.append(self.headers.get("Authorization"))
        self.send_response(307)
        self.send_header("Location", self.target)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def redirector() -> Any:
    handler = type("Handler", (Redirector,), {"target": "", "authorizations": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/x", handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_redirects_are_followed_without_the_token(upstream: Any, redirector: Any) -> None:
    url, handler = redirector
    handler.target = upstream.url + "/readyz"
    transport = open_transport(url, patience=Patience(), trust_env=False)
    with follow(transport, "GET", url, headers={}, token="secret") as response:
        assert response.json() == {"status": "ready"}
    assert handler.authorizations == ["Bearer secret"]
    assert "Authorization" not in upstream.requests[-1][2]
    transport.close()


@pytest.mark.parametrize("target", ["", "file:///etc/passwd", "/v1/x"])
def test_redirects_that_lead_nowhere_are_an_error(redirector: Any, target: str) -> None:
    url, handler = redirector
    handler.target = target
    transport = open_transport(url, patience=Patience(), trust_env=False)
    with pytest.raises(ServerProtocol):
        follow(transport, "GET", url, headers={})
    transport.close()


def test_a_server_that_names_no_bundle_is_no_server_of_ours(upstream: Any, tmp_path: Path) -> None:
    upstream.current = "no digest"
    with pytest.raises(ServerProtocol, match="names no bundle"):
        sync(SyncRequest(), endpoint=upstream.endpoint(), platform=PLATFORM, cache=Cache(tmp_path))


def test_retry_after_is_heeded(upstream: Any, fault: Any) -> None:
    upstream.faults.append(fault("/readyz", "status", at=503, headers={"Retry-After": "7"}))
    transport = open_transport(upstream.url, patience=Patience(), trust_env=False)
    with pytest.raises(Transient) as failure:
        follow(transport, "GET", upstream.url + "/readyz", headers={})
    assert failure.value.retry_after == 7
    assert Patience().delay(1, 7) == 7
    transport.close()


def test_delays_grow_and_are_bounded() -> None:
    patience = Patience(first_delay=1, max_delay=8)
    for failures in range(1, 20):
        longest = min(8, 2 ** (failures - 1))
        assert longest / 2 <= patience.delay(failures, None) <= longest


def test_progress_starts_the_count_anew(upstream: Any) -> None:
    from kernel_depot.worker.transport import unreachable

    calls = []

    def attempt() -> int:
        calls.append(1)
        if len(calls) < 9:
            raise unreachable("x", ConnectionError("y"), progress=True)
        return 5

    assert retrying(attempt, patience=Patience(attempts=3, first_delay=0, max_delay=0)) == 5
    with pytest.raises(ServerRefused):
        upstream_client = Endpoint(upstream.url + "/nothing", trust_env=False)
        transport = upstream_client.open()
        try:
            follow(transport, "GET", upstream_client.address("/v1/resolve"), headers={})
        finally:
            transport.close()
