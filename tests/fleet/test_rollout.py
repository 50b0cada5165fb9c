"""A revision rolls through real agents: canaries, promotion, failure, rollback; the audit log keeps it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx


def state(fleet: Any, revision: str) -> str:
    rows = fleet.ask("GET", "/v1/pins/kernels/revisions")["revisions"]
    return str(next(row["state"] for row in rows if row["revision"] == revision))


def current(fleet: Any, node: str) -> str:
    return str((fleet.folder / node / "current").readlink().name)


def blob_requests(fleet: Any) -> int:
    """Return how often the server was asked for bytes, one by one or in a stream."""
    text = httpx.get(f"{fleet.url}/metrics", trust_env=False).text
    counts = re.findall(
        r'^kernel_depot_requests_total\{.*route="/v1/blobs.*\} ([0-9.]+)$', text, re.MULTILINE
    )
    return int(sum(map(float, counts)))


def test_a_failing_canary_stays_a_canary_and_a_good_one_reaches_all_and_is_rolled_back(
    fleet: Any, wait_for: Callable[..., Any], good: str, bad: str
) -> None:
    page = fleet.library(good)
    first = fleet.propose(
        "kernels", fleet.pins({"norm": fleet.library(good), "page": page}, version="0.6.3+cu130")
    )
    assert state(fleet, first) == "materialized"
    fleet.activate("kernels", first, why="the first")
    fleet.agent("a", "--label", "ring=canary")
    fleet.agent("b", "--label", "ring=rest")
    bundle = fleet.ready("a")["node"]["bundle"]
    assert fleet.ready("b")["node"]["bundle"] == bundle
    assert fleet.node("b")["node"]["bytes"] > 0
    cells = fleet.ask("GET", "/v1/matrix")
    assert cells["counts"] == {"skipped": 4}
    assert cells["modules"] == ["norm", "page"]

    broken = fleet.propose(
        "kernels", fleet.pins({"norm": fleet.library(bad), "page": page}, version="0.6.3+cu130.bad")
    )
    plan = fleet.ask("GET", f"/v1/pins/kernels/plan?revision={broken}")
    assert [change["module"] for change in plan["modules"]] == ["norm"]
    assert [change["node"] for change in plan["nodes"]] == ["a", "b"]
    assert plan["bytes"] > 0
    canary = {"label": "ring", "value": "canary", "require": 1}
    fleet.activate("kernels", broken, canary=canary, why="try it")
    wait_for(lambda: state(fleet, broken) == "failed")
    rows = fleet.ask("GET", "/v1/pins/kernels/revisions")["revisions"]
    problem = next(row["problem"] for row in rows if row["revision"] == broken)
    assert problem["type"].endswith(":canary-smoke-failed")
    assert (problem["node"], problem["module"]) == ("a", "norm")
    fleet.ready("a", bundle)
    assert current(fleet, "a") == bundle
    assert fleet.node("b")["node"]["bundle"] == bundle
    assert [cell["node"] for cell in fleet.ask("GET", "/v1/matrix")["cells"] if cell["state"] == "fail"] == []
    assert fleet.ask("GET", "/v1/matrix")["counts"] == {"skipped": 4}

    better = fleet.propose(
        "kernels", fleet.pins({"norm": fleet.library(good), "page": page}, version="0.6.4+cu130")
    )
    fleet.activate("kernels", better, canary=canary)
    wait_for(lambda: state(fleet, better) == "active")
    assert state(fleet, first) == "retired"
    newer = fleet.ready("b")["node"]["bundle"]
    assert newer != bundle
    assert fleet.ready("a", newer)["desired"]["canary_of"] == []
    fetched = fleet.node("b")["node"]["bytes"]
    assert 0 < fetched < 3 * len(page) + 5000  # page and libtvm_ffi.so were there

    asked = blob_requests(fleet)
    assert asked > 0
    went = fleet.ask("POST", "/v1/pins/kernels/rollback", json={"why": "it is slower"})
    assert went == {"name": "kernels", "before": better, "after": first}
    for name in "ab":
        assert fleet.ready(name, bundle)["node"]["bytes"] == 0
        assert current(fleet, name) == bundle
    assert blob_requests(fleet) == asked
    assert fleet.ask("GET", "/v1/matrix")["counts"] == {"skipped": 4}
    log = fleet.ask("GET", "/v1/audit?subject=kernels")["entries"]
    assert [entry["action"] for entry in log] == [
        "rolled-back",
        "promoted",
        "canary-begun",
        "proposed",
        "canary-failed",
        "canary-begun",
        "proposed",
        "activated",
        "proposed",
    ]
    assert (log[0]["before"], log[0]["after"], log[0]["why"]) == (better, first, "it is slower")
    page_one = fleet.ask("GET", "/v1/audit?limit=4")
    page_two = fleet.ask("GET", f"/v1/audit?limit=100&before={page_one['next']}")
    assert [*page_one["entries"], *page_two["entries"]] == fleet.ask("GET", "/v1/audit")["entries"]


def test_an_agent_goes_on_without_the_server_and_after_its_own_death(
    fleet: Any, wait_for: Callable[..., Any], good: str, tmp_path: Path
) -> None:
    first = fleet.propose("kernels", fleet.pins({"norm": fleet.library(good)}, version="0.6.3"))
    fleet.activate("kernels", first)
    process = fleet.agent("a", "--metrics-file", tmp_path / "agent.prom")
    bundle = fleet.ready("a")["node"]["bundle"]
    ready = tmp_path / "a" / "agent" / "ready"
    assert ready.read_text().strip() == bundle
    assert 'kernel_depot_agent_ready{node="a"} 1' in (tmp_path / "agent.prom").read_text()
    process.kill()
    process.wait()
    fleet.stop_server(9)
    ready.unlink()
    fleet.agent("a")
    wait_for(ready.exists)  # what was ready is ready, though no server answers
    second = fleet.library(good)
    fleet.serve()
    newer = fleet.propose("kernels", fleet.pins({"norm": second}, version="0.6.4"))
    fleet.activate("kernels", newer)
    assert fleet.ready("a")["desired"]["pin_sets"] == [{"name": "kernels", "revision": newer}]
    assert "trying again" in (tmp_path / "a.log").read_text()


def test_a_revoked_token_is_said_and_not_asked_with_again(fleet: Any, tmp_path: Path) -> None:
    process = fleet.agent("a", "--token", "kd_nobody_knows")
    assert process.wait(60) == 78
    log = (tmp_path / "a.log").read_text()
    assert "agent-token-rejected" in log
    assert "tokens create --scope node" in log


def test_a_stale_change_is_refused(fleet: Any, good: str) -> None:
    one, two = (
        fleet.propose("kernels", fleet.pins({"norm": fleet.library(good)}, version=version))
        for version in ("0.6.3", "0.6.4")
    )
    fleet.activate("kernels", one)
    tag = {"If-Match": f'"{two}"'}
    answer = fleet.ask("POST", "/v1/pins/kernels/activate", json={"revision": two}, headers=tag, code=412)
    assert (answer["expected"], answer["found"]) == (two, one)
    assert fleet.activate("kernels", two, expected=two, code=409)["type"].endswith("revision-moved")
    fleet.ask("POST", "/v1/pins/kernels/rollback", json={}, code=409)  # nothing was current before
    fleet.activate("kernels", two, expected=one)
    assert fleet.ask("GET", "/v1/pins/kernels")["revision"] == two
