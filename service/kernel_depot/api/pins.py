"""Pin sets: what is pinned now, and new revisions of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, Field
from sqlmodel import Session

from kernel_depot.api.auth import Admin, Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import (
    BodyTooLarge,
    MediaTypeUnsupported,
    ParameterUnknown,
    RequestInvalid,
    documented,
)
from kernel_depot.catalog import queries, record
from kernel_depot.catalog.bundles import PinSetUnknown
from kernel_depot.catalog.database import reading, writing
from kernel_depot.jobs.depot import Depot
from kernel_depot.pins.document import parse_pin_set, pin_set_from_json
from kernel_depot.pins.pin import Pin, PinSet
from kernel_depot.pins.problem import PinSetInvalid

TOML_TYPES = ("application/toml", "text/x-toml")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
EXAMPLE_WHEEL = "apache_tvm_ffi-0.1.3-cp310-cp310-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
EXAMPLE = f"""\
[apache_tvm_ffi.cu130.x86_64]
filename = "{EXAMPLE_WHEEL}"
sha256 = "48ad3df2224f1b0943344895c6cba2f3f0a53bc67ddafdd3e9d7a34f56100aa9"
index = "pypi"
"""

EXAMPLE_JSON = {
    "apache_tvm_ffi": {
        "cu130": {
            "x86_64": {
                "filename": EXAMPLE_WHEEL,
                "sha256": "48ad3df2224f1b0943344895c6cba2f3f0a53bc67ddafdd3e9d7a34f56100aa9",
                "index": "pypi",
            }
        }
    }
}


class PinSetSummary(BaseModel):
    """A pin set and the revision its name means now."""

    name: str
    revision: str = Field(description="The SHA-256 of the pins in canonical form.")
    origin: str = Field(description="Where the text came from.")
    created_at: datetime


class PinSetList(BaseModel):
    """All pin sets."""

    pin_sets: list[PinSetSummary]


class PinDocument(BaseModel):
    """One pinned wheel."""

    project: str
    version: str
    filename: str
    sha256: str
    cuda: str
    arch: str
    sm: str | None
    url: str | None
    index: str | None
    store: bool | None = Field(description="True for a wheel that was uploaded to this depot.")
    size: int | None
    record_sha256: str | None


class PinSetDocument(PinSetSummary):
    """A pin set with its pins and its text as it was written."""

    pins: list[PinDocument]
    text: str


router = APIRouter(prefix="/v1/pins", tags=["pins"])
_ACCESS = (TokenMissing, TokenRefused, ScopeInsufficient)


@router.get("", summary="List the pin sets", operation_id="list_pin_sets", responses=documented(*_ACCESS))
def list_pin_sets(depot: DepotDependency, _caller: Reader) -> PinSetList:
    """List every pin set with the revision that its name means now."""
    with reading(depot.engine) as session:
        return PinSetList(pin_sets=[PinSetSummary(**asdict(row)) for row in queries.pin_sets(session)])


@router.get(
    "/{name}",
    summary="Get a pin set",
    operation_id="get_pin_set",
    responses=documented(RequestInvalid, *_ACCESS, PinSetUnknown),
)
def get_pin_set(
    depot: DepotDependency,
    _caller: Reader,
    name: Annotated[str, Path(pattern=NAME, examples=["flashinfer-0.6.3"])],
) -> PinSetDocument:
    """Get the pins of the revision that the name means now, and its text as it was written."""
    with reading(depot.engine) as session:
        document = _document(session, name)
    if document is None:
        raise PinSetUnknown(
            f"this depot has no pin set {name!r}", where="pins", found=name, remedy="see GET /v1/pins"
        )
    return document


async def _body(request: Request) -> bytes:
    return await request.body()


@router.post(
    "",
    summary="Pin: record a revision of a pin set",
    operation_id="post_pin_set",
    status_code=201,
    responses={
        **documented(
            RequestInvalid,
            ParameterUnknown,
            *_ACCESS,
            PinSetInvalid,
            MediaTypeUnsupported,
            BodyTooLarge,
        ),
        200: {"model": PinSetDocument, "description": "This revision was current already."},
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/toml": {"schema": {"type": "string"}, "example": EXAMPLE},
                "application/json": {
                    "schema": {"type": "object"},
                    "example": EXAMPLE_JSON,
                },
            },
        }
    },
)
def post_pin_set(
    request: Request,
    response: Response,
    depot: DepotDependency,
    caller: Admin,
    body: Annotated[bytes, Depends(_body)],
    name: Annotated[
        str, Query(pattern=NAME, description="The pin set's name.", examples=["flashinfer-0.6.3"])
    ],
) -> PinSetDocument:
    """Record a pin set and make it what its name means. TOML as in `pins/`, or the same tables as JSON.

    All problems of the document are told at once; a document with problems changes nothing.
    """
    pin_set = _read(request, body, name=name, origin=f"api: {caller.name}", depot=depot)
    with writing(depot.engine) as session:
        is_new = record.record_pin_set(session, pin_set)
    if not is_new:
        response.status_code = 200
    response.headers["location"] = f"/v1/pins/{name}"
    with reading(depot.engine) as session:
        document = _document(session, name)
    assert document is not None
    return document


def _read(request: Request, body: bytes, *, name: str, origin: str, depot: Depot) -> PinSet:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in (*TOML_TYPES, "application/json"):
        raise MediaTypeUnsupported(
            "a pin set is TOML or JSON",
            where="Content-Type",
            expected=", ".join((*TOML_TYPES, "application/json")),
            found=media_type or "no Content-Type",
        )
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RequestInvalid(
            "the body is not UTF-8", where="body", found=f"byte {error.start}: {error.reason}"
        ) from error
    allow_file_urls = depot.settings.allow_file_urls
    if media_type != "application/json":
        return parse_pin_set(text, name=name, origin=origin, allow_file_urls=allow_file_urls)
    try:
        document = json.loads(text)
        if b"\\u0000" in json.dumps(document, ensure_ascii=False).encode():
            raise ValueError("it holds a NUL character")
    except (ValueError, RecursionError) as error:  # UnicodeEncodeError, of lone surrogates, is a ValueError
        raise RequestInvalid(f"the body is not JSON: {error}", where="body") from error
    return pin_set_from_json(document, name=name, origin=origin, allow_file_urls=allow_file_urls)


def _document(session: Session, name: str) -> PinSetDocument | None:
    pin_set = queries.pin_set(session, name)
    if pin_set is None:
        return None
    (facts,) = [facts for facts in queries.pin_sets(session) if facts.name == name]
    return PinSetDocument(**asdict(facts), pins=[_pin(pin) for pin in pin_set.pins], text=pin_set.text)


def _pin(pin: Pin) -> PinDocument:
    absent = dict.fromkeys(PinDocument.model_fields)
    return PinDocument(**(absent | pin.to_json()))
