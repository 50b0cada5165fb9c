"""Pin sets: what is pinned now, and new revisions of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from sqlmodel import Session

from kernel_depot.api.auth import Admin, Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.caching import PreconditionFailed
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import (
    BodyTooLarge,
    MediaTypeUnsupported,
    ParameterUnknown,
    RequestInvalid,
    documented,
)
from kernel_depot.catalog import changes, queries, record
from kernel_depot.catalog.bundles import PinSetUnknown, RevisionUnknown
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.queries import RevisionFacts
from kernel_depot.fleet import planning, revisions
from kernel_depot.fleet.errors import CanaryImpossible, RevisionMoved, RevisionNotReady, RollbackImpossible
from kernel_depot.fleet.labels import LABEL
from kernel_depot.jobs.depot import Depot
from kernel_depot.pins.document import parse_pin_set, pin_set_from_json
from kernel_depot.pins.pin import Pin, PinSet
from kernel_depot.pins.problem import PinSetInvalid
from kernel_depot.pins.proposal import propose as propose_change

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
    state: str = Field(
        description="`proposed`, `materialized`, `canary`, `active`, `retired` (active before) or `failed`."
    )
    current: bool = Field(description="Whether the pin set's name means this revision.")
    materialized: bool = Field(description="Whether every wheel of it is in the store.")
    problem: dict[str, Any] | None = Field(description="Why it failed as a canary (RFC 9457).")


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


class CanaryDocument(BaseModel):
    """Which nodes get the revision first, and how many of them must be ready before all get it."""

    model_config = ConfigDict(extra="forbid")

    label: str = Field(pattern=LABEL)
    value: str = Field(pattern=LABEL)
    require: int = Field(default=1, ge=1, le=100_000)


class ChangeRequest(BaseModel):
    """Why a pin set is changed, and what the caller believes it means now."""

    model_config = ConfigDict(extra="forbid")

    expected: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="Refuse unless the name means this revision now; If-Match does the same.",
    )
    why: str | None = Field(default=None, max_length=2000, description="Kept in the audit log.")


class ActivationRequest(ChangeRequest):
    """Which revision a pin set's name is to mean, at once or after canaries."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "revision": "48ad" * 16,
                    "why": "FlashInfer 0.6.4",
                    "canary": {"label": "ring", "value": "canary", "require": 2},
                }
            ]
        },
    )

    revision: str = Field(pattern="^[0-9a-f]{64}$")
    canary: CanaryDocument | None = Field(
        default=None, description="Give it to these nodes first; null gives it to all at once."
    )


class RollbackDocument(BaseModel):
    """From which revision to which a pin set went back."""

    name: str
    before: str
    after: str


class WheelChange(BaseModel):
    """A wheel that comes or goes."""

    project: str
    version: str
    filename: str
    sha256: str
    cuda: str
    arch: str
    sm: str | None
    size: int | None


class ModuleChangeDocument(BaseModel):
    """A kernel module that nodes get (`before` null), lose (`after` null) or get with other bytes."""

    module: str
    before: str | None
    after: str | None


class NodeChangeDocument(BaseModel):
    """What one node would do."""

    node: str
    before: str | None = Field(description="Its bundle now.")
    after: str | None = Field(description="Its bundle then; null: nothing would fit.")
    complete: bool = Field(description="Whether every wheel of that bundle is in the store.")
    bytes: int = Field(description="What it would fetch that its present bundle does not hold.")
    without_code: list[str] = Field(description="Modules that have no code for the node's SM.")
    problem: dict[str, Any] | None


class PlanDocument(BaseModel):
    """The difference that a revision makes."""

    name: str
    before: str | None = Field(description="The current revision.")
    after: str
    state: str
    wheels_added: list[WheelChange]
    wheels_removed: list[WheelChange]
    modules: list[ModuleChangeDocument] = Field(description="On the platforms of the nodes there are.")
    nodes: list[NodeChangeDocument]
    bytes: int = Field(description="What all nodes together would fetch.")


