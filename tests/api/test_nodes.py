"""What nodes may say, what they hear, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

FACTS = {"cuda": "cu130", "arch": "x86_64", "product": "0", "labels": {"ring": "canary"}}
TOML = """\
[apache_tvm_ffi.cu130.x86_64]
filename = "apache_tvm_ffi-{version}-py3-none-any.whl"
sha256 = "{digest}"
index = "pypi"
"""


def kind(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return str(answer.json()["type"]).rpartition(":")[2]


def pin(admin: httpx.Client, version: str, digest: str) -> str:
    answer = admin.post(
        "/v1/pins",
        params={"name": "ffi"},
        content=TOML.format(version=version, digest=digest * 64),
        headers={"content-type": "application/toml"},
    )
    assert answer.status_code == 201, answer.text
    return str(answer.json()["revision"])


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/nodes/x", None),
        ("GET", "/v1/nodes/x/desired", None),
        ("POST", "/v1/nodes/x/report", {"state": "idle"}),
        ("POST", "/v1/nodes/x/smoke", {"bundle": "a" * 64, "results": []}),
        ("DELETE", "/v1/nodes/x", None),
    ],
)
def test_a_node_that_never_registered_is_unknown(
    admin: httpx.Client, method: str, path: str, body: object
) -> None:
    answer = admin.request(method, path, json=body)
    assert (answer.status_code, kind(answer)) == (404, "node-unknown")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cuda": "rocm6"}, "platform-invalid"),
        ({"arch": "riscv"}, "platform-invalid"),
        ({"sm": "big"}, "platform-invalid"),
        ({"labels": {"a b": "c"}}, "request-invalid"),
        ({"labels": {"a": ""}}, "request-invalid"),
        ({"labels": {f"l{number}": "x" for number in range(65)}}, "request-invalid"),
        ({"capacity_bytes": -1}, "request-invalid"),
        ({"driver": "a\0b"}, "request-invalid"),
        ({"memory": 3}, "request-invalid"),
        ({"product": None}, "request-invalid"),
    ],
    ids=str,
)
def test_what_a_node_cannot_be_is_refused(admin: httpx.Client, change: dict[str, Any], problem: str) -> None:
    answer = admin.put("/v1/nodes/x", json=FACTS | change)
    assert (answer.status_code, kind(answer)) == (400, problem)
    assert admin.get("/v1/nodes").json() == {"nodes": []}


@pytest.mark.parametrize("name", ["-x", "a%20b", "x" * 201])
def test_names_that_cannot_be(admin: httpx.Client, name: str) -> None:
    assert kind(admin.put(f"/v1/nodes/{name}", json=FACTS)) == "request-invalid"


@pytest.mark.parametrize(
    "body",
    [
        {"state": "dancing"},
        {"state": "ready", "bundle": "abc"},
        {"state": "ready", "bytes": -1},
        {"state": "ready", "seconds": float("1e10")},
        {"state": "ready", "colour": "red"},
    ],
    ids=str,
)
def test_reports_that_say_nothing(admin: httpx.Client, body: dict[str, Any]) -> None:
    admin.put("/v1/nodes/x", json=FACTS)
    assert kind(admin.post("/v1/nodes/x/report", json=body)) == "request-invalid"
    assert admin.get("/v1/nodes/x").json()["node"]["state"] == "registered"


def test_registering_again_replaces_what_was_said_and_keeps_what_was_reported(admin: httpx.Client) -> None:
    admin.put("/v1/nodes/x", json=FACTS | {"driver": "580"})
    report = {"state": "ready", "bundle": "a" * 64, "bytes": 7, "seconds": 1.5}
    assert admin.post("/v1/nodes/x/report", json=report).status_code == 204
    again = admin.put("/v1/nodes/x", json=FACTS | {"labels": {}, "driver": "590"}).json()
    assert (again["labels"], again["driver"]) == ({}, "590")
    assert (again["state"], again["bundle"], again["bytes"]) == ("ready", "a" * 64, 7)


def test_labels_choose_nodes(admin: httpx.Client) -> None:
    for name, labels in (("x", {"ring": "a", "pool": "p"}), ("y", {"ring": "a"}), ("z", {})):
        admin.put(f"/v1/nodes/{name}", json=FACTS | {"labels": labels})

    def listed(*words: str) -> list[str]:
        answer = admin.get("/v1/nodes", params=[("label", word) for word in words])
        return [node["name"] for node in answer.json()["nodes"]]

    assert listed() == ["x", "y", "z"]
    assert listed("ring=a") == ["x", "y"]
    assert listed("ring=a", "pool=p") == ["x"]
    assert kind(admin.get("/v1/nodes?label=ring")) == "label-invalid"
    assert kind(admin.get("/v1/nodes?label=ring=a&label=ring=b")) == "label-invalid"


def test_a_node_waits_for_news_and_hears_them(admin: httpx.Client) -> None:
    admin.put("/v1/nodes/x", json=FACTS)
    nothing = admin.get("/v1/nodes/x/desired")
    assert nothing.json()["bundle"] is None
    assert nothing.json()["problem"]["type"].startswith("urn:kernel-depot:problem:")
    tag = {"If-None-Match": nothing.headers["etag"]}
    assert admin.get("/v1/nodes/x/desired", params={"wait": 0.1}, headers=tag).status_code == 304
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(admin.get, "/v1/nodes/x/desired?wait=25", headers=tag, timeout=30)
        revision = pin(admin, "0.1.3", "a")
        heard = waiting.result()
    assert heard.status_code == 200
    assert heard.json()["pin_sets"] == [{"name": "ffi", "revision": revision}]
    assert heard.json()["complete"] is False
    assert admin.get("/v1/nodes/x/desired?wait=31").status_code == 400


def test_only_administrators_forget_nodes_and_only_nodes_report(open_server: Callable[..., Any]) -> None:
    server = open_server(allow_anonymous=False)
    reader, node, admin = (server.client(server.token(scope)) for scope in ("read", "node", "admin"))
    assert kind(reader.put("/v1/nodes/x", json=FACTS)) == "scope-insufficient"
    assert node.put("/v1/nodes/x", json=FACTS).status_code == 200
    assert kind(node.delete("/v1/nodes/x")) == "scope-insufficient"
    assert reader.get("/v1/nodes/x").status_code == 200
    assert admin.delete("/v1/nodes/x").status_code == 204
    (entry,) = reader.get("/v1/audit?action=node-forgotten").json()["entries"]
    assert (entry["who"], entry["subject"]) == ("admin", "x")


def test_changes_of_a_pin_set_that_are_late_or_impossible(admin: httpx.Client) -> None:
    first, second = pin(admin, "0.1.3", "a"), pin(admin, "0.1.4", "b")
    path = "/v1/pins/ffi"
    assert admin.get(path).headers["etag"] == f'"{second}"'
    late = {"If-Match": f'"{first}"'}
    answer = admin.post(f"{path}/rollback", json={}, headers=late)
    assert (answer.status_code, kind(answer)) == (412, "precondition-failed")
    assert kind(admin.post(f"{path}/rollback", json={"expected": first})) == "revision-moved"
    answer = admin.post(f"{path}/activate", json={"revision": first})
    assert (answer.status_code, kind(answer)) == (409, "revision-not-materialized")
    assert kind(admin.post(f"{path}/activate", json={"revision": "f" * 64})) == "revision-unknown"
    assert kind(admin.delete(f"{path}/canary")) == "canary-impossible"
    assert kind(admin.get(f"{path}/plan?revision={'f' * 64}")) == "revision-unknown"
    canary = {"label": "ring", "value": "canary", "require": 0}
    assert (
        kind(admin.post(f"{path}/activate", json={"revision": first, "canary": canary})) == "request-invalid"
    )
    late_post = admin.post(
        "/v1/pins?name=ffi",
        content=TOML.format(version="0.1.5", digest="c" * 64),
        headers={"content-type": "application/toml", **late},
    )
    assert late_post.status_code == 412
    plan = admin.get(f"{path}/plan?revision={first}").json()
    assert (plan["before"], plan["after"], plan["state"]) == (second, first, "retired")
    assert [wheel["version"] for wheel in plan["wheels_added"]] == ["0.1.3"]


def test_the_audit_log_has_pages_and_filters(admin: httpx.Client) -> None:
    for number in range(5):
        pin(admin, f"0.1.{number}", "abcde"[number])
    every = admin.get("/v1/audit?subject=ffi").json()
    assert (len(every["entries"]), every["next"]) == (5, None)
    assert [entry["before"] for entry in every["entries"]] == [
        *(entry["after"] for entry in every["entries"][1:]),
        None,
    ]
    seen: list[Any] = []
    before: int | None = None
    while True:
        query = {"subject": "ffi", "limit": 2} | ({"before": before} if before else {})
        page = admin.get("/v1/audit", params=query).json()
        seen += page["entries"]
        before = page["next"]
        if before is None:
            break
    assert seen == every["entries"]
    assert admin.get("/v1/audit?action=promoted").json()["entries"] == []
    assert kind(admin.get("/v1/audit?limit=0")) == "request-invalid"
    assert kind(admin.get("/v1/audit?who=ada")) == "parameter-unknown"
