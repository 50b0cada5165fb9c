"""Warmups: bring pinned bytes to the store and to nodes before traffic, and watch how far that is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field
from sqlmodel import Session
from starlette.concurrency import run_in_threadpool

from kernel_depot.api.auth import Admin, Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.jobs import JobDocument, job_document
from kernel_depot.api.nodes import Digest, LabelWord
from kernel_depot.api.problems import BodyTooLarge, ParameterUnknown, RequestInvalid, documented
from kernel_depot.catalog import queries
from kernel_depot.catalog.bundles import PinSetUnknown, RevisionUnknown, known_pin_sets
from kernel_depot.catalog.database import reading
from kernel_depot.catalog.tables import Warmup
from kernel_depot.fleet import warmups
from kernel_depot.fleet.errors import WarmupEmpty, WarmupEnded, WarmupUnknown
from kernel_depot.jobs.depot import Depot
from kernel_depot.jobs.engine import EngineNotRunning, submit_materialize

_EVERY = 1.0
"""Seconds between events."""


class WarmupRequest(BaseModel):
    """What to warm, where, and how carefully."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"pins": ["flashinfer-0.6.3"], "nodes": {"pool": "h200"}, "max_parallel": 8}]
        },
    )

    pins: list[str] | None = Field(
        default=None, max_length=100, description="Pin sets as they are now; all when nothing is named."
    )
    revisions: list[Digest] | None = Field(
        default=None, max_length=100, description="Recorded revisions instead, current or not."
    )
    nodes: dict[LabelWord, LabelWord] | None = Field(
        default=None, max_length=64, description="Only nodes with all these labels; every node when absent."
    )
    store_only: bool = Field(default=False, description="Fill the store, and reach no node.")
    max_parallel: int = Field(default=10, ge=1, le=10_000, description="How many nodes fetch at a time.")
    deadline_seconds: float = Field(
        default=3600.0, gt=0, le=7 * 86400, description="When what is not done has failed."
    )
    failure_share: float = Field(
        default=0.2, ge=0, le=1, description="A larger share of failed nodes, of ten at least, pauses it."
    )


class WarmupNodeDocument(BaseModel):
    """A node of a warmup."""

    node: str
    state: str = Field(description="`waiting`, `told`, `done`, `failed` or `unseen` (never heard of).")
    bundle: str | None
    bytes: int = Field(description="Bytes it fetched.")
    seconds: float
    smoke: dict[str, int] | None = Field(description="How its modules did.")
    problem: dict[str, Any] | None
    told_at: datetime | None
    ended_at: datetime | None


class WarmupSummary(BaseModel):
    """A warmup."""

    id: str
    state: str = Field(
        description="`filling` (the store), `warming` (the nodes), `paused`, `cancelled`, `succeeded` or "
        "`failed`."
    )
    why: str | None = Field(description="Why it is paused or failed.")
    revisions: list[str]
    labels: dict[str, str]
    max_parallel: int
    failure_share: float
    deadline: datetime | None
    asked_by: str
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None


class WarmupDocument(WarmupSummary):
    """A warmup with the store's progress and its nodes."""

    store: JobDocument | None = Field(description="The job that fills the store.")
    counts: dict[str, int] = Field(description="How many nodes are in each state.")
    bytes: int = Field(description="Bytes that its nodes fetched.")
    nodes: list[WarmupNodeDocument]


class WarmupList(BaseModel):
    """The latest warmups, newest first."""

    warmups: list[WarmupSummary]


class Retried(BaseModel):
    """How many nodes try again."""

    nodes: int


router = APIRouter(prefix="/v1/warmups", tags=["fleet"])
_ACCESS = (RequestInvalid, TokenMissing, TokenRefused, ScopeInsufficient)
_ORDER = documented(*_ACCESS, WarmupUnknown, WarmupEnded, EngineNotRunning)
WarmupId = Annotated[str, Path(pattern="^[A-Za-z0-9-]{1,64}$", description="The id that it was given.")]


@router.post(
    "",
    summary="Warm the store and nodes",
    operation_id="create_warmup",
    status_code=202,
    responses={
        202: {"headers": {"Location": {"description": "The warmup.", "schema": {"type": "string"}}}},
        **documented(*_ACCESS, PinSetUnknown, RevisionUnknown, WarmupEmpty, EngineNotRunning, BodyTooLarge),
    },
)
def create_warmup(
    response: Response, depot: DepotDependency, caller: Admin, wanted: Annotated[WarmupRequest, Body()]
) -> WarmupDocument:
    """Fill the store, then let nodes fetch and smoke in waves of `max_parallel`.

    Revisions that are not current are fetched beside what a node uses. One node's failure holds up no other.
    Any server goes on with it.
    """
    if wanted.pins is not None and wanted.revisions is not None:
        raise RequestInvalid("give `pins` or `revisions`, not both", where="revisions")
    with reading(depot.engine) as session:
        if wanted.revisions is not None:
            revisions = tuple(wanted.revisions)
        else:
            revisions = tuple(pin_set.digest for pin_set in known_pin_sets(session, wanted.pins))
    job = submit_materialize(depot, revisions=revisions, asked_by=caller.name)
    order = warmups.WarmupOrder(
        revisions=revisions,
        labels=wanted.nodes or {},
        max_parallel=wanted.max_parallel,
        deadline_seconds=wanted.deadline_seconds,
        failure_share=wanted.failure_share,
        reaches_nodes=not wanted.store_only,
    )
    warmup_id = warmups.create(depot.engine, order, job=job, asked_by=caller.name)
    response.headers["location"] = f"/v1/warmups/{warmup_id}"
    return get_warmup(depot, caller, warmup_id)


