"""Scrubbing a store: damaged and missing blobs are found, deleted and brought anew, also after kill -9."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel_depot.catalog import leases, queries, record
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import Blob, Job
from kernel_depot.jobs.depot import Depot
from kernel_depot.jobs.engine import start_engine, submit_materialize, submit_scrub
from kernel_depot.pins.document import read_pin_set
from kernel_depot.store.blobs import StagedBlob


def reached(depot: Depot, job_id: str, when: Callable[[Job], Any]) -> Job:
    """Wait until a job is as it should be."""
    until = time.monotonic() + 120
    while True:
        with reading(depot.engine) as session:
            job = queries.job(session, job_id)
        assert job is not None
        if when(job):
            return job
        assert time.monotonic() < until, f"the job is still {job.state}: {job.modules}"
        time.sleep(0.1)


def finished(depot: Depot, job_id: str) -> Job:
    return reached(depot, job_id, lambda job: job.finished_at is not None)


def replaced(depot: Depot, sha256: str, data: bytes) -> None:
    """Put other bytes under a digest."""
    depot.store.delete(sha256)
    with depot.store.staging() as staging:
        path = staging / "bad"
        path.write_bytes(data)
        depot.store.publish(StagedBlob(sha256, len(data), path))


def stored(depot: Depot, sha256: str) -> str:
    return hashlib.sha256(b"".join(depot.store.read(sha256))).hexdigest()


def recorded(depot: Depot, pins: Path) -> None:
    with writing(depot.engine) as session:
        record.record_pin_set(session, read_pin_set(pins, allow_file_urls=True), who="test")


def test_damaged_blobs_are_mended_and_lost_ones_told(depot: Depot, pin_files: Callable[..., Any]) -> None:
    pinned = pin_files(12)
    recorded(depot, pinned.pins)
    engine = start_engine(depot)
    try:
        assert finished(depot, submit_materialize(depot, asked_by="test")).state == "succeeded"
        calm = finished(depot, submit_scrub(depot, asked_by="test"))
        assert (calm.state, calm.modules) == ("succeeded", [])
        assert calm.members_done == calm.members_total == len(pinned.digests) + 4
        one, two = sorted(pinned.digests)[:2]
        replaced(depot, one, b"torn")
        depot.store.delete(two)
        replaced(depot, pinned.sha256, b"the wheel itself")
        job = finished(depot, submit_scrub(depot, asked_by="test"))
        torn = hashlib.sha256(b"torn").hexdigest()
        assert (job.state, job.problem) == ("succeeded", None)
        assert {blob["sha256"]: (blob["state"], blob["found"]) for blob in job.modules} == {
            one: ("mended", torn),
            two: ("mended", None),
            pinned.sha256: ("mended", hashlib.sha256(b"the wheel itself").hexdigest()),
        }
        assert all(stored(depot, sha256) == sha256 for sha256 in (one, two, pinned.sha256))

        with writing(depot.engine) as session:
            session.add(Blob(sha256="ab" * 32, size=4, zstd_state="not_worth"))
        replaced(depot, "ab" * 32, b"????")
        job = finished(depot, submit_scrub(depot, asked_by="test"))
    finally:
        engine.close()
    assert job.state == "failed"
    assert job.problem is not None
    assert job.problem["type"].endswith(":blobs-lost")
    assert [(blob["sha256"], blob["state"]) for blob in job.modules] == [("ab" * 32, "lost")]
    assert depot.store.size("ab" * 32) is None


def test_a_scrub_goes_on_after_its_server_was_killed(
    depot: Depot, pin_files: Callable[..., Any], killed_server: Callable[..., str]
) -> None:
    pinned = pin_files(12)
    recorded(depot, pinned.pins)
    engine = start_engine(depot)
    try:
        assert finished(depot, submit_materialize(depot, asked_by="test")).state == "succeeded"
    finally:
        engine.close()
    bad = max(pinned.digests)
    replaced(depot, bad, b"torn")
    # While this process has the wheel's lease nothing is mended, so that the kill comes between.
    wheel = leases.acquire(depot.engine, f"wheel:{pinned.sha256}", seconds=600)
    assert isinstance(wheel, leases.Acquired)
    job_id = killed_server("submit_scrub", lambda job_id: reached(depot, job_id, lambda job: job.modules))
    leases.release(depot.engine, wheel)
    other = replace(
        depot, settings=depot.settings.model_copy(update={"replica": "two", "lease_seconds": 1.0})
    )
    engine = start_engine(other)
    try:
        job = finished(depot, job_id)
    finally:
        engine.close()
    assert job.state == "succeeded"
    assert [(blob["sha256"], blob["state"]) for blob in job.modules] == [(bad, "mended")]
    assert stored(depot, bad) == bad
