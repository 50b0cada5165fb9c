"""Nodes: they register, ask what they are to have, report, and bring their smoke results."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from kernel_depot.api.auth import Admin, Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.auth import Node as NodeCaller
from kernel_depot.api.blobs import not_modified_response
from kernel_depot.api.caching import not_modified
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import BodyTooLarge, ParameterUnknown, RequestInvalid, documented
from kernel_depot.catalog import changes
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import Node, SmokeResult
from kernel_depot.fleet import canaries, nodes, warmups
from kernel_depot.fleet.errors import LabelInvalid, NodeUnknown, WarmupUnknown
from kernel_depot.fleet.labels import LABEL, parse_labels
from kernel_depot.fleet.nodes import BAD_OUTCOMES, ModuleOutcome, NodeState, Registration, StateReport
from kernel_depot.fleet.watch import Watch
from kernel_depot.platform import Arch, CudaTag, Platform, PlatformError, Sm

NODE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"
Digest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
Word = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00]*$")]
Text = Annotated[str, StringConstraints(max_length=4000, pattern=r"^[^\x00]*$")]
LabelWord = Annotated[str, StringConstraints(pattern=LABEL)]
NodeName = Annotated[str, Path(pattern=NODE_NAME, examples=["gpu-017"])]
LabelFilter = Annotated[
    list[str] | None,
    Query(description="Only nodes with these labels: NAME=VALUE.", examples=[["pool=h200"]]),
]

SPREAD_HEADER = "kernel-depot-spread"
MOST_WAIT = 30.0
"""Seconds for which a node may wait for something new."""


class RegistrationDocument(BaseModel):
    """What a node says of itself."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "cuda": "cu130",
                    "arch": "x86_64",
                    "sm": "sm90a",
                    "labels": {"pool": "h200"},
                    "gpus": ["NVIDIA H200"],
                    "driver": "580.159.04",
                    "glibc": "2.39",
                    "capacity_bytes": 64000000000,
                    "product": "0.1.0",
                }
            ]
        },
    )

    cuda: str = Field(max_length=20)
    arch: str = Field(max_length=20)
    sm: str | None = Field(default=None, max_length=20)
    labels: dict[LabelWord, LabelWord] = Field(default_factory=dict, max_length=64)
    gpus: list[Word] = Field(default_factory=list, max_length=64)
    driver: Word | None = None
    glibc: Word | None = None
    capacity_bytes: int | None = Field(default=None, ge=0, le=2**62, description="What its cache may take.")
    product: Word = Field(description="The agent's version.")
    modules: list[Word] | None = Field(
        default=None, max_length=5000, description="Only these kernel modules; all when absent."
    )
    groups: list[Word] = Field(default_factory=list, max_length=64, description="Module groups it asks for.")


class StateDocument(BaseModel):
    """What a node tells of its state; also its heartbeat."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"state": "ready", "bundle": "5d" * 32, "bytes": 1234567, "seconds": 2.5}]
        },
    )

    state: NodeState
    bundle: Digest | None = Field(default=None, description="The bundle that it is about.")
    bytes: int = Field(default=0, ge=0, le=2**62, description="Bytes fetched for it.")
    seconds: float = Field(default=0.0, ge=0, le=1e9, allow_inf_nan=False)
    problem: dict[str, Any] | None = Field(default=None, description="What failed (RFC 9457).")
    warmup: Word | None = Field(default=None, description="The warmup that asked for the bundle.")


class SmokeResultDocument(BaseModel):
    """How one module did."""

    model_config = ConfigDict(extra="forbid")

    module: Word
    sha256: Digest
    outcome: Annotated[str, StringConstraints(pattern="^(pass|fail|skipped|crashed|refused)$")]
    why: Text = ""
    expected: Text | None = None
    found: Text | None = None
    seconds: float = Field(default=0.0, ge=0, le=1e9, allow_inf_nan=False)


class SmokeReportDocument(BaseModel):
    """How the modules of a bundle did on a node."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "bundle": "5d" * 32,
                    "gpu": "NVIDIA H200",
                    "driver": "580.159.04",
                    "results": [{"module": "norm", "sha256": "a1" * 32, "outcome": "pass", "seconds": 1.2}],
                }
            ]
        },
    )

    bundle: Digest
    gpu: Word | None = None
    driver: Word | None = None
    results: list[SmokeResultDocument] = Field(max_length=5000)


class NodeDocument(BaseModel):
    """A node as the depot knows it."""

    name: str
    labels: dict[str, str]
    cuda: str
    arch: str
    sm: str | None
    gpus: list[str]
    driver: str | None
    glibc: str | None
    capacity_bytes: int | None
    product: str
    modules: list[str] | None
    groups: list[str]
    registered_at: datetime
    heard_at: datetime = Field(description="When it last asked or told something.")
    silent_seconds: float = Field(description="How long ago that was.")
    state: str = Field(description="`registered`, `idle`, `syncing`, `smoking`, `ready` or `failed`.")
    bundle: str | None = Field(description="What is synced and smoked on it.")
    bytes: int = Field(description="Bytes it fetched for that.")
    seconds: float
    problem: dict[str, Any] | None
    reported_at: datetime | None


