"""What the ingested wheels hold, with what was read out of each file."""

from __future__ import annotations

import base64
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from packaging.utils import canonicalize_name
from pydantic import BaseModel, Field

from kernel_depot.api.auth import Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.parameters import ArchFilter, CudaFilter, SmText
from kernel_depot.api.problems import ApiError, ParameterUnknown, RequestInvalid, documented
from kernel_depot.bundle import ArtifactKind
from kernel_depot.catalog import queries
from kernel_depot.catalog.database import reading
from kernel_depot.platform import Arch, CudaTag, PlatformError, Sm


class CursorInvalid(ApiError):
    """A cursor that no page of this list gave."""

    slug = "cursor-invalid"
    title = "Not a cursor of this list"


class InspectionDocument(BaseModel):
    """What was read out of a library or a cubin."""

    format: str = Field(description="`elf` or `cubin`.")
    machine: str | None
    soname: str | None
    needed: list[str] = Field(description="Libraries the loader will look for.")
    glibc: str | None = Field(description="The newest GLIBC version needed.")
    glibcxx: str | None = Field(description="The newest GLIBCXX version needed.")
    functions: list[str] = Field(description="Exported TVM-FFI functions.")
    sms: list[str] = Field(description="Targets with machine code: `sm_90a`.")
    ptx: list[str] = Field(description="Targets with PTX.")


class ArtifactDocument(BaseModel):
    """One useful file of one wheel."""

    path: str = Field(description="As in the wheel.")
    kind: ArtifactKind
    module: str | None
    sha256: str
    size: int
    wheel: str = Field(description="The wheel's SHA-256.")
    project: str
    version: str
    filename: str = Field(description="The wheel's.")
    arch: str | None = Field(description="The wheel's architecture; null for wheels of any.")
    inspection: InspectionDocument | None


class ArtifactList(BaseModel):
    """A page of artifacts, in the order of wheel digest and path."""

    artifacts: list[ArtifactDocument]
    next: str | None = Field(description="The cursor of the next page; null on the last one.")


router = APIRouter(prefix="/v1", tags=["artifacts"])


@router.get(
    "/artifacts",
    summary="List artifacts",
    operation_id="list_artifacts",
    responses={
        200: {
            "headers": {
                "Link": {
                    "description": 'The next page, `rel="next"` (RFC 8288).',
                    "schema": {"type": "string"},
                }
            }
        },
        **documented(
            RequestInvalid,
            ParameterUnknown,
            PlatformError,
            CursorInvalid,
            TokenMissing,
            TokenRefused,
            ScopeInsufficient,
        ),
    },
)
def list_artifacts(
    request: Request,
    response: Response,
    depot: DepotDependency,
    _caller: Reader,
    project: Annotated[str | None, Query(max_length=200, examples=["flashinfer-cubin"])] = None,
    module: Annotated[str | None, Query(max_length=500, examples=["norm"])] = None,
    kind: ArtifactKind | None = None,
    cuda: CudaFilter = None,
    arch: ArchFilter = None,
    sm: SmText = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Artifacts a page.")] = 100,
    cursor: Annotated[str | None, Query(max_length=4000, description="`next` of the page before.")] = None,
) -> ArtifactList:
    """List the artifacts of the wheels in the store, with inspection facts, a page at a time.

    `cuda` selects by the pins that name the wheel, `arch` by the wheel, `sm` by the machine code in the file.
    """
    with reading(depot.engine) as session:
        page = queries.artifacts(
            session,
            project=canonicalize_name(project) if project is not None else None,
            module=module,
            kind=kind.value if kind is not None else None,
            cuda=CudaTag.parse(cuda) if cuda is not None else None,
            arch=Arch.parse(arch) if arch is not None else None,
            sm=Sm.parse(sm) if sm is not None else None,
            after=_position(cursor) if cursor is not None else None,
            limit=limit,
        )
        found = [_document(facts) for facts in page.items]
    following = _cursor(page.after) if page.after is not None else None
    if following is not None:
        url = request.url.include_query_params(cursor=following)
        response.headers["link"] = f'<{url.path}?{url.query}>; rel="next"'
    return ArtifactList(artifacts=found, next=following)


def _document(facts: queries.ArtifactFacts) -> ArtifactDocument:
    seen = facts.inspection
    return ArtifactDocument(
        path=facts.path,
        kind=ArtifactKind(facts.kind),
        module=facts.module,
        sha256=facts.sha256,
        size=facts.size,
        wheel=facts.wheel,
        project=facts.project,
        version=facts.version,
        filename=facts.filename,
        arch=facts.arch,
        inspection=InspectionDocument(**seen.model_dump(exclude={"sha256"})) if seen is not None else None,
    )


def _cursor(position: str) -> str:
    return base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")


def _position(cursor: str) -> str:
    try:
        position = base64.b64decode(
            (cursor + "=" * (-len(cursor) % 4)).encode("ascii"), altchars=b"-_", validate=True
        ).decode()
        if "\0" in position:
            raise ValueError("no path has a NUL character")
        return position
    except ValueError as error:
        raise CursorInvalid(
            "this is no cursor of this list",
            where="cursor",
            found=cursor[:100],
            remedy="pass `next` of the page before, unchanged",
        ) from error
