from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from kernel_depot.api.limits import MAX_BODY
from kernel_depot.catalog import queries
from kernel_depot.errors import PROBLEM_NAMESPACE


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_openapi_lists_every_operation(document: dict[str, Any]) -> None:
    assert set(operations(document)) == {
        "GET /v1/resolve",
        "GET /v1/bundles/{digest}",
        "HEAD /v1/bundles/{digest}",
        "GET /v1/blobs/sha256/{sha256}",
        "HEAD /v1/blobs/sha256/{sha256}",
        "POST /v1/blobs/stream",
        "GET /v1/artifacts",
        "GET /v1/modules/{uri}",
        "GET /v1/pins",
        "POST /v1/pins",
        "GET /v1/pins/{name}",
        "GET /v1/pins/{name}/revisions",
        "POST /v1/pins/{name}/proposals",
        "POST /v1/pins/{name}/activate",
        "POST /v1/materialize",
        "POST /v1/scrubs",
        "GET /v1/jobs",
        "GET /v1/jobs/{job_id}",
        "POST /v1/uploads",
        "GET /v1/uploads/{sha256}",
        "DELETE /v1/uploads/{sha256}",
        "PUT /v1/uploads/{sha256}/parts/{number}",
        "POST /v1/uploads/{sha256}/complete",
        "POST /v1/builds",
        "POST /v1/builds/claim",
        "GET /v1/builds/{build_id}",
        "POST /v1/builds/{build_id}/heartbeat",
        "POST /v1/builds/{build_id}/release",
        "POST /v1/builds/{build_id}/finish",
        "POST /v1/builds/{build_id}/cancel",
        "POST /v1/built-modules/find",
        "PUT /v1/built-modules/{sha256}",
        "PUT /v1/provenance/{sha256}",
        "GET /v1/provenance/{sha256}",
        "GET /v1/benchmarks",
        "POST /v1/benchmarks",
        "GET /v1/pins/{name}/plan",
        "POST /v1/pins/{name}/rollback",
        "DELETE /v1/pins/{name}/canary",
        "PUT /v1/nodes/{name}",
        "GET /v1/nodes/{name}/desired",
        "POST /v1/nodes/{name}/report",
        "POST /v1/nodes/{name}/smoke",
        "GET /v1/nodes",
        "GET /v1/nodes/{name}",
        "DELETE /v1/nodes/{name}",
        "GET /v1/matrix",
        "POST /v1/warmups",
        "GET /v1/warmups",
        "GET /v1/warmups/{warmup_id}",
        "GET /v1/warmups/{warmup_id}/events",
        "POST /v1/warmups/{warmup_id}/cancel",
        "POST /v1/warmups/{warmup_id}/pause",
        "POST /v1/warmups/{warmup_id}/resume",
        "POST /v1/warmups/{warmup_id}/retry-failed",
        "GET /v1/audit",
        "GET /v1/benchmarks/{digest}",
        "GET /healthz",
        "GET /readyz",
        "GET /metrics",
    }


def test_openapi_is_described(document: dict[str, Any]) -> None:
    assert document["info"]["title"] == "Kernel Depot"
    assert document["info"]["summary"]
    assert len(document["info"]["description"]) > 200
    tags = {tag["name"] for tag in document["tags"] if tag["description"]}
    names = set()
    for name, operation in operations(document).items():
        assert operation["summary"], name
        assert operation["description"], name
        assert set(operation["tags"]) <= tags, name
        names.add(operation["operationId"])
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description") or parameter["schema"], (name, parameter)
    assert len(names) == len(operations(document))


def test_openapi_documents_the_problems_of_every_operation(document: dict[str, Any]) -> None:
    for name, operation in operations(document).items():
        problems = [
            example["value"]["type"]
            for response in operation["responses"].values()
            for example in response.get("content", {})
            .get("application/problem+json", {})
            .get("examples", {})
            .values()
        ]
        assert all(kind.startswith(PROBLEM_NAMESPACE) for kind in problems), name
        if name not in ("GET /healthz", "GET /metrics", "GET /readyz"):
            assert PROBLEM_NAMESPACE + "token-missing" in problems, name
            assert operation["security"], name
        assert "422" not in operation["responses"], name


