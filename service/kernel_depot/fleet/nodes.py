"""Nodes: what they say of themselves, what they report, how their modules did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from sqlalchemy import delete, update
from sqlmodel import Session, col, select

from kernel_depot.catalog import record
from kernel_depot.catalog.database import upsert
from kernel_depot.catalog.tables import Node, SmokeResult, WarmupNode
from kernel_depot.fleet.errors import NodeUnknown
from kernel_depot.platform import Platform


class NodeState(str, Enum):
    """What a node is doing. `ready`: its desired bundle is synced, and smoked without a failure."""

    IDLE = "idle"
    SYNCING = "syncing"
    SMOKING = "smoking"
    READY = "ready"
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value


BAD_OUTCOMES = frozenset({"fail", "crashed", "refused"})
"""Smoke outcomes that speak against a module; `skipped` does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a node says of itself."""

    platform: Platform
    labels: Mapping[str, str]
    gpus: Sequence[str]
    driver: str | None
    glibc: str | None
    capacity_bytes: int | None
    product: str
    modules: Sequence[str] | None = None
    groups: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """What a node tells of its state: a heartbeat too. `bytes` it fetched for it, in `seconds`."""

    state: NodeState
    bundle: str | None
    bytes: int = 0
    seconds: float = 0.0
    problem: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOutcome:
    """How one module did."""

    module: str
    sha256: str
    outcome: str
    why: str = ""
    expected: str | None = None
    found: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Tally:
    """How the modules of a bundle did on a node."""

    counts: dict[str, int] = field(default_factory=dict)
    worst: SmokeResult | None = None


def register(session: Session, name: str, said: Registration, *, who: str) -> Node:
    """Record a node, or what is new about one. What it reported before is kept."""
    moment = record.now()
    values = {
        "labels": dict(said.labels),
        "cuda": str(said.platform.cuda),
        "arch": str(said.platform.arch),
        "sm": str(said.platform.sm) if said.platform.sm is not None else None,
        "gpus": list(said.gpus),
        "driver": said.driver,
        "glibc": said.glibc,
        "capacity_bytes": said.capacity_bytes,
        "product": said.product,
        "modules": list(said.modules) if said.modules is not None else None,
        "groups": list(said.groups),
        "registered_by": who,
        "registered_at": moment,
        "heard_at": moment,
    }
    statement = upsert(session, Node).values(name=name, state="registered", bytes=0, seconds=0.0, **values)
    session.connection().execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))
    return known(session, name)


def known(session: Session, name: str) -> Node:
    """Return a node. Raise NodeUnknown."""
    node = session.get(Node, name)
    if node is None:
        raise NodeUnknown(
            f"no node {name!r} has registered",
            where="nodes",
            found=name,
            remedy="register it: PUT /v1/nodes/{name}, as `kernel-depot agent` does",
        )
    return node


def report(session: Session, name: str, said: StateReport) -> None:
    """Record what a node tells of its state. Raise NodeUnknown."""
    moment = record.now()
    values: dict[str, Any] = {
        "heard_at": moment,
        "reported_at": moment,
        "state": said.state.value,
        "problem": said.problem,
    }
    if said.state in (NodeState.READY, NodeState.FAILED):
        values |= {"bytes": said.bytes, "seconds": said.seconds}
    if said.state is NodeState.READY:
        values["bundle"] = said.bundle
    done = session.connection().execute(update(Node).where(col(Node.name) == name).values(**values))
    if done.rowcount == 0:
        known(session, name)


def heard(session: Session, names: Sequence[str]) -> None:
    """Record that nodes were heard of now."""
    session.connection().execute(update(Node).where(col(Node.name).in_(names)).values(heard_at=record.now()))


def record_smoke(
    session: Session,
    name: str,
    *,
    bundle: str,
    gpu: str | None,
    driver: str | None,
    results: Sequence[ModuleOutcome],
) -> None:
    """Keep how modules did on a node under a driver, in place of what was known. Raise NodeUnknown."""
    known(session, name)
    moment = record.now()
    # The last of several results for the same bytes stands.
    rows = {
        result.sha256: {
            "node": name,
            "sha256": result.sha256,
            "driver": driver or "",
            "module": result.module,
            "outcome": result.outcome,
            "why": result.why,
            "expected": result.expected,
            "found": result.found,
            "seconds": result.seconds,
            "gpu": gpu,
            "bundle": bundle,
            "at": moment,
        }
        for result in results
    }
    if rows:
        key = ["node", "sha256", "driver"]
        statement = upsert(session, SmokeResult)
        new = {name: statement.excluded[name] for name in next(iter(rows.values())) if name not in key}
        session.connection().execute(
            statement.on_conflict_do_update(index_elements=key, set_=new), list(rows.values())
        )


def tally(session: Session, name: str, bundle: str, *, since: datetime | None = None) -> Tally:
    """Return how the modules did on a node when it last smoked a bundle; `since` leaves out what is older."""
    query = select(SmokeResult).where(SmokeResult.node == name, SmokeResult.bundle == bundle)
    if since is not None:
        query = query.where(col(SmokeResult.at) >= since)
    rows = session.exec(query).all()
    worst = next((row for row in rows if row.outcome in BAD_OUTCOMES), None)
    return Tally(dict(Counter(row.outcome for row in rows)), worst)


def listed(session: Session, labels: Mapping[str, str] | None = None) -> list[Node]:
    """Return the nodes by name, those with all of `labels`."""
    rows = session.exec(select(Node).order_by(col(Node.name))).all()
    wanted = dict(labels or {})
    return [row for row in rows if all(row.labels.get(key) == value for key, value in wanted.items())]


def forget(session: Session, name: str) -> None:
    """Remove a node that is gone for good, with its smoke results. Raise NodeUnknown."""
    node = known(session, name)
    for table in (SmokeResult, WarmupNode):
        session.connection().execute(delete(table).where(col(table.node) == name))
    session.delete(node)
    session.flush()


def smoke_results(session: Session, *, node: str | None = None) -> list[SmokeResult]:
    """Return smoke results, of all nodes or one, by module and node."""
    query = select(SmokeResult)
    if node is not None:
        query = query.where(SmokeResult.node == node)
    return list(session.exec(query.order_by(col(SmokeResult.module), col(SmokeResult.node))))
