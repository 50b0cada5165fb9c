"""Uploads, proposals, provenance, built modules and builds over HTTP: shapes, scopes and refusals."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kernel_depot.catalog import queries
from kernel_depot.catalog.database import reading
from kernel_depot.jobs.materialize import Ingested, materialize_wheel
from kernel_depot.jobs.uploads import PART
from kernel_depot.shipped import shipped_dir

KEY = "a" * 64
PIN = {"filename": "flashinfer_jit_cache-0.6.3+cu130.x-py3-none-any.whl", "sha256": "b" * 64, "store": True}


def kind(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["type"].rpartition(":")[2]


def upload(client: httpx.Client, data: bytes) -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    begun = client.post("/v1/uploads", json={"sha256": sha256, "size": len(data)})
    assert begun.status_code in (200, 201), begun.text
    for number in begun.json()["missing"]:
        part = data[number * PART : (number + 1) * PART]
        digest = base64.b64encode(hashlib.sha256(part).digest()).decode()
        sent = client.put(
            f"/v1/uploads/{sha256}/parts/{number}",
            content=part,
            headers={"content-digest": f"sha-512=:AAAA:, sha-256=:{digest}:"},
        )
        assert sent.status_code == 204, sent.text
    assert client.post(f"/v1/uploads/{sha256}/complete").status_code == 201
    return sha256


def record(sha256: str, size: int, **changed: Any) -> dict[str, Any]:
    return {
        "key": KEY,
        "uri": "page",
        "sha256": sha256,
        "size": size,
        "sms": ["sm90a"],
        "glibc": "2.14",
        "glibcxx": None,
        "functions": ["__tvm_ffi_f"],
        "recipe": "c" * 64,
        "toolchain": {"nvcc": "13.0.88"},
        "seconds": 1.5,
        "peak": 7,
        "isolated": True,
        **changed,
    }


def test_an_upload_becomes_a_blob(client: httpx.Client) -> None:
    data = os.urandom(PART + 9)
    sha256 = upload(client, data)
    assert client.get(f"/v1/blobs/sha256/{sha256}").content == data
    again = client.post("/v1/uploads", json={"sha256": sha256, "size": len(data)})
    assert (again.status_code, again.json()["state"], again.json()["missing"]) == (200, "stored", [])
    assert again.headers["location"] == f"/v1/uploads/{sha256}"


def test_what_an_upload_refuses(client: httpx.Client) -> None:
    base = f"/v1/uploads/{KEY}"
    assert kind(client.get(base)) == (404, "upload-unknown")
    assert kind(client.put(f"{base}/parts/0", content=b"x")) == (404, "upload-unknown")
    for wrong in ({"sha256": KEY}, {"sha256": KEY, "size": 0}, {"sha256": "A" * 64, "size": 1}):
        assert kind(client.post("/v1/uploads", json=wrong)) == (400, "request-invalid")
    huge = client.post("/v1/uploads", json={"sha256": KEY, "size": 1 << 50})
    assert kind(huge) == (413, "upload-too-large")
    client.post("/v1/uploads", json={"sha256": KEY, "size": 3}).raise_for_status()
    assert kind(client.put(f"{base}/parts/0", content=b"four")) == (400, "upload-part-refused")
    assert kind(client.put(f"{base}/parts/0", content=b"x" * (PART + 1))) == (413, "body-too-large")
    for digest in ("sha-256=:AAAA:", "md5=:AAAA:", "sha-256=:***:"):
        answer = client.put(f"{base}/parts/0", content=b"abc", headers={"content-digest": digest})
        assert kind(answer) == (400, "request-invalid")
    assert kind(client.post(f"{base}/complete")) == (409, "upload-incomplete")
    client.put(f"{base}/parts/0", content=b"abc").raise_for_status()
    assert kind(client.post(f"{base}/complete")) == (400, "upload-mismatch")
    assert kind(client.get(base)) == (404, "upload-unknown")
    client.post("/v1/uploads", json={"sha256": KEY, "size": 3}).raise_for_status()
    assert client.delete(base).status_code == client.delete(base).status_code == 204
    assert kind(client.get(base)) == (404, "upload-unknown")


def test_built_modules_are_found_by_key_and_the_first_one_stays(client: httpx.Client) -> None:
    first, second = os.urandom(100), os.urandom(101)
    absent = client.put(f"/v1/built-modules/{KEY}", json=record("d" * 64, 100))
    assert kind(absent) == (404, "blob-unknown")
    sha256 = upload(client, first)
    put = client.put(f"/v1/built-modules/{KEY}", json=record(sha256, 100))
    assert put.json()["record"] == record(sha256, 100), put.text
    assert client.put(f"/v1/built-modules/{KEY}", json=record(sha256, 100)).json() == put.json()
    other = client.put(f"/v1/built-modules/{KEY}", json=record(upload(client, second), 101))
    assert kind(other) == (409, "built-module-differs")
    elsewhere = client.put(f"/v1/built-modules/{'e' * 64}", json=record(sha256, 100))
    assert kind(elsewhere) == (400, "request-invalid")
    found = client.post("/v1/built-modules/find", json={"keys": [KEY, "e" * 64, KEY]}).json()
    assert found == {"modules": [put.json()]}


def test_a_statement_is_of_its_wheel(client: httpx.Client) -> None:
    sha256 = upload(client, os.urandom(50))
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "x.whl", "digest": {"sha256": sha256}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {"buildDefinition": {"deep": [1, {"a": None}]}},
    }
    assert kind(client.get(f"/v1/provenance/{sha256}")) == (404, "provenance-unknown")
    assert client.put(f"/v1/provenance/{sha256}", json=statement).status_code == 204
    assert client.get(f"/v1/provenance/{sha256}").json() == statement
    assert kind(client.put(f"/v1/provenance/{KEY}", json=statement)) == (400, "request-invalid")
    ours = {**statement, "subject": [{"name": "x", "digest": {"sha256": KEY}}]}
    assert kind(client.put(f"/v1/provenance/{KEY}", json=ours)) == (404, "blob-unknown")
    for wrong in ({"_type": "x"}, {"subject": []}, {"subject": [1]}, {"subject": "x"}, {"predicate": 7}):
        answer = client.put(f"/v1/provenance/{sha256}", json={**statement, **wrong})
        assert kind(answer) == (400, "request-invalid")


def test_a_proposal_changes_what_nothing_means(client: httpx.Client) -> None:
    tables = {"flashinfer_jit_cache": {"cu130": {"x86_64": {**PIN, "sm": "sm90a"}}}}
    first = client.post("/v1/pins/proposed/proposals", json={"pins": tables})
    assert first.status_code == 201, first.text
    assert (first.json()["based_on"], first.json()["replaced"]) == (None, [])
    assert "store = true" in first.json()["text"]
    assert client.post("/v1/pins/proposed/proposals", json={"pins": tables}).json() == first.json()
    assert client.get("/v1/pins/proposed").status_code == 404
    assert "proposed" not in [row["name"] for row in client.get("/v1/pins").json()["pin_sets"]]
    revision = first.json()["revision"]
    [row] = client.get("/v1/pins/proposed/revisions").json()["revisions"]
    assert (row["revision"], row["current"], row["materialized"]) == (revision, False, False)
    activate = "/v1/pins/proposed/activate"
    assert kind(client.post(activate, json={"revision": revision})) == (409, "revision-not-materialized")
    assert kind(client.post(activate, json={"revision": KEY})) == (404, "revision-unknown")
    assert kind(client.get("/v1/pins/nobody/revisions")) == (404, "pin-set-unknown")
    wrong = {"flashinfer_jit_cache": {"cu130": {"x86_64": {**PIN, "index": "pypi"}}}}
    assert kind(client.post("/v1/pins/proposed/proposals", json={"pins": wrong})) == (400, "pin-set-invalid")
    both = client.post("/v1/materialize", json={"pins": ["proposed"], "revisions": [revision]})
    assert kind(both) == (400, "request-invalid")


def test_revisions_are_activated_and_taken_back(
    server: Any, client: httpx.Client, make_wheel: Callable[..., Path]
) -> None:
    revisions = []
    for version in ("1.0", "1.0.1"):
        wheel = make_wheel({"flashinfer_cubin/cubins/x.h": version.encode()}, version=version)
        table = {"filename": wheel.name, "sha256": upload(client, wheel.read_bytes()), "store": True}
        tables = {"flashinfer_cubin": {"cu130": {"x86_64": table}}}
        proposal = client.post("/v1/pins/cubins/proposals", json={"pins": tables}).json()
        revisions.append(proposal["revision"])
        with reading(server.depot.engine) as session:
            pin_set = queries.pin_set_revision(session, proposal["revision"])
        outcome = materialize_wheel(server.depot, pin_set.pins[0])
        assert isinstance(outcome, Ingested), outcome
    one, two = revisions

    def activate(revision: str, expected: str | None = None) -> httpx.Response:
        body = {"revision": revision, "expected": expected}
        return client.post("/v1/pins/cubins/activate", json=body)

    assert kind(activate(one, two)) == (409, "revision-moved")
    assert activate(one).json()["revision"] == one
    assert kind(activate(two, two)) == (409, "revision-moved")
    assert activate(two, one).json()["revision"] == client.get("/v1/pins/cubins").json()["revision"] == two
    assert activate(one, two).json()["revision"] == one
    rows = client.get("/v1/pins/cubins/revisions").json()["revisions"]
    assert [(row["revision"], row["current"], row["materialized"]) for row in rows] == [
        (two, False, True),
        (one, True, True),
    ]
    assert kind(client.post("/v1/pins/other/activate", json={"revision": one})) == (404, "revision-unknown")


def test_a_queued_build_is_claimed_and_told_of(server: Any, client: httpx.Client) -> None:
    plan = (shipped_dir("builds") / "small.toml").read_text()
    queued = client.post("/v1/builds", json={"plan": plan, "modules": ["page"]})
    assert queued.status_code == 202, queued.text
    job_id = queued.json()["id"]
    assert queued.headers["location"] == f"/v1/jobs/{job_id}"
    ask = {"builder": "one", "arch": "amd64", "cuda": ["13.0"]}
    assert client.post("/v1/builds/claim", json={**ask, "cuda": ["cu129"]}).status_code == 204
    assert client.post("/v1/builds/claim", json={**ask, "arch": "arm64"}).status_code == 204
    claim = client.post("/v1/builds/claim", json=ask).json()
    assert (claim["id"], claim["plan"], claim["options"]["modules"]) == (job_id, plan, ["page"])
    assert claim["lease_seconds"] == server.depot.settings.lease_seconds
    module = {"module": "page", "state": "compiling", "sources": 2, "sm": ["sm90a"]}
    told = {"claim": claim["claim"], "modules": [module]}
    beat = client.post(f"/v1/builds/{job_id}/heartbeat", json=told)
    assert beat.json()["lease_seconds"] == claim["lease_seconds"], beat.text
    assert client.get(f"/v1/jobs/{job_id}").json()["modules"] == [module]
    foreign = {**told, "claim": "x"}
    for what in ("heartbeat", "release", "finish"):
        assert kind(client.post(f"/v1/builds/{job_id}/{what}", json=foreign)) == (409, "build-claim-lost")
        assert kind(client.post(f"/v1/builds/nobody/{what}", json=told)) == (404, "build-unknown")
    for wrong in ({"state": "No"}, {"module": ""}, {"sm": "sm90a"}, {"more": 1}):
        answer = client.post(
            f"/v1/builds/{job_id}/heartbeat", json={**told, "modules": [{**module, **wrong}]}
        )
        assert kind(answer) == (400, "request-invalid")
    assert client.post(f"/v1/builds/{job_id}/finish", json=told).status_code == 204
    assert kind(client.post(f"/v1/builds/{job_id}/heartbeat", json=told)) == (409, "build-ended")
    assert client.get(f"/v1/builds/{job_id}").json()["job"]["state"] == "succeeded"
    assert kind(client.get("/v1/builds/nobody")) == (404, "build-unknown")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"plan": ""}, "request-invalid"),
        ({"plan": "name = 7"}, "build-plan-invalid"),
        ({"arch": "riscv"}, "platform-invalid"),
        ({"sm": ["hopper"]}, "platform-invalid"),
        ({"pins": "../x"}, "request-invalid"),
        ({"more": 1}, "request-invalid"),
    ],
)
def test_builds_that_cannot_be(client: httpx.Client, changed: dict[str, Any], expected: str) -> None:
    before = client.get("/v1/jobs").json()
    plan = (shipped_dir("builds") / "small.toml").read_text()
    assert kind(client.post("/v1/builds", json={"plan": plan, **changed})) == (400, expected)
    assert client.get("/v1/jobs").json() == before


def test_only_an_administrator_uploads_proposes_and_builds(server: Any) -> None:
    with server.client(server.token("node")) as node:
        for method, path in (
            ("POST", "/v1/uploads"),
            ("GET", f"/v1/uploads/{KEY}"),
            ("DELETE", f"/v1/uploads/{KEY}"),
            ("PUT", f"/v1/uploads/{KEY}/parts/0"),
            ("POST", f"/v1/uploads/{KEY}/complete"),
            ("PUT", f"/v1/built-modules/{KEY}"),
            ("PUT", f"/v1/provenance/{KEY}"),
            ("POST", "/v1/pins/x/proposals"),
            ("POST", "/v1/pins/x/activate"),
            ("POST", "/v1/builds"),
            ("POST", "/v1/builds/claim"),
            ("POST", "/v1/builds/x/heartbeat"),
            ("POST", "/v1/builds/x/release"),
            ("POST", "/v1/builds/x/finish"),
            ("POST", "/v1/builds/x/cancel"),
        ):
            answer = node.request(method, path, json={})
            assert kind(answer) == (403, "scope-insufficient"), path
        assert node.post("/v1/built-modules/find", json={"keys": [KEY]}).status_code == 200
