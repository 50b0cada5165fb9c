"""Blobs by digest: one immutable resource, kept as identity bytes and, where it pays, as zstd."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from kernel_depot.api.auth import Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.caching import (
    IMMUTABLE,
    ByteRange,
    NotAcceptable,
    PreconditionFailed,
    RangeNotSatisfiable,
    blob_etag,
    choose_form,
    not_modified,
    repr_digest,
    requested_range,
)
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.elsewhere import handed_over, redirect
from kernel_depot.api.problems import ApiError, RequestInvalid, documented
from kernel_depot.api.sending import BlobDamaged, Body, FileBody, IteratedBody, SizedResponse, damaged
from kernel_depot.catalog import queries
from kernel_depot.catalog.database import reading
from kernel_depot.catalog.tables import Blob
from kernel_depot.jobs.depot import Depot
from kernel_depot.store.blobs import Form, Store

MEDIA_TYPE = "application/octet-stream"
EXAMPLE = "64ecd1e3084c78bfc958e90132d5dffcaf9d2cb4d52bfecde4c1b040e5b024d6"
Sha256 = Annotated[
    str,
    Path(
        pattern="^[0-9a-f]{64}$",
        description="A SHA-256 in lower-case hexadecimal.",
        examples=[EXAMPLE],
    ),
]


class BlobUnknown(ApiError):
    """A digest that names no blob of this depot."""

    slug = "blob-unknown"
    title = "No such blob"
    status = 404


router = APIRouter(prefix="/v1/blobs", tags=["blobs"])
_PROBLEMS = documented(
    RequestInvalid,
    TokenMissing,
    TokenRefused,
    ScopeInsufficient,
    BlobUnknown,
    NotAcceptable,
    PreconditionFailed,
    BlobDamaged,
)
_HEADERS = {
    "ETag": {
        "description": "Strong: the quoted digest, with `-zstd` for the zstd form.",
        "schema": {"type": "string"},
    },
    "Repr-Digest": {
        "description": "The SHA-256 of the identity bytes (RFC 9530), also beside the zstd form.",
        "schema": {"type": "string"},
    },
    "Accept-Ranges": {"description": "Always `bytes`.", "schema": {"type": "string"}},
    "Content-Encoding": {
        "description": "`zstd` when that form is kept and accepted.",
        "schema": {"type": "string"},
    },
}
_BYTES = {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}, "headers": _HEADERS}


@router.get(
    "/sha256/{sha256}",
    summary="Get a blob's bytes",
    operation_id="get_blob",
    response_class=Response,
    responses={
        **_PROBLEMS,
        **documented(RangeNotSatisfiable),
        200: {"description": "The whole blob.", **_BYTES},
        206: {"description": "The byte range asked for, of the identity bytes.", **_BYTES},
        304: {"description": "The client has this form already."},
        307: {"description": "S3 sends the identity bytes: `Location` is a signed URL. A setting."},
    },
)
def get_blob(request: Request, depot: DepotDependency, _caller: Reader, sha256: Sha256) -> Response:
    """Send a blob, or one byte range of it.

    `Range` takes one range (`bytes=0-99`, `bytes=100-`, `bytes=-100`); several, malformed ones and those
    beyond the end are answered 416 with `Content-Range: bytes */SIZE`. A range always addresses the
    identity bytes. `If-Range` with the ETag makes resuming safe; `If-None-Match` saves a repeat.
    """
    return answer_blob(request, depot, _known(depot, sha256))


@router.head(
    "/sha256/{sha256}",
    summary="Get a blob's size and tags",
    operation_id="head_blob",
    response_class=Response,
    responses={
        **_PROBLEMS,
        200: {"description": "The headers of the whole blob.", **_BYTES},
        304: {"description": "The client has this form already."},
    },
)
def head_blob(request: Request, depot: DepotDependency, _caller: Reader, sha256: Sha256) -> Response:
    """Send the headers that GET would send for the whole blob; `Range` is ignored (RFC 9110, 14.2)."""
    return answer_blob(request, depot, _known(depot, sha256))


def _known(depot: DepotDependency, sha256: str) -> Blob:
    with reading(depot.engine) as session:
        row = queries.blob(session, sha256)
    if row is None:
        raise BlobUnknown(
            f"this depot has no blob {sha256}",
            where=f"blobs/sha256/{sha256}",
            found=sha256,
            remedy="materialize the pin set whose wheel holds it",
        )
    return row


def answer_blob(request: Request, depot: Depot, row: Blob) -> Response:
    """Answer a GET or HEAD for a blob that the catalog knows.

    The stored form must have the length that the catalog knows before anything of it is sent: a
    damaged zstd form is passed over for the identity bytes, damaged identity bytes raise BlobDamaged.
    """
    accepted = request.headers.get("accept-encoding")
    is_ranged = request.method == "GET" and "range" in request.headers
    kept = row.zstd_state == "made" and row.zstd_size is not None and not is_ranged
    form = choose_form(accepted, zstd_kept=kept)
    if form is Form.ZSTD and request.method == "GET" and depot.settings.signed_url_seconds:
        form = choose_form(accepted, zstd_kept=False)
    if form is Form.ZSTD:
        try:
            return _answer_form(request, depot, row, form)
        except BlobDamaged:
            form = choose_form(accepted, zstd_kept=False)
    return _answer_form(request, depot, row, form)


def immutable_headers(sha256: str, form: Form) -> dict[str, str]:
    """Return the headers of one form of immutable bytes named by their digest."""
    headers = {
        "etag": blob_etag(sha256, form),
        "cache-control": IMMUTABLE,
        "vary": "accept-encoding",
        "repr-digest": repr_digest(sha256),
        "x-content-type-options": "nosniff",
    }
    if form is not Form.IDENTITY:
        headers["content-encoding"] = form.value
    return headers


def not_modified_response(headers: dict[str, str]) -> Response:
    """Return the 304 for a form with these headers (RFC 9110, 15.4.5)."""
    names = ("etag", "cache-control", "vary")
    kept: dict[str, str] = {name: headers[name] for name in names if name in headers}
    return Response(status_code=304, headers=kept)


def _answer_form(request: Request, depot: Depot, row: Blob, form: Form) -> Response:
    store, settings = depot.store, depot.settings
    headers = immutable_headers(row.sha256, form) | {"accept-ranges": "bytes"}
    if not_modified(request.headers, headers["etag"]):
        return not_modified_response(headers)
    size = row.size
    if form is Form.ZSTD:
        assert row.zstd_size is not None
        size = row.zstd_size
    part: ByteRange | None = None
    if request.method == "GET" and form is Form.IDENTITY:
        part = requested_range(request.headers, etag=headers["etag"], size=size)
    start, end = (part.start, part.end) if part is not None else (0, size)
    if request.method == "GET" and store.path(row.sha256, form=form) is None:
        signed = redirect(store, settings, row.sha256) if form is Form.IDENTITY else None
        if signed is not None:
            return signed
    elif request.method == "GET" and settings.accel_prefix is not None:
        _check_size(store, row.sha256, form, size=size)
        handed = handed_over(
            request, store, settings, row.sha256, form=form, media_type=MEDIA_TYPE, headers=headers
        )
        if handed is not None:
            return handed
    body: Body | None = None
    if request.method == "GET":
        body = _open(store, row.sha256, form, size=size, start=start, end=end)
    else:
        _check_size(store, row.sha256, form, size=size)
    if part is not None:
        headers["content-range"] = part.content_range
    return SizedResponse(
        body,
        length=end - start,
        status=206 if part is not None else 200,
        media_type=MEDIA_TYPE,
        headers=headers,
    )


def _open(store: Store, sha256: str, form: Form, *, size: int, start: int, end: int) -> Body:
    path = store.path(sha256, form=form)
    if path is not None:
        return FileBody(path, sha256=sha256, size=size, start=start, end=end)
    _check_size(store, sha256, form, size=size)
    return IteratedBody(store.read(sha256, start=start, end=end, form=form))


def _check_size(store: Store, sha256: str, form: Form, *, size: int) -> None:
    found = store.size(sha256, form=form)
    if found != size:
        raise damaged(sha256, expected=size, found=f"{found} bytes" if found is not None else "nothing")
