from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kernel_depot.catalog import leases, queries, record
from kernel_depot.catalog.bundles import PinSetUnknown
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import Job, Lease
from kernel_depot.jobs.depot import Depot
from kernel_depot.jobs.engine import (
    EngineNotRunning,
    _adopt,
    _start_forgotten,
    _Stopping,
    start_engine,
    submit_materialize,
)
from kernel_depot.pins.document import read_pin_set

PinFiles = Callable[..., Any]
LEASE = 3  # seconds, of a server and of the one that takes its jobs over

SERVER = """
import json, sys, time
from kernel_depot.jobs.depot import open_depot
from kernel_depot.jobs.engine import start_engine, submit_materialize
from kernel_depot.settings import load_settings
depot = open_depot(load_settings(allow_file_urls=True, replica="one", **json.loads(sys.argv[1])))
engine = start_engine(depot)
print(engine.executor if sys.argv[2:] == ["idle"] else submit_materialize(depot, asked_by="test"), flush=True)
time.sleep(600)
"""


def waits_for_the_wheel(job: Job) -> bool:
    return bool(job.wheels[:1]) and job.wheels[0].get("stage") == "waiting"


def reached(depot: Depot, job_id: str, when: Callable[[Job], Any], *, seconds: float = 120) -> Job:
    """Wait until a job is as it should be."""
    deadline = time.monotonic() + seconds
    while True:
        with reading(depot.engine) as session:
            job = queries.job(session, job_id)
        assert job is not None
        if when(job):
            return job
        assert time.monotonic() < deadline, f"the job is still {job.state}: {job.wheels}"
        time.sleep(0.1)


def finished(depot: Depot, job_id: str) -> Job:
    return reached(depot, job_id, lambda job: job.finished_at is not None)


def recorded(depot: Depot, pins: Path) -> None:
    with writing(depot.engine) as session:
        record.record_pin_set(session, read_pin_set(pins, allow_file_urls=True), who="test")


def test_a_job_brings_wheels_in_and_tells_its_progress(depot: Depot, pin_files: PinFiles) -> None:
    pinned = pin_files(30)
    recorded(depot, pinned.pins)
    engine = start_engine(depot)
    try:
        with pytest.raises(EngineNotRunning):
            start_engine(depot)
        with pytest.raises(PinSetUnknown):
            submit_materialize(depot, pin_sets=["nope"], asked_by="test")
        job = finished(depot, submit_materialize(depot, asked_by="test"))
        again = finished(depot, submit_materialize(depot, asked_by="test"))
    finally:
        engine.close()
    assert (job.state, job.problem) == ("succeeded", None)
    assert job.members_done == job.members_total == 33
    assert job.bytes_done == job.bytes_total
    assert job.bytes_done > 30 * 600
    assert job.wheels[0]["outcome"] == "ingested"
    assert again.wheels[0]["outcome"] == "already-there"
    assert depot.store.has(pinned.digests) == pinned.digests


def test_a_job_that_fails_says_why(embedded: Depot, pin_files: PinFiles) -> None:
    recorded(embedded, pin_files(3, sha256="0" * 64).pins)
    engine = start_engine(embedded)
    try:
        job = finished(embedded, submit_materialize(embedded, asked_by="test"))
    finally:
        engine.close()
    assert job.state == "failed"
    assert job.problem is not None
    assert job.problem["type"].startswith("urn:kernel-depot:problem:wheel-")


def test_nothing_is_handed_in_where_no_engine_runs(embedded: Depot) -> None:
    with pytest.raises(EngineNotRunning):
        submit_materialize(embedded, asked_by="test")


@pytest.mark.parametrize("successor", ["one", "two"])
def test_a_job_goes_on_after_its_server_was_killed(
    depot: Depot, pin_files: PinFiles, killed_server: Callable[..., str], successor: str
) -> None:
    """The killed server's successor has its name, or is another server beside it."""
    pinned = pin_files(30)
    recorded(depot, pinned.pins)
    # While this process has the wheel's lease the job waits, so it is killed under way for certain.
    lease = leases.acquire(depot.engine, f"wheel:{pinned.sha256}", seconds=600)
    assert isinstance(lease, leases.Acquired)
    job_id = killed_server("submit_materialize", lambda job_id: reached(depot, job_id, waits_for_the_wheel))
    leases.release(depot.engine, lease)
    other = replace(
        depot, settings=depot.settings.model_copy(update={"replica": successor, "lease_seconds": 1.0})
    )
    engine = start_engine(other)
    try:
        job = reached(depot, job_id, lambda job: job.finished_at is not None)
    finally:
        engine.close()
    assert engine.executor == successor
    assert (job.state, job.problem) == ("succeeded", None)
    assert depot.store.has(pinned.digests) == pinned.digests


def test_a_dead_servers_jobs_are_taken_up_by_one_server_at_a_time(
    embedded: Depot, pin_files: PinFiles
) -> None:
    pinned = pin_files(30)
    recorded(embedded, pinned.pins)
    wheel = leases.acquire(embedded.engine, f"wheel:{pinned.sha256}", seconds=600)
    adoption = leases.acquire(embedded.engine, "adoption", seconds=600)
    assert isinstance(wheel, leases.Acquired)
    assert isinstance(adoption, leases.Acquired)
    arguments = json.dumps({"data_dir": str(embedded.settings.data_dir)})
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, arguments], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        job_id = child.stdout.readline().strip()
        reached(embedded, job_id, lambda job: job.wheels[:1] and job.wheels[0].get("stage") == "waiting")
        child.kill()
    leases.release(embedded.engine, wheel)
    settings = embedded.settings.model_copy(update={"replica": "two", "lease_seconds": 1.0})
    other = replace(embedded, settings=settings)
    engine = start_engine(other)
    try:
        assert _adopt(other, engine.executor) == []
        leases.release(embedded.engine, adoption)
        assert finished(other, job_id).state == "succeeded"
    finally:
        engine.close()


