from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import httpx
import pytest

from kernel_depot.api.auth import Admitted, Caller, Scope, is_loopback
from kernel_depot.catalog import queries, record
from kernel_depot.catalog.database import reading, writing

READ = f"/v1/blobs/sha256/{'0' * 64}"  # 404 for those who may ask


@pytest.fixture
def closed(open_server: Callable[..., Any]) -> Any:
    """Serve a depot that asks everyone for a token."""
    return open_server(allow_anonymous=False)


def kind(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.json()["type"].rpartition(":")[2]


def test_scopes_include_the_lesser_ones() -> None:
    assert [[one.includes(other) for other in Scope] for one in Scope] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_without_a_token_nothing_but_health(closed: Any) -> None:
    client = closed.client()
    answer = client.get(READ)
    assert answer.status_code == 401
    assert kind(answer) == "token-missing"
    assert answer.headers["www-authenticate"] == 'Bearer realm="kernel-depot"'
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
        assert client.get(path).status_code == 200, path


def test_every_other_operation_asks_for_a_token(closed: Any) -> None:
    client = closed.client()
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for method in operations:
            if path in ("/healthz", "/readyz", "/metrics"):
                continue
            answer = client.request(method, re.sub(r"\{[^}]*\}", "0" * 64, path))
            assert answer.status_code == 401, (method, path)


@pytest.mark.parametrize("scope", list(Scope))
def test_a_token_opens_what_its_scope_allows(closed: Any, scope: Scope) -> None:
    client = closed.client(closed.token(scope.value))
    assert client.get(READ).status_code == 404
    answer = client.post("/v1/pins?name=x", content=b"", headers={"content-type": "text/plain"})
    if scope is Scope.ADMIN:
        assert answer.status_code == 415
    else:
        assert answer.status_code == 403
        assert kind(answer) == "scope-insufficient"
        challenge = answer.headers["www-authenticate"]
        assert 'error="insufficient_scope"' in challenge
        assert 'scope="admin"' in challenge


def test_unknown_expired_and_revoked_tokens_are_refused(closed: Any) -> None:
    past = datetime.now(timezone.utc) - timedelta(seconds=1)
    revoked = closed.token("read")
    assert closed.client(revoked).get(READ).status_code == 404
    with writing(closed.depot.engine) as session:
        token = record.find_token(session, revoked)
        assert token is not None
        record.revoke_token(session, token.id)
    until = time.monotonic() + 20
    for secret, word in (
        ("kd_nobody", "not known"),
        (closed.token("admin", expires_at=past), "expired"),
        (revoked, "revoked"),
    ):
        answer = closed.client(secret).get(READ)
        while answer.status_code == 404:  # a token that was just looked up is believed for a second
            assert time.monotonic() < until
            answer = closed.client(secret).get(READ)
        assert answer.status_code == 401
        assert kind(answer) == "token-refused"
        assert word in answer.json()["detail"]
        assert secret not in answer.text
        assert 'error="invalid_token"' in answer.headers["www-authenticate"]


def test_token_that_has_not_expired_is_taken(closed: Any) -> None:
    future = datetime.now(timezone.utc) + timedelta(hours=1)
    assert closed.client(closed.token("read", expires_at=future)).get(READ).status_code == 404


@pytest.mark.parametrize("header", ["Basic abc", "Bearer", "token"])
def test_other_schemes_are_refused_even_on_loopback(server: Any, header: str) -> None:
    answer = server.client().get(READ, headers={"authorization": header})
    assert answer.status_code == 401
    assert "www-authenticate" in answer.headers


def test_a_wrong_token_is_refused_even_on_loopback(server: Any) -> None:
    assert server.client("kd_wrong").get(READ).status_code == 401


def test_use_is_recorded_and_the_secret_is_not(closed: Any) -> None:
    secret = closed.token("read")
    closed.client(secret).get(READ)
    with reading(closed.depot.engine) as session:
        (token,) = queries.tokens(session)
    assert token.last_used_at is not None
    assert secret not in str(token.model_dump())


@pytest.mark.parametrize(
    "headers",
    [{"x-forwarded-for": "10.0.0.1"}, {"forwarded": "for=10.0.0.1"}, {"via": "1.1 proxy"}],
)
def test_what_came_through_a_proxy_is_not_local(server: Any, headers: dict[str, str]) -> None:
    assert kind(server.client().get(READ, headers=headers)) == "token-missing"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "rebound.example"},
        {"host": "rebound.example:80"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"host": ""},
    ],
)
def test_foreign_names_are_not_trusted_as_local(server: Any, headers: dict[str, str]) -> None:
    answer = server.client().get(READ, headers=headers)
    assert answer.status_code == 421
    assert kind(answer) == "host-refused"
    assert server.client(server.token("read")).get(READ, headers=headers).status_code == 404


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:9", "127.9.9.9", "[::1]:80"])
def test_loopback_names_are_trusted(server: Any, host: str) -> None:
    assert server.client().get(READ, headers={"host": host}).status_code == 404


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("LOCALHOST", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("127.0.0.1.example", False),
        ("localhost.example", False),
        ("", False),
        ("testclient", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_caller_is_believed_for_its_secret_and_scope_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("kernel_depot.api.auth.time.monotonic", lambda: now)
    admitted, caller = Admitted(), Caller("rack 7")
    admitted.keep("kd_one", Scope.READ, caller)
    assert admitted.caller("kd_one", Scope.READ) is caller
    assert admitted.caller("kd_one", Scope.ADMIN) is None
    assert admitted.caller("kd_two", Scope.READ) is None
    now += 1.001
    assert admitted.caller("kd_one", Scope.READ) is None
