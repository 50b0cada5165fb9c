"""From a platform to the bundle that fits it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from kernel_depot.api.auth import Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.blobs import not_modified_response
from kernel_depot.api.caching import PreconditionFailed, not_modified
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.parameters import ArchText, CudaText, SmText, names, platform_of
from kernel_depot.api.problems import ParameterUnknown, RequestInvalid, documented
from kernel_depot.catalog.bundles import GroupUnknown, ModuleUnknown, PinSetUnknown, resolve_bundle
from kernel_depot.catalog.database import reading
from kernel_depot.pins.resolve import NothingFits, PinsConflict
from kernel_depot.platform import PlatformError


class PlatformDocument(BaseModel):
    """The platform as it was understood."""

    cuda: str
    arch: str
    sm: str | None


class MissingDocument(BaseModel):
    """A pinned wheel that is not in the store, and the type of what went wrong with it last."""

    project: str
    filename: str
    sha256: str
    reason: str


class TraceDocument(BaseModel):
    """One pin or set that was looked at, what became of it, and why."""

    pin_set: str
    project: str | None
    filename: str | None
    verdict: str
    reason: str


class ResolveAnswer(BaseModel):
    """The bundle that fits, and why."""

    digest: str = Field(description="The bundle's name: the SHA-256 of its manifest.")
    complete: bool = Field(description="Whether every pinned wheel is in the store.")
    missing: list[MissingDocument] = Field(description="The pinned wheels that are not, and why.")
    platform: PlatformDocument
    trace: list[TraceDocument] = Field(description="Why each pin was taken, and what was passed over.")
    artifact_count: int
    total_size: int = Field(description="Bytes of all distinct blobs.")


router = APIRouter(prefix="/v1", tags=["bundles"])


@router.get(
    "/resolve",
    summary="Find the bundle for a platform",
    operation_id="resolve",
    response_model=ResolveAnswer,
    responses={
        **documented(
            RequestInvalid,
            ParameterUnknown,
            PlatformError,
            TokenMissing,
            TokenRefused,
            ScopeInsufficient,
            NothingFits,
            ModuleUnknown,
            GroupUnknown,
            PinSetUnknown,
            PinsConflict,
            PreconditionFailed,
        ),
        304: {"description": "The bundle is still the one named in If-None-Match."},
    },
)
def resolve(
    request: Request,
    depot: DepotDependency,
    _caller: Reader,
    cuda: CudaText,
    arch: ArchText,
    sm: SmText = None,
    modules: Annotated[
        list[str] | None,
        Query(
            description="Only these kernel modules and what they need: comma-separated, or `all`.",
            examples=[["norm,page"]],
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        Query(description="Also the kernel modules of these groups.", examples=[["opponent"]]),
    ] = None,
    pins: Annotated[
        list[str] | None,
        Query(description="Only these pin sets; all that fit otherwise.", examples=[["flashinfer-0.6.3"]]),
    ] = None,
) -> Response:
    """Take, for each project, the pin of the exact CUDA tag, else of the nearest lower minor.

    The major never changes, and a provider for the node's SM goes before a wheel for all. The ETag is the
    bundle's digest: a node that sends it in `If-None-Match` learns with one request that nothing changed.
    """
    platform = platform_of(cuda, arch, sm)
    wanted = names(modules)
    with reading(depot.engine) as session:
        found = resolve_bundle(
            session,
            platform=platform,
            pin_sets=names(pins),
            modules=None if wanted in (None, ["all"]) else wanted,
            groups=names(group) or (),
        )
    headers = {"etag": f'"{found.digest}"', "cache-control": "no-cache"}
    if not_modified(request.headers, headers["etag"]):
        return not_modified_response(headers)
    answer = ResolveAnswer(
        digest=found.digest,
        complete=found.complete,
        missing=[MissingDocument(**asdict(wheel)) for wheel in found.missing],
        platform=PlatformDocument(**platform.to_json()),
        trace=[TraceDocument(**line.to_json()) for line in found.trace],
        artifact_count=found.artifact_count,
        total_size=found.total_size,
    )
    return JSONResponse(answer.model_dump(mode="json"), headers=headers)
