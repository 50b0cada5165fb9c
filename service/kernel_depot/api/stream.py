"""Many small blobs in one answer: a request each would cost more than the bytes do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.responses import Response

from kernel_depot.api.auth import Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.blobs import EXAMPLE, BlobUnknown
from kernel_depot.api.caching import NotAcceptable, choose_form
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import BodyTooLarge, RequestInvalid, documented
from kernel_depot.api.sending import IteratedBody, Piece, SizedResponse
from kernel_depot.api.tarstream import (
    LARGEST,
    Entry,
    plain_length,
    plain_stream,
    zstd_length,
    zstd_stream,
)
from kernel_depot.catalog import queries
from kernel_depot.catalog.database import reading
from kernel_depot.store.blobs import Form, Store

MAX_BLOBS = 16_384
MEDIA_TYPE = "application/x-tar"
Hex = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class StreamRequest(BaseModel):
    """Which blobs to send, in which order."""

    model_config = ConfigDict(extra="forbid")

    sha256: list[Hex] = Field(
        min_length=1,
        max_length=MAX_BLOBS,
        description=f"The digests, in the order to send; at most {MAX_BLOBS}.",
        examples=[[EXAMPLE]],
    )
    accept: list[Literal["zstd", "identity"]] = Field(
        default=["zstd", "identity"],
        description="The forms the client can take; `zstd` also needs `Accept-Encoding: zstd`.",
    )


router = APIRouter(prefix="/v1/blobs", tags=["blobs"])


@router.post(
    "/stream",
    summary="Get many blobs as one tar stream",
    operation_id="stream_blobs",
    response_class=Response,
    responses={
        **documented(
            RequestInvalid,
            TokenMissing,
            TokenRefused,
            ScopeInsufficient,
            BlobUnknown,
            NotAcceptable,
            BodyTooLarge,
        ),
        200: {
            "description": "A tar archive of exactly `Content-Length` bytes.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        },
    },
)
def stream_blobs(
    request: Request,
    depot: DepotDependency,
    _caller: Reader,
    wanted: Annotated[StreamRequest, Body()],
) -> Response:
    """Send blobs as members `sha256/<hex>` of one ustar archive, in the order asked for.

    With `Accept-Encoding: zstd` the answer is a chain of zstd frames, in which blobs that are kept
    compressed travel so. Unknown digests are refused before anything is sent. A blob that turns out
    damaged on the way cuts the connection short of `Content-Length`: check each member's digest.
    """
    with reading(depot.engine) as session:
        rows = {row.sha256: row for row in queries.blobs(session, wanted.sha256)}
    unknown = [sha256 for sha256 in dict.fromkeys(wanted.sha256) if sha256 not in rows]
    if unknown:
        raise BlobUnknown(
            f"this depot has not {len(unknown)} of the {len(wanted.sha256)} blobs asked for",
            where="sha256",
            found=unknown[:100],
            remedy="resolve the bundle again",
        )
    large = [sha256 for sha256, row in rows.items() if row.size > LARGEST]
    if large:
        raise RequestInvalid(
            "a tar member holds less than 8 GiB", where="sha256", found=large, remedy="get them by themselves"
        )
    accepted = request.headers.get("accept-encoding")
    form = choose_form(accepted, zstd_kept="zstd" in wanted.accept)
    if form is Form.ZSTD:
        entries = [
            Entry(sha256, row.size, row.zstd_size if row.zstd_state == "made" else None)
            for sha256 in wanted.sha256
            for row in (rows[sha256],)
        ]
        pieces, length = zstd_stream(entries, _Stored(depot.store)), zstd_length(entries)
    else:
        entries = [Entry(sha256, rows[sha256].size) for sha256 in wanted.sha256]
        pieces, length = plain_stream(entries, _Stored(depot.store)), plain_length(entries)
    headers = {"cache-control": "no-store", "vary": "accept-encoding"}
    if form is Form.ZSTD:
        headers["content-encoding"] = form.value
    return SizedResponse(IteratedBody(pieces), length=length, media_type=MEDIA_TYPE, headers=headers)


class _Stored:
    """Reads entries from the store in the form each says."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def path(self, entry: Entry) -> Path | None:
        return self._store.path(entry.sha256, form=_form(entry))

    def read(self, entry: Entry) -> Iterator[Piece]:
        return self._store.read(entry.sha256, form=_form(entry))


def _form(entry: Entry) -> Form:
    return Form.IDENTITY if entry.zstd_size is None else Form.ZSTD
