"""Pin sets: what is pinned now, and new revisions of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from sqlmodel import Session

from kernel_depot.api.auth import Admin, Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import (
    ApiError,
    BodyTooLarge,
    MediaTypeUnsupported,
    ParameterUnknown,
    RequestInvalid,
    documented,
)
from kernel_depot.catalog import queries, record
from kernel_depot.catalog.bundles import PinSetUnknown, RevisionUnknown
from kernel_depot.catalog.database import reading, writing
from kernel_depot.jobs.depot import Depot
from kernel_depot.pins.document import parse_pin_set, pin_set_from_json
from kernel_depot.pins.pin import Pin, PinSet
from kernel_depot.pins.problem import PinSetInvalid
from kernel_depot.pins.proposal import propose

TOML_TYPES = ("application/toml", "text/x-toml")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
EXAMPLE_WHEEL = "apache_tvm_ffi-0.1.3-cp310-cp310-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
EXAMPLE = f"""\
[apache_tvm_ffi.cu130.x86_64]
filename = "{EXAMPLE_WHEEL}"
sha256 = "48ad3df2224f1b0943344895c6cba2f3f0a53bc67ddafdd3e9d7a34f56100aa9"
index = "pypi"
"""

EXAMPLE_JSON: dict[str, JsonValue] = {
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


class RevisionSummary(BaseModel):
    """A revision of a pin set."""

    revision: str
    origin: str
    created_at: datetime
    current: bool = Field(description="Whether the pin set's name means this revision.")
    materialized: bool = Field(description="Whether every wheel of it is in the store.")


class RevisionList(BaseModel):
    """The revisions of a pin set, the newest first."""

    name: str
    revisions: list[RevisionSummary]


class ProposalRequest(BaseModel):
    """Pins to put in the place of those that the set has for the same project, platform and SM."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"pins": EXAMPLE_JSON}]})

    pins: dict[str, Any] = Field(description="The tables of a pin set, as JSON.")


class ProposalDocument(BaseModel):
    """A revision that was recorded, while the pin set's name goes on meaning what it meant."""

    name: str
    revision: str
    based_on: str | None = Field(description="The revision that was changed; null for a new set.")
    replaced: list[PinDocument] = Field(description="The pins that it no longer has.")
    pins: list[PinDocument]
    text: str


class ActivationRequest(BaseModel):
    """Which revision a pin set's name is to mean."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"revision": "48ad" * 16}]})

    revision: str = Field(pattern="^[0-9a-f]{64}$")
    expected: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="Refuse unless the name means this revision now.",
    )


class RevisionNotReady(ApiError):
    """A revision whose wheels are not all in the store."""

    slug = "revision-not-materialized"
    title = "The revision is not materialized"
    status = 409


class RevisionMoved(ApiError):
    """A pin set that means another revision than the caller expected."""

    slug = "revision-moved"
    title = "The pin set was changed meanwhile"
    status = 409


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


@router.get(
    "/{name}/revisions",
    summary="List a pin set's revisions",
    operation_id="list_revisions",
    responses=documented(RequestInvalid, ParameterUnknown, *_ACCESS, PinSetUnknown),
)
def list_revisions(
    depot: DepotDependency,
    _caller: Reader,
    name: Annotated[str, Path(pattern=NAME, examples=["flashinfer-0.6.3"])],
    limit: Annotated[int, Query(ge=1, le=1000, description="How many.")] = 100,
) -> RevisionList:
    """List what was recorded under the name, the newest first: proposed, current, and from before."""
    with reading(depot.engine) as session:
        rows = queries.revisions(session, name, limit=limit)
    if not rows:
        raise PinSetUnknown(
            f"this depot has no pin set {name!r}", where="pins", found=name, remedy="see GET /v1/pins"
        )
    return RevisionList(name=name, revisions=[RevisionSummary(**asdict(row)) for row in rows])


@router.post(
    "/{name}/proposals",
    summary="Propose a revision of a pin set",
    operation_id="propose_revision",
    status_code=201,
    responses=documented(RequestInvalid, *_ACCESS, PinSetInvalid, BodyTooLarge),
)
def propose_revision(
    depot: DepotDependency,
    caller: Admin,
    name: Annotated[str, Path(pattern=NAME, examples=["small"])],
    wanted: Annotated[ProposalRequest, Body()],
) -> ProposalDocument:
    """Record the set as it is with some pins replaced or added. Its name goes on meaning what it means.

    The wheels can be materialized (`revisions` of POST /v1/materialize) before the revision is activated.
    """
    origin = f"proposal: {caller.name}"
    allow_file_urls = depot.settings.allow_file_urls
    new = pin_set_from_json(wanted.pins, name=name, origin=origin, allow_file_urls=allow_file_urls)
    with writing(depot.engine) as session:
        current = queries.pin_set(session, name)
        proposal = propose(current, new.pins, name=name, origin=origin, allow_file_urls=allow_file_urls)
        record.record_revision(session, proposal.pin_set)
    return ProposalDocument(
        name=name,
        revision=proposal.pin_set.digest,
        based_on=current.digest if current is not None else None,
        replaced=[_pin(pin) for pin in proposal.replaced],
        pins=[_pin(pin) for pin in proposal.pin_set.pins],
        text=proposal.pin_set.text,
    )


@router.post(
    "/{name}/activate",
    summary="Let a pin set's name mean a recorded revision",
    operation_id="activate_revision",
    responses=documented(RequestInvalid, *_ACCESS, RevisionUnknown, RevisionNotReady, RevisionMoved),
)
def activate_revision(
    depot: DepotDependency,
    _caller: Admin,
    name: Annotated[str, Path(pattern=NAME, examples=["small"])],
    wanted: Annotated[ActivationRequest, Body()],
) -> PinSetDocument:
    """Make a proposed revision, or one from before, the current one. Its wheels must be in the store."""
    with writing(depot.engine) as session:
        row = queries.revision(session, name, wanted.revision)
        if row is None:
            raise RevisionUnknown(
                f"the pin set {name!r} has no revision {wanted.revision}",
                where=f"pins/{name}",
                found=wanted.revision,
                remedy=f"see GET /v1/pins/{name}/revisions",
            )
        if not row.materialized:
            raise RevisionNotReady(
                "wheels of the revision are not in the store",
                where=f"pins/{name}, revision {wanted.revision}",
                remedy='bring them in first: POST /v1/materialize with {"revisions": ["…"]}',
            )
        now = queries.pin_set(session, name)
        if wanted.expected is not None and (now is None or now.digest != wanted.expected):
            raise RevisionMoved(
                f"the pin set {name!r} means another revision by now",
                where=f"pins/{name}",
                expected=wanted.expected,
                found=now.digest if now is not None else None,
                remedy="propose the change again on top of it",
            )
        record.make_current(session, name, wanted.revision)
    with reading(depot.engine) as session:
        document = _document(session, name)
    assert document is not None
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
