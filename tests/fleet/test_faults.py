"""Real agents under faults: refused tokens, storage that refuses bytes, a forgotten node, a signal."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "kernel_depot.cli.main"]


def tokens(fleet: Any, *words: str) -> Any:
    command = [*COMMAND, "tokens", *words, "--json", "--data-dir", str(fleet.data_dir)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)


def publish(fleet: Any, source: str, *, version: str) -> str:
    revision: str = fleet.propose("kernels", fleet.pins({"norm": fleet.library(source)}, version=version))
    fleet.activate("kernels", revision)
    return revision


def test_another_token_in_the_file_takes_the_place_of_a_revoked_one(
    fleet: Any, wait_for: Callable[..., Any], good: str, tmp_path: Path
) -> None:
    first = tokens(fleet, "create", "--name", "a", "--scope", "node", "--expires", "1h")
    file = tmp_path / "token"
    file.write_text(first["secret"])
    fleet.activate(
        "kernels", fleet.propose("kernels", fleet.pins({"norm": fleet.library(good)}, version="0.6.3"))
    )
    process = fleet.agent("a", "--token-file", file)
    fleet.ready("a")
    assert next(row for row in tokens(fleet, "list") if row["id"] == first["id"])["last_used_at"]
    tokens(fleet, "revoke", first["id"])
    second = publish(fleet, good, version="0.6.4")  # ends the long poll; what comes next is refused
    log = tmp_path / "a.log"
    wait_for(lambda: "waiting for another in the token's file" in log.read_text(), seconds=90)
    assert process.poll() is None
    file.write_text(tokens(fleet, "create", "--name", "a2", "--scope", "node")["secret"])
    assert fleet.ready("a")["desired"]["pin_sets"] == [{"name": "kernels", "revision": second}]
    actions = [entry["action"] for entry in fleet.ask("GET", f"/v1/audit?subject={first['id']}")["entries"]]
    assert actions == ["token-revoked", "token-created"]


def test_a_disk_that_takes_no_more_is_told_and_outlived(
    fleet: Any, wait_for: Callable[..., Any], good: str, tmp_path: Path
) -> None:
    fleet.activate(
        "kernels", fleet.propose("kernels", fleet.pins({"norm": fleet.library(good)}, version="0.6.3"))
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        process = fleet.agent("a")  # a file of more than 100 kB cannot be written
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def failed() -> Any:
        nodes = fleet.ask("GET", "/v1/nodes")["nodes"]
        return nodes[0]["problem"] if nodes and nodes[0]["state"] == "failed" else None

    problem = wait_for(failed)
    assert problem["type"].rpartition(":")[2] in ("cache-unusable", "cache-full")
    assert process.poll() is None
    assert not (tmp_path / "a" / "agent" / "ready").exists()
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
    fleet.ready("a")
    assert (tmp_path / "a" / "agent" / "ready").exists()


def test_a_node_that_was_forgotten_tells_all_of_it_again(fleet: Any, good: str) -> None:
    fleet.activate(
        "kernels", fleet.propose("kernels", fleet.pins({"norm": fleet.library(good)}, version="0.6.3"))
    )
    process = fleet.agent("a")
    known = fleet.ready("a")["smoke"]
    assert [result["module"] for result in known] == ["norm"]
    process.terminate()
    assert process.wait(15) == 0  # a long poll lasts 20 s or more
    fleet.ask("DELETE", "/v1/nodes/a", code=204)
    fleet.agent("a")
    again = fleet.ready("a")
    assert [(result["module"], result["sha256"]) for result in again["smoke"]] == [
        ("norm", known[0]["sha256"])
    ]
    assert again["node"]["bytes"] == 0


def test_an_agent_killed_again_and_again_comes_to_the_same(
    fleet: Any, wait_for: Callable[..., Any], good: str, tmp_path: Path
) -> None:
    publish(fleet, good, version="0.6.3")
    cache = tmp_path / "a"
    seen = (
        lambda: (cache / "blobs").exists(),
        lambda: any((cache / "tmp").glob("*")) or any((cache / "bundles").glob("*.json")),
        lambda: any((cache / "bundles").glob("*.json")),
        lambda: any(node["state"] in ("syncing", "ready") for node in fleet.ask("GET", "/v1/nodes")["nodes"]),
        lambda: (cache / "current").exists(),
    )
    for moment in seen:
        process = fleet.agent("a")
        wait_for(moment)
        process.kill()
        process.wait()
    fleet.agent("a")
    facts = fleet.ready("a")
    bundle = facts["node"]["bundle"]
    assert (cache / "current").readlink().name == bundle
    command = [*COMMAND, "cache", "verify", "--json", "--cache", str(cache)]
    told = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    assert (told["blobs"] > 0, told["wrong"]) == (True, [])
    assert [result["module"] for result in facts["smoke"]] == ["norm"]
