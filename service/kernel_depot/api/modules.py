"""Kernel modules by name: what a person curls."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.responses import RedirectResponse, Response

from kernel_depot.api.auth import Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.parameters import ArchText, CudaText, SmText, platform_of
from kernel_depot.api.problems import ApiError, ParameterUnknown, RequestInvalid, documented
from kernel_depot.bundle import ArtifactKind, read_bundle
from kernel_depot.catalog.bundles import ModuleUnknown, resolve_bundle
from kernel_depot.catalog.database import reading
from kernel_depot.pins.resolve import NothingFits, PinsConflict
from kernel_depot.platform import PlatformError


class ModuleUnavailable(ApiError):
    """A kernel module that no wheel in the store has, while pinned wheels are still missing."""

    slug = "module-unavailable"
    title = "The kernel module is not in the store"
    status = 404


router = APIRouter(prefix="/v1/modules", tags=["artifacts"])


@router.get(
    "/{uri}",
    summary="Find a kernel module's file",
    operation_id="get_module",
    status_code=302,
    response_class=RedirectResponse,
    responses={
        **documented(
            RequestInvalid,
            ParameterUnknown,
            PlatformError,
            TokenMissing,
            TokenRefused,
            ScopeInsufficient,
            ModuleUnknown,
            ModuleUnavailable,
            NothingFits,
            PinsConflict,
        ),
        302: {"description": "`Location` is the module's blob."},
    },
)
def get_module(
    depot: DepotDependency,
    _caller: Reader,
    uri: Annotated[
        str,
        Path(pattern="^[A-Za-z0-9_.-]{1,500}$", description="The module's name.", examples=["norm"]),
    ],
    cuda: CudaText,
    arch: ArchText,
    sm: SmText = None,
) -> Response:
    """Redirect to the blob of the module that the pin sets give this platform: `curl -L -o norm.so`."""
    platform = platform_of(cuda, arch, sm)
    with reading(depot.engine) as session:
        found = resolve_bundle(session, platform=platform, modules=[uri])
    bundle = read_bundle(found.manifest, digest=found.digest, where=f"bundles/{found.digest}")
    for artifact in bundle.artifacts:
        if artifact.kind is ArtifactKind.MODULE and artifact.module == uri:
            return RedirectResponse(
                f"/v1/blobs/sha256/{artifact.sha256}",
                status_code=302,
                headers={"cache-control": "no-cache"},
            )
    raise ModuleUnavailable(
        f"no wheel in the store has the kernel module {uri!r} for {platform}",
        where="modules",
        found=uri,
        remedy="materialize the wheels that are missing: POST /v1/materialize",
        missing=[asdict(wheel) for wheel in bundle.missing],
    )