router = APIRouter(prefix="/v1/pins", tags=["pins"])
_ACCESS = (TokenMissing, TokenRefused, ScopeInsufficient)
PinSetName = Annotated[str, Path(pattern=NAME, examples=["flashinfer-0.6.3"])]
IfMatch = Annotated[
    str | None,
    Header(description="The revision's ETag, as GET of the pin set gave it: refuse when it has moved."),
]


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
    response: Response,
    depot: DepotDependency,
    _caller: Reader,
    name: PinSetName,
) -> PinSetDocument:
    """Get the pins of the revision that the name means now, and its text as it was written.

    The ETag is the revision: send it as If-Match with a change, which is then refused if another came first.
    """
    with reading(depot.engine) as session:
        document = _document(session, name)
    if document is None:
        raise PinSetUnknown(
            f"this depot has no pin set {name!r}", where="pins", found=name, remedy="see GET /v1/pins"
        )
    response.headers["etag"] = f'"{document.revision}"'
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
    name: PinSetName,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many.")] = 100,
) -> RevisionList:
    """List what was recorded under the name, the newest first: proposed, current, and from before."""
    with reading(depot.engine) as session:
        rows = queries.revisions(session, name, limit=limit)
        summaries = _summaries(session, name, rows)
    if not rows:
        raise PinSetUnknown(
            f"this depot has no pin set {name!r}", where="pins", found=name, remedy="see GET /v1/pins"
        )
    return RevisionList(name=name, revisions=summaries)


@router.get(
    "/{name}/plan",
    summary="See what a revision would change",
    operation_id="plan_revision",
    responses=documented(RequestInvalid, ParameterUnknown, *_ACCESS, RevisionUnknown),
)
def plan_revision(
    depot: DepotDependency,
    _caller: Reader,
    name: PinSetName,
    revision: Annotated[
        str, Query(pattern="^[0-9a-f]{64}$", description="A recorded revision.", examples=["48ad" * 16])
    ],
) -> PlanDocument:
    """Compare a revision with the current one: wheels, modules by digest, and what each node would do."""
    plan = planning.plan(depot.engine, name, revision)
    with reading(depot.engine) as session:
        row = queries.revision(session, name, revision)
        states = revisions.lives(session, name, [row]) if row is not None else {}
    return PlanDocument(
        name=name,
        before=plan.before,
        after=plan.after,
        state=str(states.get(revision, revisions.Life.PROPOSED)),
        wheels_added=[_wheel(pin) for pin in plan.wheels_added],
        wheels_removed=[_wheel(pin) for pin in plan.wheels_removed],
        modules=[ModuleChangeDocument(**asdict(change)) for change in plan.modules],
        nodes=[NodeChangeDocument(**asdict(change)) for change in plan.nodes],
        bytes=sum(change.bytes for change in plan.nodes),
    )


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
        proposal = propose_change(
            current, new.pins, name=name, origin=origin, allow_file_urls=allow_file_urls
        )
        if record.record_revision(session, proposal.pin_set):
            changes.audit(
                session,
                who=caller.name,
                action="proposed",
                subject=name,
                before=current.digest if current is not None else None,
                after=proposal.pin_set.digest,
            )
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
    responses=documented(
        RequestInvalid,
        *_ACCESS,
        RevisionUnknown,
        RevisionNotReady,
        RevisionMoved,
        CanaryImpossible,
        PreconditionFailed,
        BodyTooLarge,
    ),
)
def activate_revision(
    depot: DepotDependency,
    caller: Admin,
    name: Annotated[str, Path(pattern=NAME, examples=["small"])],
    wanted: Annotated[ActivationRequest, Body()],
    if_match: IfMatch = None,
) -> PinSetDocument:
    """Make a proposed revision, or one from before, the current one. Its wheels must be in the store.

    With `canary` the nodes with that label get it first: once `require` of them have synced it and smoked it
    without a failure it becomes current, and the first failure gives it up. The answer is the pin set as
    it is now.
    """
    with writing(depot.engine) as session:
        if wanted.canary is None:
            with _matching(if_match):
                revisions.activate(
                    session,
                    name,
                    wanted.revision,
                    who=caller.name,
                    why=wanted.why,
                    expected=_expected(if_match, wanted.expected),
                )
        else:
            order = revisions.CanaryOrder(wanted.canary.label, wanted.canary.value, wanted.canary.require)
            with _matching(if_match):
                revisions.begin_canary(
                    session,
                    name,
                    wanted.revision,
                    order,
                    who=caller.name,
                    why=wanted.why,
                    expected=_expected(if_match, wanted.expected),
                )
    with reading(depot.engine) as session:
        document = _document(session, name)
    assert document is not None
    return document


@router.post(
    "/{name}/rollback",
    summary="Go back to the revision before",
    operation_id="rollback_pin_set",
    responses=documented(
        RequestInvalid,
        *_ACCESS,
        PinSetUnknown,
        RevisionUnknown,
        RevisionNotReady,
        RevisionMoved,
        RollbackImpossible,
        PreconditionFailed,
        BodyTooLarge,
    ),
)
def rollback_pin_set(
    depot: DepotDependency,
    caller: Admin,
    name: PinSetName,
    wanted: Annotated[ChangeRequest, Body()],
    if_match: IfMatch = None,
) -> RollbackDocument:
    """Let the name mean what it meant before its present revision, and end a canary under way.

    Nodes that still hold the old bundle's bytes switch back without fetching any.
    """
    with writing(depot.engine) as session, _matching(if_match):
        before, after = revisions.rollback(
            session, name, who=caller.name, why=wanted.why, expected=_expected(if_match, wanted.expected)
        )
    return RollbackDocument(name=name, before=before, after=after)


