"""Builds that wait for a builder: queued by the server, claimed over HTTP, lost when nobody renews the claim.

Builders have no way to the catalog, so what the engine does for the server's own jobs is done here by rows:
a build is its job's row, which people see, and a row with its claim. Each change is one transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import uuid4

from sqlalchemy import Engine, or_, update
from sqlmodel import Session, col, select

from kernel_depot.catalog import leases, record
from kernel_depot.catalog.database import writing
from kernel_depot.catalog.tables import Build
from kernel_depot.errors import DepotError

KIND: Final = "build"
"""The kind of a build's job."""

_MOST_LOSSES = 3
_SETTLED = frozenset({"built", "cached", "shared", "merged"})


class BuildClaimError(DepotError):
    """The root of what a builder can be told about its claim."""

    slug = "build-claim-failed"
    title = "The claim cannot be used"
    status = 409


class BuildUnknown(BuildClaimError):
    """An id that names no build of this depot."""

    slug = "build-unknown"
    title = "No such build"
    status = 404


class BuildClaimLost(BuildClaimError):
    """A claim that is not, or no longer, the one by which the build is held."""

    slug = "build-claim-lost"
    title = "The build is not held by this claim"


class BuildEnded(BuildClaimError):
    """A build that has ended already."""

    slug = "build-ended"
    title = "The build has ended"


class BuildCancelled(BuildClaimError):
    """A build that an administrator ended."""

    slug = "build-cancelled"
    title = "The build was cancelled"


class BuildersLost(BuildClaimError):
    """A build whose builders were not heard of again, several times in a row."""

    slug = "build-builders-lost"
    title = "Several builders were lost with this build"
    status = 500


@dataclass(frozen=True, slots=True)
class Claimed:
    """A build for the one who claimed it: `claim` is the word that holds it until `until`."""

    id: str
    claim: str
    plan: str
    options: dict[str, Any]
    until: datetime


def submit_build(
    engine: Engine, *, plan: str, name: str, cuda: str, arch: str, options: Mapping[str, Any], asked_by: str
) -> str:
    """Queue a plan's TOML for a builder of this CPU; return the job's id. `name` is the plan's."""
    job_id = str(uuid4())
    request = {"plan": name, "cuda": cuda, "arch": arch, **options}
    with writing(engine) as session:
        record.create_job(session, job_id, kind=KIND, request=request, asked_by=asked_by)
        session.flush()
        session.add(
            Build(
                id=job_id,
                plan=plan,
                cuda=cuda,
                arch=arch,
                options=dict(options),
                state="queued",
                losses=0,
                queued_at=record.now(),
            )
        )
    return job_id


def claim(
    engine: Engine, *, builder: str, arch: str, cuda: Sequence[str] | None, seconds: float
) -> Claimed | None:
    """Give the oldest build that waits, or whose builder was lost, to `builder`; None when there is none.

    `cuda` None takes any CUDA tag. A build that lost several builders in a row fails here instead.
    """
    while True:
        with writing(engine) as session:
            build = _next(session, arch=arch, cuda=cuda)
            if build is None:
                return None
            lost = build.state == "claimed"
            losses = build.losses + lost
            moment = leases.clock(session)
            if losses >= _MOST_LOSSES:
                values: dict[str, Any] = {"state": "ended", "losses": losses, "claim": None}
            else:
                values = {
                    "state": "claimed",
                    "losses": losses,
                    "claim": secrets.token_hex(16),
                    "builder": builder,
                    "claimed_until": moment + timedelta(seconds=seconds),
                }
            # On PostgreSQL two claims can see one row: the state and the claim seen decide who gets it.
            seen = col(Build.claim).is_(None) if build.claim is None else col(Build.claim) == build.claim
            taken = session.connection().execute(
                update(Build)
                .where(col(Build.id) == build.id, col(Build.state) == build.state, seen)
                .values(values)
            )
            if taken.rowcount != 1:
                continue
            if losses >= _MOST_LOSSES:
                problem = BuildersLost(
                    f"{losses} builders claimed the build and were not heard of again",
                    where=f"build {build.id}, last {build.builder}",
                    remedy="look at that builder's machine: memory, disk and log; then queue the build again",
                ).problem()
                record.update_job(session, build.id, state="failed", problem=problem)
                continue
            record.update_job(session, build.id, state="running")
            return Claimed(build.id, values["claim"], build.plan, build.options, values["claimed_until"])