class NodeList(BaseModel):
    """Nodes by name."""

    nodes: list[NodeDocument]


class SmokeDocument(SmokeResultDocument):
    """A smoke result that is kept: the last of these bytes on that node under that driver."""

    node: str
    driver: str
    gpu: str | None
    bundle: str
    at: datetime


class NodeDetails(BaseModel):
    """A node, what it is to have, and how its modules did."""

    node: NodeDocument
    desired: dict[str, Any]
    smoke: list[SmokeDocument]


class PrefetchDocument(BaseModel):
    """Bytes that a warmup wants on the node."""

    warmup: str
    bundle: str


class PinSetRefDocument(BaseModel):
    """A revision that the bundle comes from."""

    name: str
    revision: str


class DesiredDocument(BaseModel):
    """What a node is to have."""

    bundle: str | None = Field(description="Null when nothing fits; `problem` says why.")
    pin_sets: list[PinSetRefDocument]
    canary_of: list[str] = Field(description="The pin sets of which the node tries the next revision.")
    complete: bool = Field(description="Whether every pinned wheel of it is in the store.")
    problem: dict[str, Any] | None
    prefetch: list[PrefetchDocument]


class SmokeCounts(BaseModel):
    """What was kept."""

    kept: int
    bad: int = Field(description="How many of them speak against a module.")


router = APIRouter(prefix="/v1/nodes", tags=["fleet"])
_ACCESS = (RequestInvalid, TokenMissing, TokenRefused, ScopeInsufficient)


def watch_of(request: Request) -> Watch:
    """Return this application's view of the fleet."""
    watch: Watch = request.app.state.watch
    return watch


@router.put(
    "/{name}",
    summary="Register a node",
    operation_id="register_node",
    responses=documented(*_ACCESS, PlatformError, BodyTooLarge),
)
def register_node(
    request: Request,
    depot: DepotDependency,
    caller: NodeCaller,
    name: NodeName,
    said: Annotated[RegistrationDocument, Body()],
) -> NodeDocument:
    """Tell what a node is. Again at any time: what is new replaces what was said before."""
    platform = Platform(
        CudaTag.parse(said.cuda),
        Arch.parse(said.arch),
        Sm.parse(said.sm) if said.sm is not None else None,
    )
    registration = Registration(
        platform=platform,
        labels=said.labels,
        gpus=said.gpus,
        driver=said.driver,
        glibc=said.glibc,
        capacity_bytes=said.capacity_bytes,
        product=said.product,
        modules=said.modules,
        groups=said.groups,
    )
    with writing(depot.engine) as session:
        node = nodes.register(session, name, registration, who=caller.name)
        session.refresh(node)
        document = _node(node)
    watch_of(request).forget(name)
    return document


@router.get(
    "/{name}/desired",
    summary="Ask what a node is to have",
    operation_id="get_desired",
    response_model=DesiredDocument,
    responses={
        **documented(*_ACCESS, ParameterUnknown, NodeUnknown),
        304: {"description": "Nothing is new, even after the wait."},
    },
)
async def get_desired(
    request: Request,
    _caller: NodeCaller,
    name: NodeName,
    wait: Annotated[
        float, Query(ge=0, le=MOST_WAIT, description="Seconds to wait for something new, with If-None-Match.")
    ] = 0.0,
) -> Response:
    """Answer at once when the node's ETag is not the present one, else when something changes, or with 304.

    A level, not an event: whatever a node missed, the next answer holds all of it. Where many nodes wait,
    `Kernel-Depot-Spread` says over how many seconds they are to spread what they begin.
    """
    watch = watch_of(request)
    fresh = request.headers.get("cache-control") == "no-cache"
    loop = asyncio.get_running_loop()
    until = loop.time() + wait
    # Whoever waits learns of a change that is not followed yet a moment later.
    outlook = watch.followed() if wait > 0 and not fresh else None
    while True:
        if outlook is None:
            outlook = await run_in_threadpool(watch.outlook)
        wanted = None if fresh else watch.known_facts(name)
        if wanted is None:
            wanted = await run_in_threadpool(watch.facts, name, fresh=fresh)
        answer = outlook.ready_answer(name, wanted)
        if answer is None:
            answer = await run_in_threadpool(outlook.answer, name, wanted)
        headers = {"etag": answer.etag, "cache-control": "no-cache"}
        if not not_modified(request.headers, answer.etag):
            if "if-none-match" in request.headers and watch.spread:
                headers[SPREAD_HEADER] = f"{watch.spread:.1f}"
            return Response(answer.body, media_type="application/json", headers=headers)
        left = until - loop.time()
        if left <= 0 or not await watch.changed(outlook.version, timeout=left):
            return not_modified_response(headers)
        outlook = watch.followed()


