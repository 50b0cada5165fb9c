"""Builds: plans queued for the machines that run `kernel-depot builder`, and what those tell of them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kernel_depot.api.auth import Admin, Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.jobs import JobDocument, get_job
from kernel_depot.api.pins import NAME
from kernel_depot.api.problems import BodyTooLarge, RequestInvalid, documented
from kernel_depot.builder.errors import PlanInvalid, PlanUnreadable
from kernel_depot.builder.plan import parse_plan
from kernel_depot.catalog.database import reading
from kernel_depot.catalog.tables import Build
from kernel_depot.jobs import builds
from kernel_depot.platform import Arch, CudaTag, PlatformError, Sm
from kernel_depot.shipped import shipped_dir

Word = Annotated[str, StringConstraints(min_length=1, max_length=255)]
BuilderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
_EXAMPLE_PLAN = (shipped_dir("builds") / "small.toml").read_text(encoding="utf-8")


class BuildOptionsDocument(BaseModel):
    """How a plan is built, and what becomes of its wheel."""

    model_config = ConfigDict(extra="forbid")

    modules: list[Word] = Field(
        default_factory=list, max_length=1000, description="Only these modules, by URI or family."
    )
    sm: list[Word] = Field(default_factory=list, max_length=64, description="Other SMs than the plan's.")
    pins: str | None = Field(
        default=None, pattern=NAME, description="The pin set to propose; the plan's name when absent."
    )
    activate: bool = Field(default=False, description="Make the proposed revision current at once.")


class BuildRequest(BuildOptionsDocument):
    """A plan to build."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"plan": _EXAMPLE_PLAN, "arch": "x86_64"}]}
    )

    plan: str = Field(min_length=1, max_length=1 << 20, description="The plan's TOML.")
    arch: str = Field(
        default="x86_64", max_length=20, description="The CPU of the builder, and of the wheel."
    )


