"""Warmups against real agents, and their state machine against nodes that only exist in the catalog."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session

from kernel_depot.catalog import record
from kernel_depot.catalog.database import open_database, reading, upgrade, writing
from kernel_depot.catalog.tables import Node, WarmupNode
from kernel_depot.fleet import nodes, warmups
from kernel_depot.fleet.errors import WarmupEmpty, WarmupEnded, WarmupUnknown
from kernel_depot.fleet.nodes import Registration
from kernel_depot.pins.document import parse_pin_set
from kernel_depot.platform import Arch, CudaTag, Platform

PINS = """\
[apache_tvm_ffi.cu130.x86_64]
filename = "apache_tvm_ffi-0.1.3-py3-none-any.whl"
sha256 = "{}"
index = "pypi"
"""


def run(*arguments: object, code: int = 0) -> str:
    """Run kernel-depot and return what it prints."""
    command = [sys.executable, "-m", "kernel_depot.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_warmup_brings_the_next_revision_beside_the_current_one(
    fleet: Any, wait_for: Callable[..., Any], good: str, bad: str
) -> None:
    first = fleet.propose("kernels", fleet.pins({"norm": fleet.library(good)}, version="0.6.3"))
    fleet.activate("kernels", first)
    fleet.agent("a", "--label", "pool=x")
    fleet.agent("b", "--label", "pool=x")
    fleet.agent("c", "--label", "pool=y")
    bundle = fleet.ready("a")["node"]["bundle"]
    fleet.ready("b")
    fleet.ready("c")
    second = fleet.propose("kernels", fleet.pins({"norm": fleet.library(good)}, version="0.6.4"))
    told = run(
        *("warm", "--server", fleet.url, "--revision", second, "--nodes", "pool=x"),
        *("--max-parallel", 1, "--deadline", "2m", "--follow", "--json"),
    )
    ended = json.loads(told)
    assert ended["state"] == "succeeded"
    assert [(node["node"], node["state"], node["smoke"]) for node in ended["nodes"]] == [
        ("a", "done", {"skipped": 1}),
        ("b", "done", {"skipped": 1}),
    ]
    assert all(node["bytes"] > 0 for node in ended["nodes"])
    one, two = sorted(ended["nodes"], key=lambda node: str(node["told_at"]))
    assert one["ended_at"] <= two["told_at"]  # a wave of one
    assert fleet.node("a")["node"]["bundle"] == bundle
    assert (fleet.folder / "a" / "current").readlink().name == bundle
    assert not (fleet.folder / "c" / "bundles" / f"{one['bundle']}.json").exists()
    fleet.activate("kernels", second)
    assert fleet.ready("a", one["bundle"])["node"]["bytes"] == 0
    assert "done" in run("warm", "--server", fleet.url, "--id", ended["id"], "--follow")

    broken = fleet.propose("kernels", fleet.pins({"norm": fleet.library(bad)}, version="0.6.5"))
    told = run("warm", "--server", fleet.url, "--revision", broken, "--nodes", "pool=x", "--follow", code=1)
    assert "2 failed" in told
    assert "modules failed on this node, first norm" in told


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Any]:
    """A catalog with one revision and 25 nodes that were heard of just now."""
    engine = open_database(f"sqlite:///{tmp_path}/catalog.sqlite")
    upgrade(engine)
    pin_set = parse_pin_set(PINS.format("ab" * 32), name="ffi", origin="test")
    with writing(engine) as session:
        record.record_pin_set(session, pin_set, who="test")
        for number in range(25):
            said = Registration(
                platform=Platform(CudaTag(13, 0), Arch.parse("x86_64"), None),
                labels={"pool": "x" if number % 2 else "y"},
                gpus=[],
                driver=None,
                glibc=None,
                capacity_bytes=None,
                product="test",
            )
            nodes.register(session, f"n{number:02}", said, who="test")
    yield engine, pin_set.digest
    engine.dispose()


def begin(engine: Any, revision: str, **order: Any) -> str:
    facts: dict[str, Any] = {
        "labels": {},
        "max_parallel": 4,
        "deadline_seconds": 600.0,
        "failure_share": 0.2,
    }
    made = warmups.WarmupOrder(revisions=(revision,), **(facts | order))
    return warmups.create(engine, made, job=None, asked_by="test")


def told(engine: Any, warmup_id: str) -> list[str]:
    with reading(engine) as session:
        return [node.node for node in warmups.facts(session, warmup_id).nodes if node.state == "told"]


def end(engine: Any, warmup_id: str, node: str, problem: dict[str, Any] | None = None) -> None:
    with writing(engine) as session:
        warmups.reported(
            session, warmup_id, node, bytes_fetched=10, seconds=1.0, smoke={"pass": 1}, problem=problem
        )


def state(engine: Any, warmup_id: str) -> tuple[str, dict[str, int]]:
    with reading(engine) as session:
        facts = warmups.facts(session, warmup_id)
        return facts.warmup.state, facts.counts


def test_no_more_nodes_than_allowed_are_at_work_and_a_failure_holds_up_no_other(catalog: Any) -> None:
    engine, revision = catalog
    warmup_id = begin(engine, revision)
    seen: set[str] = set()
    for _ in range(100):
        if not warmups.step(engine, warmup_id):
            break
        wave = told(engine, warmup_id)
        assert len(wave) <= 4
        seen |= set(wave)
        end(engine, warmup_id, wave[0], {"detail": "its disk is full"} if wave[0] == "n05" else None)
    assert len(seen) == 25
    assert state(engine, warmup_id) == ("failed", {"done": 24, "failed": 1})
    assert warmups.retry_failed(engine, warmup_id, who="test") == 1
    assert warmups.step(engine, warmup_id)
    assert told(engine, warmup_id) == ["n05"]
    end(engine, warmup_id, "n05")
    assert not warmups.step(engine, warmup_id)
    assert state(engine, warmup_id) == ("succeeded", {"done": 25})
    with pytest.raises(WarmupEnded):
        warmups.retry_failed(engine, warmup_id, who="test")


def test_too_many_failures_pause_it_and_it_goes_on_when_resumed(catalog: Any) -> None:
    engine, revision = catalog
    warmup_id = begin(engine, revision, max_parallel=10, failure_share=0.25)
    warmups.step(engine, warmup_id)
    for number, node in enumerate(told(engine, warmup_id)):
        end(engine, warmup_id, node, {"detail": "no"} if number < 3 else None)
    assert not warmups.step(engine, warmup_id)
    with reading(engine) as session:
        paused = warmups.facts(session, warmup_id).warmup
    assert (paused.state, paused.why) == ("paused", "3 of 10 nodes failed, more than 25%")
    assert warmups.open_ids(Session(engine)) == []
    warmups.resume(engine, warmup_id, who="test")
    with writing(engine) as session:
        warmups.facts(session, warmup_id).warmup.failure_share = 1.0
    while warmups.step(engine, warmup_id):
        for node in told(engine, warmup_id):
            end(engine, warmup_id, node)
    assert state(engine, warmup_id) == ("failed", {"done": 22, "failed": 3})


def test_cancelled_it_tells_no_more_nodes_until_it_is_resumed(catalog: Any) -> None:
    engine, revision = catalog
    warmup_id = begin(engine, revision, labels={"pool": "x"})
    warmups.step(engine, warmup_id)
    warmups.cancel(engine, warmup_id, who="test")
    assert not warmups.step(engine, warmup_id)
    assert state(engine, warmup_id) == ("cancelled", {"told": 4, "waiting": 8})
    with pytest.raises(WarmupEnded):
        warmups.cancel(engine, warmup_id, who="test")
    warmups.resume(engine, warmup_id, who="test")
    while warmups.step(engine, warmup_id):
        for node in told(engine, warmup_id):
            end(engine, warmup_id, node)
    assert state(engine, warmup_id) == ("succeeded", {"done": 12})
    with pytest.raises(WarmupUnknown):
        warmups.pause(engine, "nobody", who="test")
    with pytest.raises(WarmupEmpty):
        begin(engine, revision, labels={"pool": "z"})


def test_silent_nodes_lose_their_place_and_end_as_unseen(catalog: Any) -> None:
    engine, revision = catalog
    long_ago = record.now().replace(year=2020)
    with writing(engine) as session:
        for number in range(4):
            node = session.get(Node, f"n{number:02}")
            assert node is not None
            node.heard_at = long_ago
    warmup_id = begin(engine, revision)
    warmups.step(engine, warmup_id)
    assert told(engine, warmup_id) == ["n00", "n01", "n02", "n03"]
    warmups.step(engine, warmup_id)  # none of them is at work
    assert told(engine, warmup_id)[4:] == ["n04", "n05", "n06", "n07"]
    with writing(engine) as session:
        nodes.heard(session, [f"n{number:02}" for number in range(4, 25)])
        warmups.facts(session, warmup_id).warmup.deadline = long_ago
    assert not warmups.step(engine, warmup_id)
    assert state(engine, warmup_id) == ("failed", {"unseen": 4, "failed": 21})
    with reading(engine) as session:
        row = session.get(WarmupNode, (warmup_id, "n00"))
        assert row is not None
        assert row.problem is not None
        assert "deadline" in row.problem["detail"]
