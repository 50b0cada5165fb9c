"""Uploads: an administrator's bytes on their way into the store, in parts, resumable, checked on arrival."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Depends, Header, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from kernel_depot.api.auth import Admin, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.blobs import EXAMPLE, Sha256
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import BodyTooLarge, RequestInvalid, documented
from kernel_depot.jobs import uploads

_DIGEST = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]+):")


class UploadRequest(BaseModel):
    """What is to be uploaded."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"sha256": EXAMPLE, "size": 158_334_976}]}
    )

    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="Of all the bytes, in lower-case hexadecimal.")
    size: int = Field(gt=0, lt=1 << 53, description="Of all the bytes.")


class UploadDocument(BaseModel):
    """How far an upload is."""

    sha256: str
    size: int
    state: Literal["receiving", "stored"] = Field(description="`stored`: the bytes are a blob of this depot.")
    part_size: int = Field(default=uploads.PART, description="Bytes of every part but the last.")
    missing: list[int] = Field(description="The numbers of the parts to send, from 0.")


router = APIRouter(prefix="/v1/uploads", tags=["uploads"])
_ACCESS = (RequestInvalid, TokenMissing, TokenRefused, ScopeInsufficient)
_Number = Annotated[int, Path(ge=0, lt=1 << 31, description="The part's number, from 0.")]


@router.post(
    "",
    summary="Begin an upload, or find how far it is",
    operation_id="begin_upload",
    status_code=201,
    responses={
        **documented(*_ACCESS, uploads.UploadTooLarge, uploads.UploadSizeDiffers),
        200: {"model": UploadDocument, "description": "The bytes are there already."},
    },
)
def begin_upload(
    response: Response, depot: DepotDependency, caller: Admin, wanted: Annotated[UploadRequest, Body()]
) -> UploadDocument:
    """Announce bytes by their digest and size. The answer lists the parts to send.

    An upload that was begun before, by whomever, goes on: only what is missing is to be sent. One that
    nobody comes back for in a week is forgotten.
    """
    known = uploads.begin(
        depot.engine,
        depot.store,
        settings=depot.settings,
        sha256=wanted.sha256,
        size=wanted.size,
        begun_by=caller.name,
    )
    if isinstance(known, uploads.Stored):
        response.status_code = 200
    response.headers["location"] = f"/v1/uploads/{wanted.sha256}"
    return _document(known)


@router.get(
    "/{sha256}",
    summary="See how far an upload is",
    operation_id="get_upload",
    responses=documented(*_ACCESS, uploads.UploadUnknown),
)
def get_upload(depot: DepotDependency, _caller: Admin, sha256: Sha256) -> UploadDocument:
    """Tell which parts are missing."""
    return _document(uploads.progress(depot.engine, depot.store, sha256))


async def _body(request: Request) -> bytes:
    return await request.body()


@router.put(
    "/{sha256}/parts/{number}",
    summary="Send a part",
    operation_id="put_upload_part",
    status_code=204,
    responses=documented(
        *_ACCESS, uploads.UploadPartRefused, uploads.UploadUnknown, BodyTooLarge, uploads.UploadNoRoom
    ),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
def put_upload_part(
    depot: DepotDependency,
    _caller: Admin,
    sha256: Sha256,
    number: _Number,
    body: Annotated[bytes, Depends(_body)],
    content_digest: Annotated[
        str | None, Header(description="`sha-256=:BASE64:` of the part (RFC 9530); checked when given.")
    ] = None,
) -> None:
    """Take the bytes from `number` times the part size on. Sent again, a part replaces what was there."""
    uploads.take_part(
        depot.engine, depot.store, sha256=sha256, number=number, data=body, digest=_digest(content_digest)
    )


@router.post(
    "/{sha256}/complete",
    summary="Complete an upload",
    operation_id="complete_upload",
    status_code=201,
    responses=documented(
        *_ACCESS,
        uploads.UploadUnknown,
        uploads.UploadIncomplete,
        uploads.UploadMismatch,
        uploads.UploadNoRoom,
    ),
)
def complete_upload(
    response: Response, depot: DepotDependency, _caller: Admin, sha256: Sha256
) -> UploadDocument:
    """Put the parts together and check their SHA-256; from then on they are a blob.

    Bytes that do not match are all thrown away.
    """
    stored = uploads.complete(depot.engine, depot.store, sha256)
    response.headers["location"] = f"/v1/blobs/sha256/{sha256}"
    return _document(stored)


@router.delete(
    "/{sha256}",
    summary="Give an upload up",
    operation_id="delete_upload",
    status_code=204,
    responses=documented(*_ACCESS),
)
def delete_upload(depot: DepotDependency, _caller: Admin, sha256: Sha256) -> None:
    """Forget an upload and its parts. What was completed stays."""
    uploads.abandon(depot.engine, depot.store, sha256)


def _document(known: uploads.Progress) -> UploadDocument:
    if isinstance(known, uploads.Stored):
        return UploadDocument(sha256=known.sha256, size=known.size, state="stored", missing=[])
    return UploadDocument(
        sha256=known.sha256, size=known.size, state="receiving", missing=list(known.missing)
    )


def _digest(header: str | None) -> str | None:
    """Return the SHA-256 of a Content-Digest in hexadecimal, None without one. Raise RequestInvalid."""
    if header is None:
        return None
    match = _DIGEST.search(header)
    try:
        digest = base64.b64decode(match[1], validate=True) if match else b""
    except binascii.Error:
        digest = b""
    if len(digest) != 32:
        raise RequestInvalid(
            "the Content-Digest has no SHA-256",
            where="Content-Digest",
            expected="sha-256=:BASE64:",
            found=header[:200],
        )
    return digest.hex()
