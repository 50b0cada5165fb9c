"""Warmups that cannot be: refused by name, and nothing is begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest


def kind(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return str(answer.json()["type"]).rpartition(":")[2]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"pins": ["x"], "revisions": ["a" * 64]}, "request-invalid"),
        ({"pins": ["nobody"]}, "pin-set-unknown"),
        ({"revisions": ["short"]}, "request-invalid"),
        ({"nodes": {"a b": "c"}}, "request-invalid"),
        ({"max_parallel": 0}, "request-invalid"),
        ({"deadline_seconds": 0}, "request-invalid"),
        ({"failure_share": 1.5}, "request-invalid"),
        ({"speed": "fast"}, "request-invalid"),
    ],
    ids=str,
)
def test_orders_that_cannot_be(admin: httpx.Client, body: dict[str, Any], problem: str) -> None:
    assert kind(admin.post("/v1/warmups", json=body)) == problem
    assert admin.get("/v1/warmups").json() == {"warmups": []}
    assert admin.get("/v1/jobs").json() == {"jobs": []}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("GET", "/events"),
        ("POST", "/cancel"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/retry-failed"),
    ],
)
def test_a_warmup_that_there_is_not(admin: httpx.Client, method: str, path: str) -> None:
    answer = admin.request(method, f"/v1/warmups/none{path}")
    assert (answer.status_code, kind(answer)) == (404, "warmup-unknown")


def test_only_administrators_warm(open_server: Callable[..., Any]) -> None:
    server = open_server(allow_anonymous=False)
    node = server.client(server.token("node"))
    assert kind(node.post("/v1/warmups", json={})) == "scope-insufficient"
    assert node.get("/v1/warmups").status_code == 200
