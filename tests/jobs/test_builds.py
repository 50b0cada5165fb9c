"""Who holds a build: claims, renewals, builders that are lost, give up, or are told to stop."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kernel_depot.catalog import queries
from kernel_depot.catalog.database import reading
from kernel_depot.catalog.tables import Build, Job
from kernel_depot.jobs import builds
from kernel_depot.jobs.depot import Depot

PAGE = {"module": "page", "state": "compiling", "sources": 2, "sm": ["sm90a"]}


def submit(depot: Depot, *, cuda: str = "cu130", arch: str = "x86_64") -> str:
    return builds.submit_build(
        depot.engine,
        plan="text",
        name="small",
        cuda=cuda,
        arch=arch,
        options={"modules": []},
        asked_by="me",
    )


def claim(depot: Depot, builder: str = "one", *, seconds: float = 60, **wanted: Any) -> builds.Claimed | None:
    given: dict[str, Any] = {"arch": "x86_64", "cuda": None, **wanted}
    return builds.claim(depot.engine, builder=builder, seconds=seconds, **given)


def job(depot: Depot, job_id: str) -> Job:
    with reading(depot.engine) as session:
        found = queries.job(session, job_id)
    assert found is not None
    return found


def test_a_build_is_claimed_told_of_and_ended(depot: Depot) -> None:
    job_id = submit(depot)
    assert (job(depot, job_id).kind, job(depot, job_id).state) == ("build", "queued")
    held = claim(depot)
    assert held is not None
    assert (held.id, held.plan, held.options) == (job_id, "text", {"modules": []})
    assert job(depot, job_id).state == "running"
    assert claim(depot, "two") is None
    built = {**PAGE, "module": "norm", "state": "built", "seconds": 3.5}
    until = builds.renew(depot.engine, job_id, held.claim, seconds=90, modules=[PAGE, built])
    assert until > held.until
    told = job(depot, job_id)
    assert told.modules == [PAGE, built]
    assert (told.members_done, told.members_total) == (1, 2)
    wheel = {"filename": "x.whl", "outcome": "published"}
    builds.finish(depot.engine, job_id, held.claim, modules=[], wheels=[wheel], problem=None)
    ended = job(depot, job_id)
    assert (ended.state, ended.wheels, ended.modules) == ("succeeded", [wheel], [PAGE, built])
    assert ended.finished_at is not None
    for call in (
        lambda: builds.renew(depot.engine, job_id, held.claim, seconds=1, modules=[]),
        lambda: builds.release(depot.engine, job_id, held.claim, modules=[]),
        lambda: builds.cancel(depot.engine, job_id, by="me"),
    ):
        with pytest.raises(builds.BuildEnded):
            call()


def test_builds_go_to_builders_they_fit_the_oldest_first(embedded: Depot) -> None:
    first, arm, older, last = (
        submit(embedded),
        submit(embedded, arch="aarch64"),
        submit(embedded, cuda="cu129"),
        submit(embedded),
    )
    got = [claim(embedded, cuda=["cu130"]), claim(embedded, cuda=["cu130"]), claim(embedded, cuda=["cu130"])]
    assert [one and one.id for one in got] == [first, last, None]
    assert [one and one.id for one in (claim(embedded), claim(embedded))] == [older, None]
    only = claim(embedded, arch="aarch64")
    assert only is not None
    assert only.id == arm


def test_one_build_goes_to_one_of_many(depot: Depot) -> None:
    ids = {submit(depot) for _ in range(3)}
    with ThreadPoolExecutor(8) as pool:
        got = [one for one in pool.map(lambda n: claim(depot, f"b{n}"), range(8)) if one is not None]
    assert {one.id for one in got} == ids
    assert len(got) == 3


def test_a_lost_builder_is_followed_and_its_claim_is_worth_nothing(depot: Depot) -> None:
    job_id = submit(depot)
    lost = claim(depot, seconds=0.05)
    assert lost is not None
    time.sleep(0.1)
    next_one = claim(depot, "two")
    assert next_one is not None
    assert next_one.id == job_id
    assert next_one.claim != lost.claim
    for call in (
        lambda: builds.renew(depot.engine, job_id, lost.claim, seconds=1, modules=[PAGE]),
        lambda: builds.release(depot.engine, job_id, lost.claim, modules=[PAGE]),
        lambda: builds.finish(depot.engine, job_id, lost.claim, modules=[PAGE], wheels=[], problem=None),
    ):
        with pytest.raises(builds.BuildClaimLost, match="not held by this claim") as caught:
            call()
        assert caught.value.found == "held by two"
    assert job(depot, job_id).modules == []
    with reading(depot.engine) as session:
        assert session.get_one(Build, job_id).losses == 1


def test_a_late_builder_that_nobody_followed_goes_on(embedded: Depot) -> None:
    job_id = submit(embedded)
    held = claim(embedded, seconds=0.01)
    assert held is not None
    time.sleep(0.05)
    builds.renew(embedded.engine, job_id, held.claim, seconds=60, modules=[])
    assert claim(embedded, "two") is None


def test_a_build_that_loses_builder_after_builder_fails(embedded: Depot) -> None:
    job_id, other = submit(embedded), submit(embedded)
    for _ in range(3):
        held = claim(embedded, seconds=0.0)
        assert held is not None
        assert held.id == job_id
        time.sleep(0.01)
    after = claim(embedded)
    assert after is not None
    assert after.id == other
    failed = job(embedded, job_id)
    assert failed.state == "failed"
    assert failed.problem is not None
    assert failed.problem["type"].endswith(":build-builders-lost")


def test_a_builder_that_gives_up_puts_the_build_back(embedded: Depot) -> None:
    job_id = submit(embedded)
    for _ in range(4):  # more often than builders may be lost
        held = claim(embedded)
        assert held is not None
        builds.release(embedded.engine, job_id, held.claim, modules=[PAGE])
        assert (job(embedded, job_id).state, job(embedded, job_id).modules) == ("queued", [PAGE])
    with pytest.raises(builds.BuildClaimLost, match="not held") as caught:
        builds.renew(embedded.engine, job_id, held.claim, seconds=1, modules=[])
    assert caught.value.found == "held by nobody"


def test_a_cancelled_build_is_nobodys(embedded: Depot) -> None:
    job_id = submit(embedded)
    held = claim(embedded)
    assert held is not None
    builds.cancel(embedded.engine, job_id, by="boss")
    with pytest.raises(builds.BuildEnded):
        builds.renew(embedded.engine, job_id, held.claim, seconds=1, modules=[])
    assert claim(embedded) is None
    ended = job(embedded, job_id)
    assert ended.problem is not None
    assert ended.problem["detail"] == "boss cancelled the build"
    with pytest.raises(builds.BuildUnknown):
        builds.cancel(embedded.engine, "nobody", by="boss")