def test_openapi_has_no_dangling_reference(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    wanted = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert wanted == set(schemas)


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v2/resolve", "/v1/blobs/sha256/", "/%00"])
def test_unknown_paths_are_problems(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.json()["type"]) == (404, PROBLEM_NAMESPACE + "route-unknown")
    assert answer.headers["content-type"] == "application/problem+json"


def test_refused_methods_say_which_are_served(client: httpx.Client) -> None:
    answer = client.delete("/v1/pins")
    assert (answer.status_code, answer.json()["type"]) == (405, PROBLEM_NAMESPACE + "method-refused")
    assert set(answer.headers["allow"].split(", ")) & {"GET", "POST"}


@pytest.mark.parametrize("name", ["cud", "CUDA", "limit ", "x"])
def test_unknown_parameters_are_refused_by_name(client: httpx.Client, name: str) -> None:
    for path in ("/v1/artifacts", "/v1/resolve", "/healthz", "/v1/pins"):
        answer = client.get(path, params={name: "1"})
        assert answer.status_code == 400
        assert answer.json()["type"] == PROBLEM_NAMESPACE + "parameter-unknown"
        assert answer.json()["found"] == name


def test_a_misspelled_parameter_gets_a_suggestion(client: httpx.Client) -> None:
    assert "'cuda'" in client.get("/v1/artifacts?cud=1").json()["remedy"]


def test_a_parameter_given_twice_is_refused_unless_it_is_a_list(client: httpx.Client) -> None:
    answer = client.get("/v1/artifacts?cuda=cu130&cuda=cu120")
    assert answer.json()["type"] == PROBLEM_NAMESPACE + "parameter-unknown"
    answer = client.get("/v1/resolve?cuda=cu130&arch=x86_64&pins=a&pins=b")
    assert answer.json()["type"] == PROBLEM_NAMESPACE + "pin-set-unknown"


def test_every_missing_parameter_is_told_at_once(client: httpx.Client) -> None:
    answer = client.get("/v1/resolve")
    assert answer.status_code == 400
    assert [problem["where"] for problem in answer.json()["problems"]] == ["query.cuda", "query.arch"]


def test_announced_bodies_over_the_limit_are_refused_unread(server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/pins HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999\r\n\r\n"
        )
        answer = b""
        while piece := connection.recv(10_000):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("chunked", [True, False])
def test_bodies_over_the_limit_are_refused(client: httpx.Client, chunked: bool) -> None:
    body = b" " * (MAX_BODY + 1)
    for path in ("/v1/blobs/stream", "/v1/pins?name=x"):
        content: Any = iter([body[: MAX_BODY // 2]] * 3) if chunked else body
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["type"]) == (413, PROBLEM_NAMESPACE + "body-too-large")


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b""])
def test_broken_json_is_a_problem(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v1/blobs/stream", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["type"]) == (400, PROBLEM_NAMESPACE + "request-invalid")


def test_unexpected_failures_show_an_incident_and_no_text(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr(queries, "blob", fail)
    with caplog.at_level(logging.ERROR):
        answer = client.get(f"/v1/blobs/sha256/{'0' * 64}")
    assert (answer.status_code, answer.json()["type"]) == (500, PROBLEM_NAMESPACE + "internal")
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.json()["incident"] in caplog.text
    assert "a secret of the server" in caplog.text


text_value = st.text(max_size=30)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=150,
)
@given(
    st.sampled_from(["/v1/resolve", "/v1/artifacts", "/v1/jobs", "/v1/modules/norm", "/v1/pins"]),
    st.dictionaries(
        st.sampled_from(["cuda", "arch", "sm", "modules", "pins", "project", "cursor", "limit", "kind"]),
        st.one_of(text_value, st.sampled_from(["cu130", "x86_64", "sm90a", "all", "1", "\0"])),
    ),
)
def test_no_parameter_makes_the_server_fail(
    client: httpx.Client, path: str, parameters: dict[str, str]
) -> None:
    assert client.get(path, params=parameters).status_code < 500


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=100,
)
@given(
    st.sampled_from(["/v1/pins?name=fuzz", "/v1/blobs/stream", "/v1/materialize"]),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.floats(), st.text(st.characters(exclude_categories=[]))),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.one_of(text_value, st.sampled_from(["sha256", "cu130", "x86_64", "pins", "url"])),
                inner,
                max_size=3,
            ),
        ),
    ),
)
def test_no_json_makes_the_server_fail(client: httpx.Client, path: str, body: object) -> None:
    answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    # 503: jobs do not run here, which is only looked at for sound requests
    assert answer.status_code < 500 or answer.status_code == 503, answer.text


def test_jobs_where_none_run_are_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/materialize", json={})
    assert (answer.status_code, answer.json()["type"]) == (503, PROBLEM_NAMESPACE + "jobs-not-running")


def test_health(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ok"}


def test_not_ready_when_the_schema_is_another(open_server: Callable[..., Any]) -> None:
    server = open_server()
    with server.depot.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'later'"))
    client = server.client()
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["type"]) == (503, PROBLEM_NAMESPACE + "not-ready")
    assert answer.json()["cause"] == PROBLEM_NAMESPACE + "schema-unknown"
    assert client.get("/healthz").status_code == 200


def test_problems_are_json_and_not_cached(client: httpx.Client) -> None:
    answer = client.get("/v1/pins/none")
    assert answer.headers["cache-control"] == "no-store"
    problem = json.loads(answer.content)
    assert set(problem) >= {"type", "title", "status", "detail", "remedy"}
    assert problem["status"] == answer.status_code == 404
