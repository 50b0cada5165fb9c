from __future__ import annotations

import base64
import hashlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_depot.catalog.database import open_database, upgrade
from kernel_depot.jobs.depot import open_depot
from kernel_depot.settings import load_settings
from kernel_depot.store.blobs import Form

DATA = b"kernel " * 50_000 + b"end"
SHA256 = hashlib.sha256(DATA).hexdigest()
PATH = f"/v1/blobs/sha256/{SHA256}"
ETAG = f'"{SHA256}"'


@pytest.fixture
def path(server: Any) -> str:
    assert server.put(DATA, zstd=True) == SHA256
    return PATH


def test_whole_blob_with_its_headers(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.content == DATA
    assert answer.headers["content-length"] == str(len(DATA))
    assert answer.headers["etag"] == ETAG
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["vary"] == "accept-encoding"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert "content-encoding" not in answer.headers
    digest = base64.b64encode(hashlib.sha256(DATA).digest()).decode()
    assert answer.headers["repr-digest"] == f"sha-256=:{digest}:"


@pytest.mark.parametrize("coding", ["identity", "zstd"])
def test_head_sends_the_headers_of_get_and_ignores_range(
    client: httpx.Client, path: str, coding: str
) -> None:
    headers = {"accept-encoding": coding}
    got = client.get(path, headers=headers)
    head = client.head(path, headers={**headers, "range": "bytes=0-1"})
    assert head.status_code == 200
    assert head.content == b""
    volatile = {"date"}
    assert {k: v for k, v in head.headers.items() if k not in volatile} == {
        k: v for k, v in got.headers.items() if k not in volatile
    }


def test_zstd_form_where_accepted(client: httpx.Client, path: str) -> None:
    with client.stream("GET", path, headers={"accept-encoding": "gzip, zstd"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "zstd"
    assert answer.headers["content-length"] == str(len(raw))
    assert answer.headers["etag"] == f'"{SHA256}-zstd"'
    assert answer.headers["repr-digest"] == client.get(path).headers["repr-digest"]
    assert zstandard.decompress(raw) == DATA


def test_blob_without_zstd_form_comes_as_it_is(server: Any, client: httpx.Client) -> None:
    data = os.urandom(1000)
    answer = client.get(f"/v1/blobs/sha256/{server.put(data)}", headers={"accept-encoding": "zstd"})
    assert answer.content == data
    assert answer.headers["vary"] == "accept-encoding"
    assert "content-encoding" not in answer.headers


def test_excluding_every_form_is_406(client: httpx.Client, path: str) -> None:
    answer = client.get(path, headers={"accept-encoding": "zstd;q=0, identity;q=0"})
    assert answer.status_code == 406
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "urn:kernel-depot:problem:not-acceptable"


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
)
@given(
    st.one_of(
        st.tuples(st.integers(0, len(DATA) + 10), st.integers(0, len(DATA) + 10)),
        st.tuples(st.integers(0, len(DATA) + 10), st.none()),
        st.tuples(st.none(), st.integers(0, len(DATA) + 10)),
    )
)
def test_one_range_is_what_slicing_gives(
    client: httpx.Client, path: str, wanted: tuple[int | None, int | None]
) -> None:
    first, last = wanted
    text = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    if first is None:
        expected = DATA[-last:] if last else b""
    elif last is None:
        expected = DATA[first:]
    else:
        expected = DATA[first : last + 1] if last >= first else b""
    answer = client.get(path, headers={"range": text, "accept-encoding": "zstd, identity"})
    if not expected:
        assert answer.status_code == 416
        assert answer.headers["content-range"] == f"bytes */{len(DATA)}"
        assert answer.json()["type"] == "urn:kernel-depot:problem:range-not-satisfiable"
        return
    assert answer.status_code == 206
    assert answer.content == expected
    start = first if first is not None else len(DATA) - len(expected)
    assert answer.headers["content-range"] == f"bytes {start}-{start + len(expected) - 1}/{len(DATA)}"
    assert answer.headers["content-length"] == str(len(expected))
    assert answer.headers["etag"] == ETAG
    assert "content-encoding" not in answer.headers


def test_several_ranges_are_refused(client: httpx.Client, path: str) -> None:
    answer = client.get(path, headers={"range": "bytes=0-1,5-6"})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(DATA)}"


def test_other_units_are_ignored(client: httpx.Client, path: str) -> None:
    assert client.get(path, headers={"range": "lines=1-2"}).status_code == 200


@pytest.mark.parametrize(
    ("if_range", "status"), [(ETAG, 206), (f"W/{ETAG}", 200), ('"x"', 200), (f'"{SHA256}-zstd"', 200)]
)
def test_if_range(client: httpx.Client, path: str, if_range: str, status: int) -> None:
    answer = client.get(path, headers={"range": "bytes=10-", "if-range": if_range})
    assert answer.status_code == status
    assert answer.content == (DATA[10:] if status == 206 else DATA)


@pytest.mark.parametrize(
    ("known", "status"),
    [(ETAG, 304), (f"W/{ETAG}", 304), (f'"a", {ETAG}', 304), ("*", 304), ('"a"', 200), (SHA256, 200)],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_if_none_match(client: httpx.Client, path: str, known: str, status: int, method: str) -> None:
    answer = client.request(method, path, headers={"if-none-match": known})
    assert answer.status_code == status
    if status == 304:
        assert answer.content == b""
        assert answer.headers["etag"] == ETAG
        assert answer.headers["cache-control"].endswith("immutable")
        assert answer.headers["vary"] == "accept-encoding"


def test_each_form_has_its_own_tag(client: httpx.Client, path: str) -> None:
    headers = {"accept-encoding": "zstd", "if-none-match": ETAG}
    assert client.get(path, headers=headers).status_code == 200
    headers["if-none-match"] = f'"{SHA256}-zstd"'
    assert client.get(path, headers=headers).status_code == 304


def test_if_match_of_another_is_412(client: httpx.Client, path: str) -> None:
    assert client.get(path, headers={"if-match": ETAG}).status_code == 200
    answer = client.get(path, headers={"if-match": '"other"'})
    assert answer.status_code == 412
    assert answer.json()["found"] == ETAG


def test_empty_blob(server: Any, client: httpx.Client) -> None:
    path = f"/v1/blobs/sha256/{server.put(b'')}"
    answer = client.get(path)
    assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"", "0")
    assert client.get(path, headers={"range": "bytes=0-"}).status_code == 416


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_unknown_blob_is_404(client: httpx.Client, method: str) -> None:
    answer = client.request(method, f"/v1/blobs/sha256/{'0' * 64}")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("name", ["0" * 63, "0" * 65, "A" * 64, "..%2f..%2fetc%2fpasswd", "g" * 64])
def test_what_is_no_digest_is_refused(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/v1/blobs/sha256/{name}")
    assert answer.status_code in (400, 404)
    assert answer.json()["type"].endswith((":request-invalid", ":route-unknown"))


def stored(server: Any, form: Form = Form.IDENTITY) -> Path:
    found = server.depot.store.path(SHA256, form=form)
    assert found is not None
    found.chmod(0o644)
    return found


@pytest.mark.parametrize("damage", ["shorter", "longer", "gone"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_damaged_blob_is_never_sent(
    server: Any, client: httpx.Client, path: str, damage: str, method: str
) -> None:
    file = stored(server)
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(DATA[:-1] if damage == "shorter" else DATA + b"x")
    for headers in ({}, {"range": "bytes=0-9"}):
        answer = client.request(method, path, headers=headers)
        assert answer.status_code == 500
        if method == "GET":
            assert answer.json()["type"] == "urn:kernel-depot:problem:blob-damaged"


@pytest.mark.parametrize("damage", ["shorter", "gone"])
def test_damaged_zstd_form_is_passed_over(server: Any, client: httpx.Client, path: str, damage: str) -> None:
    file = stored(server, Form.ZSTD)
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    answer = client.get(path, headers={"accept-encoding": "zstd"})
    assert answer.content == DATA
    assert answer.headers["etag"] == ETAG
    assert client.get(path, headers={"accept-encoding": "zstd, identity;q=0"}).status_code == 406


def test_big_blob_and_clients_that_leave(server: Any, client: httpx.Client) -> None:
    data = os.urandom(1 << 20) * 24
    sha256 = server.put(data)
    path = f"/v1/blobs/sha256/{sha256}"
    host, port = client.base_url.host, client.base_url.port
    for _ in range(5):  # each goes away in the middle of the body
        with socket.create_connection((host, port)) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            connection.recv(100_000)
    assert hashlib.sha256(client.get(path).content).hexdigest() == sha256
    assert client.get(path, headers={"range": "bytes=5000000-5000099"}).content == data[5_000_000:5_000_100]


def test_ingest_beside_serving_shows_whole_blobs_only(server: Any, client: httpx.Client) -> None:
    blobs = [os.urandom(200_000) for _ in range(60)]
    digests = [hashlib.sha256(blob).hexdigest() for blob in blobs]
    writer = threading.Thread(target=lambda: [server.put(blob) for blob in blobs])
    writer.start()
    seen: set[str] = set()
    while len(seen) < len(digests):
        for digest in digests:
            answer = client.get(f"/v1/blobs/sha256/{digest}")
            assert answer.status_code in (200, 404)
            if answer.status_code == 200:
                assert hashlib.sha256(answer.content).hexdigest() == digest
                seen.add(digest)
    writer.join()


def test_store_that_is_not_local(
    open_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store without paths is read through its own reader, with the same answers."""
    server = open_server()
    server.put(DATA, zstd=True)
    monkeypatch.setattr(type(server.depot.store), "path", lambda self, sha256, form=None: None)
    client = server.client()
    assert client.get(PATH).content == DATA
    assert client.get(PATH, headers={"range": "bytes=-9"}).content == DATA[-9:]
    answer = client.get(PATH, headers={"accept-encoding": "zstd"})
    assert answer.headers["content-encoding"] == "zstd"
    assert answer.content == DATA
    stored_file = server.depot.store.root / "blobs" / "sha256" / SHA256[:2] / SHA256
    stored_file.chmod(0o644)
    stored_file.write_bytes(DATA[:-1])
    assert client.get(PATH).json()["type"].endswith("blob-damaged")


def test_catalog_in_postgresql_and_store_in_s3(
    serve: Callable[..., Any], tmp_path: Path, postgres_url: str, s3_url: str
) -> None:
    engine = open_database(postgres_url)
    upgrade(engine)
    engine.dispose()
    depot = open_depot(
        load_settings(data_dir=tmp_path, database_url=postgres_url, store_url=s3_url, allow_anonymous=True)
    )
    with serve(depot) as server:
        server.put(DATA, zstd=True)
        other = server.put(b"other")
        client = server.client()
        assert client.get("/readyz").is_success
        assert client.get(PATH).content == DATA
        assert client.get(PATH, headers={"range": "bytes=7-1000007"}).content == DATA[7:1_000_008]
        assert client.head(PATH).headers["content-length"] == str(len(DATA))
        assert client.get(PATH, headers={"accept-encoding": "zstd"}).content == DATA
        stream = client.post("/v1/blobs/stream", json={"sha256": [SHA256, other]})
        assert DATA in stream.content
        assert client.get("/v1/artifacts", params={"project": "\0"}).status_code == 400
        depot.store.delete(SHA256)
        assert client.get(PATH).json()["type"].endswith("blob-damaged")
    depot.close()