def renew(
    engine: Engine, job_id: str, claim: str, *, seconds: float, modules: Sequence[Mapping[str, Any]]
) -> datetime:
    """Hold a claimed build for so many seconds from now, and take in how far its modules are.

    Raise BuildUnknown, BuildEnded and BuildClaimLost.
    """
    with writing(engine) as session:
        build = _held(session, job_id, claim)
        build.claimed_until = leases.clock(session) + timedelta(seconds=seconds)
        session.flush()
        record.update_job(session, job_id, **_progress(modules))
        return build.claimed_until


def release(engine: Engine, job_id: str, claim: str, *, modules: Sequence[Mapping[str, Any]]) -> None:
    """Give a claimed build back to the queue; the builder is not counted as lost. Raise as `renew` does."""
    with writing(engine) as session:
        build = _held(session, job_id, claim)
        build.state, build.claim, build.builder, build.claimed_until = "queued", None, None, None
        session.flush()
        record.update_job(session, job_id, state="queued", **_progress(modules))


def finish(
    engine: Engine,
    job_id: str,
    claim: str,
    *,
    modules: Sequence[Mapping[str, Any]],
    wheels: Sequence[Mapping[str, Any]],
    problem: Mapping[str, Any] | None,
) -> None:
    """End a claimed build: `wheels` came of it, or `problem` says why none did. Raise as `renew` does."""
    with writing(engine) as session:
        _end(session, _held(session, job_id, claim))
        record.update_job(
            session,
            job_id,
            state="failed" if problem is not None else "succeeded",
            problem=dict(problem) if problem is not None else None,
            wheels=[dict(wheel) for wheel in wheels],
            **_progress(modules),
        )


def cancel(engine: Engine, job_id: str, *, by: str) -> None:
    """End a build; its builder learns of it when it renews. Raise BuildUnknown, BuildEnded."""
    with writing(engine) as session:
        build = _known(session, job_id)
        if build.state == "ended":
            raise BuildEnded("the build has ended already", where=f"build {job_id}")
        _end(session, build)
        problem = BuildCancelled(f"{by} cancelled the build", where=f"build {job_id}").problem()
        record.update_job(session, job_id, state="failed", problem=problem)


def _open(moment: datetime) -> Any:
    lost = (col(Build.state) == "claimed") & (col(Build.claimed_until) < moment)
    return or_(col(Build.state) == "queued", lost)


def _next(session: Session, *, arch: str, cuda: Sequence[str] | None) -> Build | None:
    query = select(Build).where(_open(leases.clock(session)), col(Build.arch) == arch)
    if cuda is not None:
        query = query.where(col(Build.cuda).in_(cuda))
    found: Build | None = session.exec(
        query.order_by(col(Build.queued_at), col(Build.id)).limit(1)
    ).one_or_none()
    return found


def _known(session: Session, job_id: str) -> Build:
    # Whoever changes a claim waits for whoever is changing it (PostgreSQL; SQLite has one writer anyway).
    build: Build | None = session.exec(
        select(Build).where(Build.id == job_id).with_for_update()
    ).one_or_none()
    if build is None:
        raise BuildUnknown(
            f"there is no build {job_id!r}", where="builds", found=job_id, remedy="see GET /v1/jobs"
        )
    return build


def _held(session: Session, job_id: str, claim: str) -> Build:
    build = _known(session, job_id)
    if build.state == "ended":
        raise BuildEnded(
            "the build has ended: it was cancelled, or another builder finished it", where=f"build {job_id}"
        )
    if build.claim is None or not secrets.compare_digest(build.claim, claim):
        raise BuildClaimLost(
            "the build is not held by this claim",
            where=f"build {job_id}",
            found=f"held by {build.builder}" if build.builder else "held by nobody",
            remedy="stop building it; claim another",
        )
    return build


def _end(session: Session, build: Build) -> None:
    build.state, build.claim, build.claimed_until = "ended", None, None
    session.flush()


def _progress(modules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the job's columns for the modules' states; none given leaves them as they are."""
    if not modules:
        return {}
    return {
        "modules": [dict(module) for module in modules],
        "members_done": sum(module.get("state") in _SETTLED for module in modules),
        "members_total": len(modules),
    }
