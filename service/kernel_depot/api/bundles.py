"""Bundle manifests by digest."""

from __future__ import annotations

from typing import Annotated

import zstandard
from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from kernel_depot.api.auth import Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.blobs import EXAMPLE, immutable_headers, not_modified_response
from kernel_depot.api.caching import NotAcceptable, PreconditionFailed, choose_form, not_modified
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import ApiError, RequestInvalid, documented
from kernel_depot.catalog import queries
from kernel_depot.catalog.database import reading
from kernel_depot.store.blobs import Form


class BundleUnknown(ApiError):
    """A digest that names no bundle of this depot."""

    slug = "bundle-unknown"
    title = "No such bundle"
    status = 404


router = APIRouter(prefix="/v1/bundles", tags=["bundles"])
_RESPONSES = {
    **documented(
        RequestInvalid,
        TokenMissing,
        TokenRefused,
        ScopeInsufficient,
        BundleUnknown,
        NotAcceptable,
        PreconditionFailed,
    ),
    200: {
        "description": "The manifest: canonical JSON (RFC 8785) whose SHA-256 is the digest.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
    304: {"description": "The client has this form already."},
}
Digest = Annotated[
    str, Path(pattern="^[0-9a-f]{64}$", description="The bundle's digest.", examples=[EXAMPLE])
]


@router.get(
    "/{digest}",
    summary="Get a bundle's manifest",
    operation_id="get_bundle",
    response_class=Response,
    responses=_RESPONSES,
)
def get_bundle(request: Request, depot: DepotDependency, _caller: Reader, digest: Digest) -> Response:
    """Send the very bytes that the digest names, as zstd where accepted."""
    return _answer(request, depot, digest)


@router.head(
    "/{digest}",
    summary="Get a bundle's size and tags",
    operation_id="head_bundle",
    response_class=Response,
    responses=_RESPONSES,
)
def head_bundle(request: Request, depot: DepotDependency, _caller: Reader, digest: Digest) -> Response:
    """Send the headers that GET would send."""
    return _answer(request, depot, digest)


def _answer(request: Request, depot: DepotDependency, digest: str) -> Response:
    with reading(depot.engine) as session:
        manifest = queries.bundle_manifest(session, digest)
    if manifest is None:
        raise BundleUnknown(
            f"this depot has no bundle {digest}",
            where=f"bundles/{digest}",
            found=digest,
            remedy="ask /v1/resolve for the bundle of your platform",
        )
    form = choose_form(request.headers.get("accept-encoding"), zstd_kept=True)
    headers = immutable_headers(digest, form)
    if not_modified(request.headers, headers["etag"]):
        return not_modified_response(headers)
    content = zstandard.compress(manifest, 3) if form is Form.ZSTD else manifest
    return Response(content, media_type="application/json", headers=headers)