@router.get(
    "",
    summary="List warmups",
    operation_id="list_warmups",
    responses=documented(*_ACCESS, ParameterUnknown),
)
def list_warmups(
    depot: DepotDependency,
    _caller: Reader,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many.")] = 100,
) -> WarmupList:
    """List the latest warmups, newest first."""
    with reading(depot.engine) as session:
        return WarmupList(
            warmups=[WarmupSummary(**_summary(row)) for row in warmups.latest(session, limit=limit)]
        )


@router.get(
    "/{warmup_id}",
    summary="See how far a warmup is",
    operation_id="get_warmup",
    responses=documented(*_ACCESS, WarmupUnknown),
)
def get_warmup(depot: DepotDependency, _caller: Reader, warmup_id: WarmupId) -> WarmupDocument:
    """Tell a warmup's state, the store's progress, and every node's bytes, time, smoke and problem."""
    with reading(depot.engine) as session:
        return _document(session, warmup_id)


def _known(depot: DepotDependency, warmup_id: WarmupId) -> str:
    """Raise WarmupUnknown before an answer has begun."""
    with reading(depot.engine) as session:
        warmups.facts(session, warmup_id)
    return warmup_id


@router.get(
    "/{warmup_id}/events",
    summary="Follow a warmup",
    operation_id="follow_warmup",
    response_class=EventSourceResponse,
    responses=documented(*_ACCESS, WarmupUnknown),
)
async def follow_warmup(
    request: Request, depot: DepotDependency, _caller: Reader, warmup_id: Annotated[str, Depends(_known)]
) -> AsyncIterator[ServerSentEvent]:
    """Send the warmup whenever something of it changed, as events named `warmup`; ends when it has ended.

    The id of an event is its number; a follower that comes again gets the present state first.
    """
    seen = ""
    number = 0
    while not await request.is_disconnected():
        document = await run_in_threadpool(_read, depot, warmup_id)
        text = document.model_dump_json()
        if text != seen:
            seen = text
            number += 1
            yield ServerSentEvent(data=document.model_dump(mode="json"), event="warmup", id=str(number))
        if document.state in warmups.ENDED:
            return
        await asyncio.sleep(_EVERY)


@router.post("/{warmup_id}/cancel", summary="Cancel a warmup", operation_id="cancel_warmup", responses=_ORDER)
def cancel_warmup(depot: DepotDependency, caller: Admin, warmup_id: WarmupId) -> WarmupDocument:
    """Tell no more nodes; those at work finish. What was fetched stays."""
    warmups.cancel(depot.engine, warmup_id, who=caller.name)
    return get_warmup(depot, caller, warmup_id)


@router.post("/{warmup_id}/pause", summary="Pause a warmup", operation_id="pause_warmup", responses=_ORDER)
def pause_warmup(depot: DepotDependency, caller: Admin, warmup_id: WarmupId) -> WarmupDocument:
    """Tell no more nodes until it is resumed."""
    warmups.pause(depot.engine, warmup_id, who=caller.name)
    return get_warmup(depot, caller, warmup_id)


@router.post("/{warmup_id}/resume", summary="Resume a warmup", operation_id="resume_warmup", responses=_ORDER)
def resume_warmup(depot: DepotDependency, caller: Admin, warmup_id: WarmupId) -> WarmupDocument:
    """Go on with a paused or cancelled warmup, from where it was."""
    _refill(depot, warmup_id, who=caller.name)
    warmups.resume(depot.engine, warmup_id, who=caller.name)
    return get_warmup(depot, caller, warmup_id)


@router.post(
    "/{warmup_id}/retry-failed",
    summary="Try a warmup's failed nodes again",
    operation_id="retry_warmup",
    responses=_ORDER,
)
def retry_warmup(depot: DepotDependency, caller: Admin, warmup_id: WarmupId) -> Retried:
    """Let the nodes that failed, or were never heard of, try again; the store too if filling it failed."""
    _refill(depot, warmup_id, who=caller.name)
    return Retried(nodes=warmups.retry_failed(depot.engine, warmup_id, who=caller.name))


def _refill(depot: Depot, warmup_id: str, *, who: str) -> None:
    """Hand in another job where the one that filled the store failed."""
    with reading(depot.engine) as session:
        warmup = warmups.facts(session, warmup_id).warmup
        job = queries.job(session, warmup.job) if warmup.job is not None else None
    if job is not None and job.state == "failed":
        again = submit_materialize(depot, revisions=warmup.revisions, asked_by=who)
        warmups.refill(depot.engine, warmup_id, job=again)


def _read(depot: Depot, warmup_id: str) -> WarmupDocument:
    with reading(depot.engine) as session:
        return _document(session, warmup_id)


def _document(session: Session, warmup_id: str) -> WarmupDocument:
    facts = warmups.facts(session, warmup_id)
    job = queries.job(session, facts.warmup.job) if facts.warmup.job is not None else None
    return WarmupDocument(
        **_summary(facts.warmup),
        store=job_document(job) if job is not None else None,
        counts=facts.counts,
        bytes=sum(node.bytes for node in facts.nodes),
        nodes=[
            WarmupNodeDocument(**{name: getattr(node, name) for name in WarmupNodeDocument.model_fields})
            for node in facts.nodes
        ],
    )


def _summary(row: Warmup) -> dict[str, Any]:
    return {name: getattr(row, name) for name in WarmupSummary.model_fields}