def test_closing_does_not_wait_for_a_job_under_way(embedded: Depot, pin_files: PinFiles) -> None:
    pinned = pin_files(30)
    recorded(embedded, pinned.pins)
    lease = leases.acquire(embedded.engine, f"wheel:{pinned.sha256}", seconds=600)
    assert isinstance(lease, leases.Acquired)
    arguments = json.dumps({"data_dir": str(embedded.settings.data_dir)})
    script = SERVER.replace("time.sleep(600)", "sys.stdin.readline()\nengine.close()")
    with subprocess.Popen(
        [sys.executable, "-c", script, arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        job_id = child.stdout.readline().strip()
        reached(embedded, job_id, lambda job: job.wheels[:1] and job.wheels[0].get("stage") == "waiting")
        try:
            child.communicate("stop\n", timeout=60)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
    assert child.returncode == 0
    leases.release(embedded.engine, lease)
    settings = embedded.settings.model_copy(update={"replica": "one"})
    engine = start_engine(replace(embedded, settings=settings))
    try:
        assert reached(embedded, job_id, lambda job: job.finished_at is not None).state == "succeeded"
    finally:
        engine.close()


def test_two_engines_with_one_name_take_two(embedded: Depot) -> None:
    arguments = json.dumps({"data_dir": str(embedded.settings.data_dir)})
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, arguments, "idle"], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "one"
        settings = embedded.settings.model_copy(update={"replica": "one"})
        engine = start_engine(replace(embedded, settings=settings))
        try:
            assert engine.executor == "one-2"
        finally:
            engine.close()
            child.kill()


FOREIGN = """
from kernel_depot.catalog import leases
here = leases.process_name
leases.process_name = lambda: "0" * 32 + here()[32:]
"""


def test_a_job_is_taken_over_when_the_lease_of_another_machine_is_over(
    depot: Depot, pin_files: PinFiles, killed_server: Callable[..., str]
) -> None:
    """Nobody here can see whether that process lives, and it never returns."""
    pinned = pin_files(30)
    recorded(depot, pinned.pins)
    wheel = leases.acquire(depot.engine, f"wheel:{pinned.sha256}", seconds=600)
    assert isinstance(wheel, leases.Acquired)
    job_id = killed_server(
        "submit_materialize",
        lambda job_id: reached(depot, job_id, waits_for_the_wheel),
        before=FOREIGN,
        lease_seconds=LEASE,
    )
    killed = time.monotonic()
    leases.release(depot.engine, wheel)
    with reading(depot.engine) as session:
        assert leases.is_live(session, "executor:one")
    other = replace(
        depot, settings=depot.settings.model_copy(update={"replica": "two", "lease_seconds": float(LEASE)})
    )
    engine = start_engine(other)
    try:
        assert _adopt(other, "two") == []
        job = finished(depot, job_id)
    finally:
        engine.close()
    print(f"taken over and done after {time.monotonic() - killed:.1f} s with leases of {LEASE} s")
    assert job.state == "succeeded"
    assert depot.store.has(pinned.digests) == pinned.digests
    with reading(depot.engine) as session:
        lease = session.get(Lease, "executor:one")
        assert lease is not None
        assert job.finished_at is not None
        assert lease.expires_at <= job.finished_at


def test_a_job_that_only_has_its_row_is_started_once(embedded: Depot, pin_files: PinFiles) -> None:
    """Its server was killed before the workflow was begun."""
    pinned = pin_files(3)
    recorded(embedded, pinned.pins)
    with reading(embedded.engine) as session:
        (pin_set,) = queries.current_pin_sets(session)
    request = {
        "pin_sets": [{"name": pin_set.name, "revision": pin_set.digest}],
        "cuda": None,
        "arch": None,
    }
    with writing(embedded.engine) as session:
        record.create_job(session, "left", kind="materialize", request=request, asked_by="test")
    hasty = replace(embedded, settings=embedded.settings.model_copy(update={"lease_seconds": 1.0}))
    engine = start_engine(hasty)
    try:
        job = finished(embedded, "left")
        assert _start_forgotten(hasty) == []
    finally:
        engine.close()
    assert job.state == "succeeded"
    assert [wheel["outcome"] for wheel in job.wheels] == ["ingested"]


def test_an_engine_whose_lease_was_taken_does_nothing_more(embedded: Depot, pin_files: PinFiles) -> None:
    pinned = pin_files(3)
    recorded(embedded, pinned.pins)
    wheel = leases.acquire(embedded.engine, f"wheel:{pinned.sha256}", seconds=600)
    assert isinstance(wheel, leases.Acquired)
    settings = embedded.settings.model_copy(update={"replica": "cut-off", "lease_seconds": 1.0})
    gone = Event()
    engine = start_engine(replace(embedded, settings=settings), on_lost=gone.set)
    try:
        job_id = submit_materialize(engine.depot, asked_by="test")
        reached(embedded, job_id, lambda job: job.wheels[:1] and job.wheels[0].get("stage") == "waiting")
        with writing(embedded.engine) as session:
            lease = session.get(Lease, "executor:cut-off")
            assert lease is not None
            lease.owner = "someone else"
            session.add(lease)
        assert gone.wait(60)
        with pytest.raises(_Stopping):
            engine.stop_if_asked()
    finally:
        leases.release(embedded.engine, wheel)
        engine.close()
    with reading(embedded.engine) as session:
        job = queries.job(session, job_id)
    assert job is not None
    assert job.state == "running"
    assert embedded.store.has(pinned.digests) == set()