@router.delete(
    "/{name}/canary",
    summary="End a canary",
    operation_id="end_canary",
    status_code=204,
    responses=documented(RequestInvalid, ParameterUnknown, *_ACCESS, CanaryImpossible),
)
def end_canary(
    depot: DepotDependency,
    caller: Admin,
    name: PinSetName,
    why: Annotated[str | None, Query(max_length=2000, description="Kept in the audit log.")] = None,
) -> None:
    """Give up a canary without a failure: its nodes go back to the current revision."""
    with writing(depot.engine) as session:
        revisions.end_canary(session, name, who=caller.name, why=why)


def _expected(if_match: str | None, said: str | None) -> str | None:
    if if_match is None or if_match.strip() == "*":
        return said
    return if_match.strip().removeprefix("W/").strip('"')


@contextmanager
def _matching(if_match: str | None) -> Iterator[None]:
    """Answer 412 rather than 409 to a caller who sent If-Match (RFC 9110, 13.1.1)."""
    try:
        yield
    except RevisionMoved as error:
        if if_match is None:
            raise
        raise PreconditionFailed(
            error.what, where="If-Match", expected=error.expected, found=error.found, remedy=error.remedy
        ) from error


def _summaries(session: Session, name: str, rows: Sequence[RevisionFacts]) -> list[RevisionSummary]:
    states = revisions.lives(session, name, rows)
    return [
        RevisionSummary(
            **asdict(row),
            state=str(states[row.revision]),
            problem=revisions.failure(session, row.revision)
            if states[row.revision] is revisions.Life.FAILED
            else None,
        )
        for row in rows
    ]


def _wheel(pin: Pin) -> WheelChange:
    absent = dict.fromkeys(WheelChange.model_fields)
    members = {name: value for name, value in pin.to_json().items() if name in absent}
    return WheelChange(**(absent | members))


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
            PreconditionFailed,
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
    propose: Annotated[
        bool, Query(description="Only record the revision; the name goes on meaning what it means.")
    ] = False,
    why: Annotated[str | None, Query(max_length=2000, description="Kept in the audit log.")] = None,
    if_match: IfMatch = None,
) -> PinSetDocument:
    """Record a pin set and make it what its name means. TOML as in `pins/`, or the same tables as JSON.

    All problems of the document are told at once; a document with problems changes nothing. The answer is the
    revision that was posted.
    """
    pin_set = _read(request, body, name=name, origin=f"api: {caller.name}", depot=depot)
    expected = _expected(if_match, None)
    with writing(depot.engine) as session:
        now = queries.pin_set(session, name)
        if expected is not None and (now is None or now.digest != expected):
            raise PreconditionFailed(
                f"the pin set {name!r} means another revision by now",
                where="If-Match",
                expected=expected,
                found=now.digest if now is not None else None,
                remedy="look at the change, and make yours on top of it",
            )
        if propose:
            is_new = record.record_revision(session, pin_set)
            if is_new:
                changes.audit(
                    session,
                    who=caller.name,
                    action="proposed",
                    subject=name,
                    before=now.digest if now is not None else None,
                    after=pin_set.digest,
                    why=why,
                )
        else:
            is_new = record.record_pin_set(session, pin_set, who=caller.name, why=why)
    if not is_new:
        response.status_code = 200
    response.headers["location"] = f"/v1/pins/{name}"
    with reading(depot.engine) as session:
        document = _revision_document(session, pin_set.digest)
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


def _revision_document(session: Session, digest: str) -> PinSetDocument | None:
    pin_set = queries.pin_set_revision(session, digest)
    row = queries.revision(session, pin_set.name, digest) if pin_set is not None else None
    if pin_set is None or row is None:
        return None
    return PinSetDocument(
        name=pin_set.name,
        revision=digest,
        origin=row.origin,
        created_at=row.created_at,
        pins=[_pin(pin) for pin in pin_set.pins],
        text=pin_set.text,
    )


def _pin(pin: Pin) -> PinDocument:
    absent = dict.fromkeys(PinDocument.model_fields)
    return PinDocument(**(absent | pin.to_json()))