class ClaimRequest(BaseModel):
    """Who asks for work, and what for."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"builder": "build-1", "arch": "x86_64", "cuda": ["cu130"]}]},
    )

    builder: BuilderName
    arch: str = Field(max_length=20)
    cuda: list[Word] | None = Field(
        default=None, min_length=1, max_length=64, description="Only plans for these CUDA tags; any."
    )


class ClaimDocument(BaseModel):
    """A build for whoever claimed it."""

    id: str
    claim: str = Field(description="Sent with everything that is told of the build from now on.")
    plan: str
    options: BuildOptionsDocument
    lease_seconds: float = Field(description="Renew within this time, or another builder gets the build.")


class ModuleProgress(BaseModel):
    """How far a module is."""

    model_config = ConfigDict(extra="forbid")

    module: Word
    state: Annotated[str, StringConstraints(pattern="^[a-z]{1,20}$")]
    sources: int = Field(ge=0, description="How many files are compiled.")
    sm: list[Word] = Field(max_length=64)
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    size: int | None = Field(default=None, ge=0)
    seconds: float | None = Field(default=None, ge=0)
    peak_memory: int | None = Field(default=None, ge=0)
    problem: dict[str, Any] | None = None


class Telling(BaseModel):
    """What a builder tells of a build that it holds."""

    model_config = ConfigDict(extra="forbid")

    claim: str = Field(min_length=1, max_length=64)
    modules: list[ModuleProgress] = Field(
        default_factory=list, max_length=1000, description="All modules; none leaves what was told before."
    )


class Ending(Telling):
    """How a build ended: with wheels, or with the problem that kept them from coming about."""

    wheels: list[dict[str, Any]] = Field(default_factory=list, max_length=10)
    problem: dict[str, Any] | None = None


class LeaseDocument(BaseModel):
    """How long a claim holds."""

    claimed_until: datetime
    lease_seconds: float


class BuildDocument(BaseModel):
    """A build: its job, its plan, and who has it."""

    job: JobDocument
    plan: str
    state: str = Field(description="`queued`, `claimed` or `ended`.")
    builder: str | None = Field(description="Who claimed it last.")
    claimed_until: datetime | None
    losses: int = Field(description="How many builders were lost with it.")


router = APIRouter(prefix="/v1/builds", tags=["builds"])
_ACCESS = (RequestInvalid, TokenMissing, TokenRefused, ScopeInsufficient)
_CLAIM = (*_ACCESS, builds.BuildUnknown, builds.BuildEnded, builds.BuildClaimLost, BodyTooLarge)
BuildId = Annotated[str, Path(pattern="^[A-Za-z0-9-]{1,64}$", description="The id of the build's job.")]


@router.post(
    "",
    summary="Queue a build",
    operation_id="queue_build",
    status_code=202,
    responses={
        202: {"headers": {"Location": {"description": "The job.", "schema": {"type": "string"}}}},
        **documented(*_ACCESS, PlatformError, PlanUnreadable, PlanInvalid, BodyTooLarge),
    },
)
def queue_build(
    response: Response, depot: DepotDependency, caller: Admin, wanted: Annotated[BuildRequest, Body()]
) -> JobDocument:
    """Queue a plan for a builder of that CPU, which compiles it and publishes the wheel here.

    A plan with errors is refused with all of them. The job waits, however long, until a builder claims it;
    when that builder is lost, the next goes on, and what was compiled is not compiled again.
    """
    plan = parse_plan(wanted.plan, where="plan")
    job_id = builds.submit_build(
        depot.engine,
        plan=wanted.plan,
        name=plan.name,
        cuda=str(plan.cuda),
        arch=str(Arch.parse(wanted.arch)),
        options={
            "modules": wanted.modules,
            "sm": [str(Sm.parse(word)) for word in wanted.sm],
            "pins": wanted.pins,
            "activate": wanted.activate,
        },
        asked_by=caller.name,
    )
    response.headers["location"] = f"/v1/jobs/{job_id}"
    return get_job(depot, caller, job_id)


@router.post(
    "/claim",
    summary="Claim a build",
    operation_id="claim_build",
    response_model=ClaimDocument,
    responses={
        **documented(*_ACCESS, PlatformError),
        204: {"description": "No build waits for such a builder."},
    },
)
def claim_build(
    depot: DepotDependency, _caller: Admin, wanted: Annotated[ClaimRequest, Body()]
) -> ClaimDocument | Response:
    """Take the oldest build that waits, or whose builder was not heard of within its lease."""
    seconds = depot.settings.lease_seconds
    claimed = builds.claim(
        depot.engine,
        builder=wanted.builder,
        arch=str(Arch.parse(wanted.arch)),
        cuda=[str(CudaTag.parse(word)) for word in wanted.cuda] if wanted.cuda is not None else None,
        seconds=seconds,
    )
    if claimed is None:
        return Response(status_code=204)
    return ClaimDocument(
        id=claimed.id,
        claim=claimed.claim,
        plan=claimed.plan,
        options=BuildOptionsDocument(**claimed.options),
        lease_seconds=seconds,
    )


@router.get(
    "/{build_id}",
    summary="See a build",
    operation_id="get_build",
    responses=documented(*_ACCESS, builds.BuildUnknown),
)
def get_build(depot: DepotDependency, caller: Reader, build_id: BuildId) -> BuildDocument:
    """Tell a build's plan, its job with each module's progress, and which builder has it."""
    with reading(depot.engine) as session:
        row = session.get(Build, build_id)
    if row is None:
        raise builds.BuildUnknown(
            f"there is no build {build_id!r}", where="builds", found=build_id, remedy="see GET /v1/jobs"
        )
    return BuildDocument(
        job=get_job(depot, caller, build_id),
        plan=row.plan,
        state=row.state,
        builder=row.builder,
        claimed_until=row.claimed_until,
        losses=row.losses,
    )


@router.post(
    "/{build_id}/heartbeat",
    summary="Renew a claim",
    operation_id="renew_build",
    responses=documented(*_CLAIM),
)
def renew_build(
    depot: DepotDependency, _caller: Admin, build_id: BuildId, told: Annotated[Telling, Body()]
) -> LeaseDocument:
    """Hold a build for another lease, and tell how far its modules are.

    409 means that the build is no longer this builder's: it stops, and tells nothing more of it.
    """
    seconds = depot.settings.lease_seconds
    until = builds.renew(depot.engine, build_id, told.claim, seconds=seconds, modules=_modules(told))
    return LeaseDocument(claimed_until=until, lease_seconds=seconds)


@router.post(
    "/{build_id}/release",
    summary="Give a build back",
    operation_id="release_build",
    status_code=204,
    responses=documented(*_CLAIM),
)
def release_build(
    depot: DepotDependency, _caller: Admin, build_id: BuildId, told: Annotated[Telling, Body()]
) -> None:
    """Put a claimed build back into the queue: the builder stops, and another can claim it at once."""
    builds.release(depot.engine, build_id, told.claim, modules=_modules(told))


@router.post(
    "/{build_id}/finish",
    summary="End a build",
    operation_id="finish_build",
    status_code=204,
    responses=documented(*_CLAIM),
)
def finish_build(
    depot: DepotDependency, _caller: Admin, build_id: BuildId, told: Annotated[Ending, Body()]
) -> None:
    """Say how a claimed build ended: with its wheel published, or with the problem."""
    builds.finish(
        depot.engine,
        build_id,
        told.claim,
        modules=_modules(told),
        wheels=told.wheels,
        problem=told.problem,
    )


@router.post(
    "/{build_id}/cancel",
    summary="Cancel a build",
    operation_id="cancel_build",
    responses=documented(*_ACCESS, builds.BuildUnknown, builds.BuildEnded),
)
def cancel_build(depot: DepotDependency, caller: Admin, build_id: BuildId) -> JobDocument:
    """End a build that has not ended. Its builder stops when it next renews its claim."""
    builds.cancel(depot.engine, build_id, by=caller.name)
    return get_job(depot, caller, build_id)


def _modules(told: Telling) -> list[dict[str, Any]]:
    return [module.model_dump(mode="json", exclude_none=True) for module in told.modules]