@router.post(
    "/{name}/report",
    summary="Report a node's state",
    operation_id="report_node",
    status_code=204,
    responses=documented(*_ACCESS, NodeUnknown, WarmupUnknown, BodyTooLarge),
)
def report_node(
    request: Request,
    depot: DepotDependency,
    _caller: NodeCaller,
    name: NodeName,
    said: Annotated[StateDocument, Body()],
) -> None:
    """Tell what a node is doing, and how a bundle's sync and smoke ended, be it for a warmup."""
    ended = said.state in (NodeState.READY, NodeState.FAILED)
    with writing(depot.engine) as session:
        if said.warmup is None:
            told = StateReport(
                state=said.state,
                bundle=said.bundle,
                bytes=said.bytes,
                seconds=said.seconds,
                problem=said.problem,
            )
            nodes.report(session, name, told)
        else:
            nodes.known(session, name)
            nodes.heard(session, [name])
            warmups.facts(session, said.warmup)
            if ended:
                smoke = nodes.tally(session, name, said.bundle).counts if said.bundle is not None else None
                warmups.reported(
                    session,
                    said.warmup,
                    name,
                    bytes_fetched=said.bytes,
                    seconds=said.seconds,
                    smoke=smoke,
                    problem=said.problem if said.state is NodeState.FAILED else None,
                )
    if ended and said.warmup is None:
        canaries.judge(depot.engine, watch_of(request).outlook(), name)


@router.post(
    "/{name}/smoke",
    summary="Bring a node's smoke results",
    operation_id="post_smoke",
    responses=documented(*_ACCESS, NodeUnknown, BodyTooLarge),
)
def post_smoke(
    request: Request,
    depot: DepotDependency,
    _caller: NodeCaller,
    name: NodeName,
    said: Annotated[SmokeReportDocument, Body()],
) -> SmokeCounts:
    """Keep how modules did: one result for these bytes on this node under this driver, the newest."""
    results = [ModuleOutcome(**result.model_dump()) for result in said.results]
    with writing(depot.engine) as session:
        nodes.record_smoke(
            session, name, bundle=said.bundle, gpu=said.gpu, driver=said.driver, results=results
        )
        nodes.heard(session, [name])
    canaries.judge(depot.engine, watch_of(request).outlook(), name)
    bad = sum(result.outcome in BAD_OUTCOMES for result in results)
    return SmokeCounts(kept=len(results), bad=bad)


@router.get(
    "",
    summary="List the nodes",
    operation_id="list_nodes",
    responses=documented(*_ACCESS, ParameterUnknown, LabelInvalid),
)
def list_nodes(depot: DepotDependency, _caller: Reader, label: LabelFilter = None) -> NodeList:
    """List every node with what it last told."""
    with reading(depot.engine) as session:
        rows = nodes.listed(session, parse_labels(label or (), where="label"))
        return NodeList(nodes=[_node(row) for row in rows])


@router.get(
    "/{name}",
    summary="See a node",
    operation_id="get_node",
    responses=documented(*_ACCESS, NodeUnknown),
)
def get_node(request: Request, depot: DepotDependency, _caller: Reader, name: NodeName) -> NodeDetails:
    """Tell what a node is, what it is to have, and how each module did on it."""
    watch = watch_of(request)
    with reading(depot.engine) as session:
        node = _node(nodes.known(session, name))
        smoke = [smoke_document(row) for row in nodes.smoke_results(session, node=name)]
    desired = watch.outlook().desired(name, watch.facts(name, fresh=True))
    return NodeDetails(node=node, desired=desired.to_json(), smoke=smoke)


@router.delete(
    "/{name}",
    summary="Forget a node",
    operation_id="forget_node",
    status_code=204,
    responses=documented(*_ACCESS, NodeUnknown),
)
def forget_node(request: Request, depot: DepotDependency, caller: Admin, name: NodeName) -> None:
    """Remove a node that is gone for good, with its results. One that is not comes back when it registers."""
    with writing(depot.engine) as session:
        nodes.forget(session, name)
        changes.audit(session, who=caller.name, action="node-forgotten", subject=name)
    watch_of(request).forget(name)


def smoke_document(row: SmokeResult) -> SmokeDocument:
    """Return a kept smoke result as the API tells it."""
    return SmokeDocument(
        module=row.module,
        sha256=row.sha256,
        outcome=row.outcome,
        why=row.why,
        expected=row.expected,
        found=row.found,
        seconds=row.seconds,
        node=row.node,
        driver=row.driver,
        gpu=row.gpu,
        bundle=row.bundle,
        at=row.at,
    )


def _node(row: Node) -> NodeDocument:
    members = {name: getattr(row, name) for name in NodeDocument.model_fields if name != "silent_seconds"}
    silent = (datetime.now(timezone.utc) - row.heard_at).total_seconds()
    return NodeDocument(**members, silent_seconds=round(max(silent, 0.0), 1))
