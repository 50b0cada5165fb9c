"""`kernel-depot smoke --report` against a real server: a module's result, by digest, node and driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def smoke(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernel_depot.cli.main", "smoke", "--json", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_results_reach_the_matrix(fleet: Any, good: str, bad: str) -> None:
    modules = {"norm": fleet.library(good), "page": fleet.library(bad)}
    fleet.activate("kernels", fleet.propose("kernels", fleet.pins(modules, version="0.6.3")))
    cache = fleet.folder / "cache"
    where = ("--server", fleet.url, "--cache", cache)
    sync = ["sync", "--cuda", "cu130", "--sm", "none", *map(str, where)]
    subprocess.run([sys.executable, "-m", "kernel_depot.cli.main", *sync], check=True, capture_output=True)

    unknown = smoke("--report", "--name", "b", *where)
    assert unknown.returncode == 1
    assert "node-unknown" in unknown.stdout + unknown.stderr
    assert smoke("--report", "--cache", cache).returncode == 2

    facts = {"cuda": "cu130", "arch": os.uname().machine, "product": "0.1.0"}
    fleet.ask("PUT", "/v1/nodes/b", json=facts)
    told = smoke("--report", "--name", "b", *where)
    assert told.returncode == 1  # page is bad
    report = json.loads(told.stdout)
    kept = {one["module"]: one for one in fleet.node("b")["smoke"]}
    assert {name: one["outcome"] for name, one in kept.items()} == {"norm": "skipped", "page": "fail"}
    for one in report["modules"]:
        assert kept[one["module"]]["sha256"] == one["sha256"]
        assert kept[one["module"]]["why"] == one["why"]
        assert kept[one["module"]]["bundle"] == report["bundle"]
    assert "accepts a call without arguments" in kept["page"]["why"]
