"""Jobs: bringing pinned wheels into the store, builds, and how far they are."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kernel_depot.api.auth import Admin, Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.pins import NAME
from kernel_depot.api.problems import (
    ApiError,
    BodyTooLarge,
    ParameterUnknown,
    RequestInvalid,
    documented,
)
from kernel_depot.catalog import queries
from kernel_depot.catalog.bundles import PinSetUnknown, RevisionUnknown
from kernel_depot.catalog.database import reading
from kernel_depot.catalog.tables import Job
from kernel_depot.jobs.engine import EngineNotRunning, submit_materialize, submit_scrub
from kernel_depot.platform import Arch, CudaTag, PlatformError

PinSetName = Annotated[str, StringConstraints(pattern=NAME)]


class JobUnknown(ApiError):
    """An id that names no job of this depot."""

    slug = "job-unknown"
    title = "No such job"
    status = 404


class MaterializeRequest(BaseModel):
    """Which pinned wheels to bring into the store; everything pinned when nothing is said."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"pins": ["flashinfer-0.6.3"], "cuda": ["cu130"], "arch": ["x86_64"]}]
        },
    )

    pins: list[PinSetName] | None = Field(
        default=None, min_length=1, description="Names of pin sets; all of them."
    )
    revisions: list[Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]] | None = Field(
        default=None,
        min_length=1,
        description="Recorded revisions, current or not, in place of pin sets by name.",
    )
    cuda: list[str] | None = Field(default=None, min_length=1, description="Only pins for these CUDA tags.")
    arch: list[str] | None = Field(
        default=None, min_length=1, description="Only pins for these architectures."
    )


class ProgressDocument(BaseModel):
    """How far a job is. A total is null until it is known. The members of a build are its modules."""

    bytes_done: int
    bytes_total: int | None
    members_done: int
    members_total: int | None


class JobDocument(BaseModel):
    """A job: what was asked, how far it is, how it ended."""

    id: str
    kind: str
    state: str = Field(description="`queued`, `running`, `succeeded` or `failed`.")
    request: dict[str, Any]
    asked_by: str = Field(description="The name of the token that asked.")
    progress: ProgressDocument
    wheels: list[dict[str, Any]] = Field(description="Each wheel's stage, and in the end its outcome.")
    modules: list[dict[str, Any]] = Field(
        description="Of a build: each module's state (`planned`, `compiling`, `built`, `cached`, `shared`, "
        "`merged`, `failed`), and what is known of it. Of a scrub: each damaged blob (`damaged`, then "
        "`mended` or `lost`)."
    )
    problem: dict[str, Any] | None = Field(description="Why it failed (RFC 9457).")
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None


class JobList(BaseModel):
    """The latest jobs, newest first."""

    jobs: list[JobDocument]


router = APIRouter(prefix="/v1", tags=["jobs"])
_ACCESS = (TokenMissing, TokenRefused, ScopeInsufficient)


@router.post(
    "/materialize",
    summary="Bring pinned wheels into the store",
    operation_id="materialize",
    status_code=202,
    responses={
        202: {
            "headers": {
                "Location": {"description": "The job.", "schema": {"type": "string"}},
            }
        },
        **documented(
            RequestInvalid,
            PlatformError,
            *_ACCESS,
            PinSetUnknown,
            RevisionUnknown,
            BodyTooLarge,
            EngineNotRunning,
        ),
    },
)
def materialize(
    response: Response,
    depot: DepotDependency,
    caller: Admin,
    wanted: Annotated[MaterializeRequest, Body()],
) -> JobDocument:
    """Hand in a durable job: fetch, verify, extract and record the pinned wheels that are not there yet.

    The pin sets are taken as they are now. The job survives the server; ask `Location` how far it is.
    """
    if wanted.pins is not None and wanted.revisions is not None:
        raise RequestInvalid("give `pins` or `revisions`, not both", where="revisions")
    job_id = submit_materialize(
        depot,
        pin_sets=wanted.pins,
        revisions=wanted.revisions,
        cuda=[CudaTag.parse(text) for text in wanted.cuda] if wanted.cuda is not None else None,
        arch=[Arch.parse(text) for text in wanted.arch] if wanted.arch is not None else None,
        asked_by=caller.name,
    )
    response.headers["location"] = f"/v1/jobs/{job_id}"
    return get_job(depot, caller, job_id)


@router.post(
    "/scrubs",
    summary="Hash the whole store again",
    operation_id="scrub",
    status_code=202,
    responses={
        202: {"headers": {"Location": {"description": "The job.", "schema": {"type": "string"}}}},
        **documented(*_ACCESS, EngineNotRunning),
    },
)
def scrub(response: Response, depot: DepotDependency, caller: Admin) -> JobDocument:
    """Hand in a durable job: read every blob, delete what is not what its digest says, bring it anew.

    `modules` lists the damaged blobs, in the end each as `mended` or `lost`; a lost one makes the job fail.
    """
    job_id = submit_scrub(depot, asked_by=caller.name)
    response.headers["location"] = f"/v1/jobs/{job_id}"
    return get_job(depot, caller, job_id)


@router.get(
    "/jobs",
    summary="List jobs",
    operation_id="list_jobs",
    responses=documented(RequestInvalid, ParameterUnknown, *_ACCESS),
)
def list_jobs(
    depot: DepotDependency,
    _caller: Reader,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many.")] = 100,
) -> JobList:
    """List the latest jobs, newest first."""
    with reading(depot.engine) as session:
        return JobList(jobs=[job_document(job) for job in queries.jobs(session, limit=limit)])


@router.get(
    "/jobs/{job_id}",
    summary="See how far a job is",
    operation_id="get_job",
    responses=documented(RequestInvalid, *_ACCESS, JobUnknown),
)
def get_job(
    depot: DepotDependency,
    _caller: Reader,
    job_id: Annotated[
        str,
        Path(
            pattern="^[A-Za-z0-9-]{1,64}$",
            description="The id that the job was given.",
            examples=["0b7a51a4-0e8b-4c8c-9d5e-2f6f1a0f7c11"],
        ),
    ],
) -> JobDocument:
    """Tell a job's state, its progress in bytes and members, each wheel's outcome, and why it failed."""
    with reading(depot.engine) as session:
        job = queries.job(session, job_id)
    if job is None:
        raise JobUnknown(f"there is no job {job_id!r}", where="jobs", found=job_id, remedy="see GET /v1/jobs")
    return job_document(job)


def job_document(job: Job) -> JobDocument:
    """Return a job as the API tells it."""
    return JobDocument(
        id=job.id,
        kind=job.kind,
        state=job.state,
        request=job.request,
        asked_by=job.asked_by,
        progress=ProgressDocument(
            bytes_done=job.bytes_done,
            bytes_total=job.bytes_total,
            members_done=job.members_done,
            members_total=job.members_total,
        ),
        wheels=job.wheels,
        modules=job.modules,
        problem=job.problem,
        created_at=job.created_at,
        updated_at=job.updated_at,
        finished_at=job.finished_at,
    )
