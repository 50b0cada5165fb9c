"""The admin's commands against a real server: plan, apply, sync of a directory, rollback, audit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(fleet: Any, *words: object, code: int = 0) -> str:
    command = [sys.executable, "-m", "kernel_depot.cli.main", *map(str, words), "--server", fleet.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_directory_is_the_truth_and_saying_it_twice_changes_nothing(
    fleet: Any, good: str, bad: str, tmp_path: Path
) -> None:
    directory = tmp_path / "pins"
    directory.mkdir()
    file = directory / "kernels.toml"
    page = fleet.library(good)
    file.write_text(fleet.pins({"norm": fleet.library(good), "page": page}, version="0.6.3"))
    elsewhere = fleet.pins({"rope": fleet.library(good)}, version="0.1").replace("cu130", "cu120")
    fleet.activate("other", fleet.propose("other", elsewhere))
    dry = run(fleet, "pins", "sync", directory, "--dry-run")
    assert "pin set kernels: nothing -> " in dry
    assert [row["name"] for row in fleet.ask("GET", "/v1/pins")["pin_sets"]] == ["other"]
    told = run(fleet, "pins", "sync", directory, "--why", "the first")
    assert "pin set kernels: revision" in told
    assert told.endswith(f"not in {directory}, left alone: other\n")
    first = fleet.ask("GET", "/v1/pins/kernels")["revision"]
    log = fleet.ask("GET", "/v1/audit")["entries"]
    assert "is current already" in run(fleet, "pins", "sync", directory)
    assert fleet.ask("GET", "/v1/audit")["entries"] == log

    fleet.ask(
        "PUT",
        "/v1/nodes/gpu-1",
        json={"cuda": "cu130", "arch": "x86_64", "product": "0", "labels": {"ring": "canary"}},
    )
    file.write_text(fleet.pins({"norm": fleet.library(bad), "page": page}, version="0.6.4"))
    told = run(fleet, "pins", "sync", directory, "--canary", "ring=canary")
    assert "  ~ module norm  " in told
    assert "module page" not in told
    assert "reaches 1 of 1 nodes" in told
    second = next(
        row["revision"]
        for row in fleet.ask("GET", "/v1/pins/kernels/revisions")["revisions"]
        if row["state"] == "canary"
    )
    log = fleet.ask("GET", "/v1/audit")["entries"]
    assert "is a canary already" in run(fleet, "pins", "sync", directory, "--canary", "ring=canary")
    assert fleet.ask("GET", "/v1/audit")["entries"] == log

    desired = fleet.ask("GET", "/v1/nodes/gpu-1/desired")
    sha256 = fleet.ask("GET", f"/v1/pins/kernels/plan?revision={second}")["modules"][0]["after"]
    result = {"module": "norm", "sha256": sha256, "outcome": "crashed", "seconds": 1}
    fleet.ask("POST", "/v1/nodes/gpu-1/smoke", json={"bundle": desired["bundle"], "results": [result]})
    told = run(fleet, "pins", "sync", directory, "--canary", "ring=canary", code=1)
    assert "failed as a canary and is left alone" in told
    assert fleet.ask("GET", "/v1/pins/kernels")["revision"] == first
    states = run(fleet, "pins", "revisions", "kernels")
    assert "the module norm crashed on the node gpu-1" in states

    run(fleet, "pins", "activate", "kernels", second, "--expected", second, code=1)
    run(fleet, "pins", "activate", "kernels", second, "--expected", first, "--why", "anyway")
    matrix = json.loads(run(fleet, "nodes", "matrix", "--json", code=1))
    assert [(cell["module"], cell["state"], cell["result"]["outcome"]) for cell in matrix["cells"]] == [
        ("norm", "fail", "crashed")
    ]
    assert f"back from {second} to {first}" in run(
        fleet, "pins", "rollback", "kernels", "--why", "it crashes"
    )
    matrix = json.loads(run(fleet, "nodes", "matrix", "--json"))
    assert [(cell["state"], cell["result"]["outcome"]) for cell in matrix["cells"]] == [("stale", "crashed")]
    audit = run(fleet, "nodes", "audit", "--subject", "kernels")
    assert "rolled-back" in audit
    assert "it crashes" in audit
