from __future__ import annotations

import hashlib
import io
import os
import tarfile
from typing import Any

import httpx
import pytest
import zstandard

from kernel_depot.api.stream import MAX_BLOBS

URL = "/v1/blobs/stream"


def members(data: bytes) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name] = file.read()
    return found


@pytest.fixture
def blobs(server: Any) -> dict[str, bytes]:
    texts = [b"cubin %d " % number * (number * 700) for number in range(40)]
    return {server.put(data, zstd=number % 3 == 1): data for number, data in enumerate(texts)}


def test_blobs_come_in_the_order_asked_for(client: httpx.Client, blobs: dict[str, bytes]) -> None:
    order = sorted(blobs)
    answer = client.post(URL, json={"sha256": order})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-tar"
    assert answer.headers["content-length"] == str(len(answer.content))
    assert list(members(answer.content).items()) == [(f"sha256/{sha256}", blobs[sha256]) for sha256 in order]


@pytest.mark.parametrize("take", [["zstd", "identity"], ["identity"]])
def test_zstd_stream_uses_stored_forms(
    client: httpx.Client, blobs: dict[str, bytes], take: list[str]
) -> None:
    body = {"sha256": list(blobs), "accept": take}
    plain = client.post(URL, json=body).content
    with client.stream("POST", URL, json=body, headers={"accept-encoding": "zstd"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-length"] == str(len(raw))
    assert answer.headers["vary"] == "accept-encoding"
    if "zstd" not in take:
        assert "content-encoding" not in answer.headers
        assert raw == plain
        return
    assert answer.headers["content-encoding"] == "zstd"
    assert len(raw) < len(plain)
    decoded = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True).read()
    assert decoded == plain


def test_unknown_blobs_are_named_before_anything_is_sent(
    client: httpx.Client, blobs: dict[str, bytes]
) -> None:
    unknown = ["0" * 64, "1" * 64]
    answer = client.post(URL, json={"sha256": [*blobs, *unknown]})
    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:kernel-depot:problem:blob-unknown"
    assert answer.json()["found"] == unknown


@pytest.mark.parametrize("coding", ["identity", "zstd"])
def test_damaged_blob_cuts_the_connection(
    server: Any, client: httpx.Client, blobs: dict[str, bytes], coding: str
) -> None:
    victim = list(blobs)[20]
    for path in server.depot.store.root.glob(f"*/sha256/*/{victim}"):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(httpx.RemoteProtocolError):
        client.post(URL, json={"sha256": list(blobs)}, headers={"accept-encoding": coding})
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"sha256": []},
        {"sha256": ["ab"]},
        {"sha256": ["A" * 64]},
        {"sha256": "0" * 64},
        {"sha256": ["0" * 64] * (MAX_BLOBS + 1)},
        {"sha256": ["0" * 64], "accept": ["gzip"]},
        {"sha256": ["0" * 64], "other": 1},
        [],
        None,
    ],
    ids=str,
)
def test_other_questions_are_refused(client: httpx.Client, body: object) -> None:
    answer = client.post(URL, json=body)
    assert answer.status_code == 400
    assert answer.json()["type"] == "urn:kernel-depot:problem:request-invalid"
    assert answer.json()["problems"]


def test_several_thousand_small_blobs(server: Any, client: httpx.Client) -> None:
    blobs = {hashlib.sha256(data).hexdigest(): data for data in (os.urandom(50) for _ in range(50))}
    for data in blobs.values():
        server.put(data)
    order = list(blobs) * 120
    content = client.post(URL, json={"sha256": order}).content
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        assert [member.name.removeprefix("sha256/") for member in archive] == order
