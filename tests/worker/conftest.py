"""A loopback server that speaks the node's part of the API from memory, and fails on demand."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import zstandard

from kernel_depot.bundle import (
    ArtifactKind,
    Bundle,
    BundleArtifact,
    BundleWheel,
    MissingWheel,
    PinSetRef,
)
from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.worker.client import Endpoint
from kernel_depot.worker.transport import Patience


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Fault:
    """Do something wrong to the next `times` requests whose path starts with `path`.

    kinds: `drop` (cut after `at` bytes), `wrong` (other bytes), `short` (fewer bytes, said so),
    `status` (answer `at`), `badzstd`, `hang` (answer nothing for `at` seconds), `restart` (no ranges).
    """

    path: str
    kind: str
    at: int = 0
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


class Upstream:
    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.bundles: dict[str, bytes] = {}
        self.current: str = ""
        self.zstd = True
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.queries: list[dict[str, list[str]]] = []
        self.token: str | None = None
        self.body_bytes = 0
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def endpoint(self, **options: Any) -> Endpoint:
        patience = Patience(attempts=4, first_delay=0.01, max_delay=0.05, connect=5, read=5)
        return Endpoint(self.url, patience=patience, trust_env=False, **options)

    def add(self, data: bytes) -> str:
        sha256 = digest_of(data)
        self.blobs[sha256] = data
        return sha256

    def publish(self, bundle: Bundle) -> str:
        data = json.dumps(
            bundle.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode()
        digest = digest_of(data)
        self.bundles[digest] = data
        self.current = digest
        return digest

    def paths(self) -> list[str]:
        return [f"{method} {path}" for method, path, _ in self.requests]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def take_fault(self, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if path.startswith(fault.path) and fault.times:
                    fault.times -= 1
                    return fault
        return None

    def handler(self) -> type[BaseHTTPRequestHandler]:
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.route(b"")

            def do_POST(self) -> None:
                self.route(self.rfile.read(int(self.headers.get("Content-Length", 0))))

            def route(self, body: bytes) -> None:
                parts = urlsplit(self.path)
                path = parts.path
                with upstream.lock:
                    upstream.requests.append((self.command, path, dict(self.headers)))
                    upstream.queries.append(parse_qs(parts.query))
                fault = upstream.take_fault(path)
                if fault is not None and fault.kind == "status":
                    problem = {
                        "type": "urn:test:asked",
                        "title": "Asked for",
                        "detail": "a test asked for this",
                    }
                    self.answer(fault.at, json.dumps(problem).encode(), fault.headers)
                    return
                if fault is not None and fault.kind == "hang":
                    threading.Event().wait(fault.at)
                    self.close_connection = True
                    return
                if upstream.token and self.headers.get("Authorization") != f"Bearer {upstream.token}":
                    self.answer(401, json.dumps({"title": "Who are you"}).encode(), {})
                elif path == "/v1/resolve":
                    self.resolve()
                elif path.startswith("/v1/bundles/"):
                    data = upstream.bundles.get(path.rsplit("/", 1)[-1])
                    self.answer(200, data, {}) if data is not None else self.answer(404, b"{}", {})
                elif path == "/v1/blobs/stream":
                    self.stream(json.loads(body), fault)
                elif path.startswith("/v1/blobs/sha256/"):
                    self.blob(path.rsplit("/", 1)[-1], fault)
                elif path == "/readyz":
                    self.answer(200, b'{"status":"ready"}', {})
                else:
                    self.answer(404, b"{}", {})

            def resolve(self) -> None:
                etag = f'"{upstream.current}"'
                if self.headers.get("If-None-Match") == etag:
                    self.answer(304, b"", {"ETag": etag})
                    return
                answer = {"digest": upstream.current, "trace": ["chosen for the test"], "complete": True}
                self.answer(200, json.dumps(answer).encode(), {"ETag": etag})

            def blob(self, sha256: str, fault: Fault | None) -> None:
                data = upstream.blobs.get(sha256)
                if data is None:
                    self.answer(
                        404, json.dumps({"type": "urn:test:no-blob", "detail": "no such blob"}).encode(), {}
                    )
                    return
                headers = {"ETag": f'"{sha256}"'}
                status = 200
                wanted = self.headers.get("Range")
                if wanted and not (fault and fault.kind == "restart"):
                    start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                    headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                    data, status = data[start:], 206
                elif upstream.zstd and "zstd" in self.headers.get("Accept-Encoding", ""):
                    data = zstandard.ZstdCompressor(level=3).compress(data)
                    headers["Content-Encoding"] = "zstd"
                    if fault and fault.kind == "badzstd":
                        data = data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
                if fault and fault.kind == "wrong":
                    data = b"\x5a" + data[1:] if data[:1] != b"\x5a" else b"\x5b" + data[1:]
                if fault and fault.kind == "short":
                    data = data[: fault.at]
                self.answer(status, data, headers, cut=fault.at if fault and fault.kind == "drop" else None)

            def stream(self, asked: dict[str, Any], fault: Fault | None) -> None:
                buffer = io.BytesIO()
                with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
                    for number, sha256 in enumerate(asked["sha256"]):
                        data = upstream.blobs.get(sha256)
                        if data is None:
                            break
                        if fault and fault.kind == "wrong" and number == fault.at:
                            data = bytes(byte ^ 1 for byte in data)
                        info = tarfile.TarInfo(f"sha256/{sha256}")
                        info.size = len(data)
                        archive.addfile(info, io.BytesIO(data))
                data = buffer.getvalue()
                cut = fault.at if fault and fault.kind == "drop" else None
                if len(upstream.blobs.keys() & set(asked["sha256"])) < len(asked["sha256"]):
                    cut = len(data) - 10240 if cut is None else cut
                headers = {"Content-Type": "application/x-tar"}
                if upstream.zstd and "zstd" in self.headers.get("Accept-Encoding", ""):
                    middle = len(data) // 2
                    frames = zstandard.ZstdCompressor(level=3)
                    data = frames.compress(data[:middle]) + frames.compress(data[middle:])
                    headers["Content-Encoding"] = "zstd"
                    if fault and fault.kind == "badzstd":
                        data = data[: len(data) // 2] + b"not zstd" + data[len(data) // 2 + 8 :]
                self.answer(200, data, headers, cut=cut)

            def answer(
                self, status: int, data: bytes, headers: dict[str, str], *, cut: int | None = None
            ) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if status != 304:
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                sent = data if cut is None else data[: max(cut, 0)]
                with upstream.lock:
                    upstream.body_bytes += len(sent)
                try:
                    self.wfile.write(sent)
                except OSError:
                    self.close_connection = True
                if cut is not None:
                    self.close_connection = True

        return Handler


PLATFORM = Platform(CudaTag(13, 0), Arch.X86_64, Sm(9, 0))


def bundle_of(
    upstream: Upstream,
    files: dict[str, bytes],
    *,
    wheels: Sequence[tuple[str, str]] = (
        ("flashinfer_jit_cache", "0.6.3+cu130"),
        ("apache_tvm_ffi", "0.1.3"),
    ),
    missing: Sequence[MissingWheel] = (),
    platform: Platform = PLATFORM,
) -> Bundle:
    """A bundle of real blobs in the upstream; each file belongs to the wheel its path looks like."""
    made = []
    for project, version in wheels:
        data = f"the wheel of {project} {version}".encode()
        filename = f"{project}-{version}-py3-none-any.whl"
        made.append(BundleWheel(project, version, filename, upstream.add(data), len(data), "cu130"))
    artifacts = []
    for path, data in files.items():
        module = None
        kind = ArtifactKind.SUPPORT
        if path.startswith("flashinfer_jit_cache/jit_cache/"):
            kind, module = ArtifactKind.MODULE, path.split("/")[2]
        elif path.endswith("libtvm_ffi.so"):
            kind = ArtifactKind.TVM_FFI
        elif path.endswith(".cubin"):
            kind = ArtifactKind.CUBIN
        elif ".dist-info/" in path:
            kind = ArtifactKind.METADATA
        top = path.split("/")[0].split("-")[0]
        owner = next((w for w in made if w.project == {"tvm_ffi": "apache_tvm_ffi"}.get(top, top)), made[0])
        sms = ("sm_90a",) if module else ()
        artifacts.append(
            BundleArtifact(path, kind, upstream.add(data), len(data), owner.sha256, module, sms=sms)
        )
    return Bundle(
        pin_sets=(PinSetRef("test", "0" * 64),),
        platform=platform,
        wheels=tuple(made),
        artifacts=tuple(artifacts),
        missing=tuple(missing),
    )


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    yield server
    server.close()


@pytest.fixture
def make_bundle() -> Any:
    return bundle_of


@pytest.fixture
def fault() -> type[Fault]:
    return Fault
