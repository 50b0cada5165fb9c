"""Warmups: an order to fill the store, then to bring nodes to a bundle in waves. State machine over rows.

Any server may drive a warmup: each step is one transaction that looks at the rows as they are, so a driver
that dies loses nothing and two drivers do nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import uuid4

from sqlalchemy import Engine, func, update
from sqlmodel import Session, col, select

from kernel_depot.catalog import changes, queries, record
from kernel_depot.catalog.bundles import known_revisions
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import Job, Node, Warmup, WarmupNode
from kernel_depot.errors import DepotError
from kernel_depot.fleet import nodes
from kernel_depot.fleet.desired import resolve_for, wanted_of
from kernel_depot.fleet.errors import WarmupEmpty, WarmupEnded, WarmupUnknown
from kernel_depot.pins.pin import PinSet

ENDED: Final = ("succeeded", "failed", "cancelled")
OPEN: Final = ("filling", "warming")
_GRACE: Final = 10
"""Nodes that must have ended before the share of failed ones can pause a warmup."""

_SILENT: Final = timedelta(seconds=180)
"""How long a told node may not be heard of before its place in the wave goes to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupOrder:
    """What to warm, where, and how carefully. `failure_share` of the ended nodes pauses it."""

    revisions: tuple[str, ...]
    labels: Mapping[str, str]
    max_parallel: int
    deadline_seconds: float | None
    failure_share: float
    reaches_nodes: bool = True


@dataclass(frozen=True, slots=True)
class WarmupFacts:
    """A warmup with its nodes."""

    warmup: Warmup
    nodes: tuple[WarmupNode, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many nodes are in each state."""
        return dict(Counter(node.state for node in self.nodes))


def create(engine: Engine, order: WarmupOrder, *, job: str | None, asked_by: str) -> str:
    """Record a warmup of the nodes that match now; return its id. `job` fills the store first.

    Raise RevisionUnknown, WarmupEmpty.
    """
    warmup_id = str(uuid4())
    moment = record.now()
    with writing(engine) as session:
        known_revisions(session, order.revisions)
        listed = nodes.listed(session, order.labels) if order.reaches_nodes else []
        if not listed and (order.labels or job is None):
            raise WarmupEmpty(
                "no node has these labels",
                where="nodes",
                found=dict(order.labels),
                remedy="see GET /v1/nodes for the labels there are",
            )
        deadline = order.deadline_seconds
        session.add(
            Warmup(
                id=warmup_id,
                revisions=list(order.revisions),
                job=job,
                labels=dict(order.labels),
                max_parallel=order.max_parallel,
                failure_share=order.failure_share,
                deadline=moment + timedelta(seconds=deadline) if deadline is not None else None,
                state="filling",
                asked_by=asked_by,
                created_at=moment,
                updated_at=moment,
            )
        )
        session.flush()
        for node in listed:
            session.add(WarmupNode(warmup=warmup_id, node=node.name, state="waiting", bytes=0, seconds=0.0))
        changes.audit(
            session,
            who=asked_by,
            action="warmup-begun",
            subject=warmup_id,
            facts={"revisions": list(order.revisions), "nodes": len(listed), "labels": dict(order.labels)},
        )
    return warmup_id


def facts(session: Session, warmup_id: str) -> WarmupFacts:
    """Return a warmup with its nodes. Raise WarmupUnknown."""
    warmup = session.get(Warmup, warmup_id)
    if warmup is None:
        raise WarmupUnknown(
            f"there is no warmup {warmup_id!r}",
            where="warmups",
            found=warmup_id,
            remedy="see GET /v1/warmups",
        )
    rows = session.exec(
        select(WarmupNode).where(WarmupNode.warmup == warmup_id).order_by(col(WarmupNode.node))
    ).all()
    return WarmupFacts(warmup, tuple(rows))


def latest(session: Session, *, limit: int) -> list[Warmup]:
    """Return the latest warmups, newest first."""
    return list(session.exec(select(Warmup).order_by(col(Warmup.created_at).desc()).limit(limit)))


def open_ids(session: Session) -> list[str]:
    """Return the warmups that want driving."""
    return list(session.exec(select(Warmup.id).where(col(Warmup.state).in_(OPEN))))


def step(engine: Engine, warmup_id: str) -> bool:
    """Drive a warmup as far as it goes now; False when it wants no more driving."""
    with reading(engine) as session:
        known = facts(session, warmup_id)
        if known.warmup.state not in OPEN:
            return False
        job = session.get(Job, known.warmup.job) if known.warmup.job is not None else None
    if known.warmup.deadline is not None and record.now() > known.warmup.deadline:
        _expire(engine, known)
        return False
    if known.warmup.state == "filling":
        if job is not None and job.state not in ("succeeded", "failed"):
            return True
        if job is not None and job.state == "failed":
            detail = (job.problem or {}).get("detail", "its job failed")
            _end(engine, warmup_id, state="failed", why=f"the store was not filled: {detail}")
            return False
        _aim(engine, known)
    return _wave(engine, warmup_id)


def _aim(engine: Engine, known: WarmupFacts) -> None:
    """Find each node's bundle of the warmed revisions, once the store has all of them."""
    with reading(engine) as session:
        sets = _sets(session, known.warmup.revisions)
        aims: dict[str, tuple[str | None, dict[str, Any] | None]] = {}
        answers: dict[Any, tuple[str | None, dict[str, Any] | None]] = {}
        for row in known.nodes:
            node = session.get(Node, row.node)
            if node is None:
                continue
            wanted = wanted_of(node)
            key = (wanted.platform, wanted.modules, wanted.groups)
            if key not in answers:
                try:
                    answers[key] = (resolve_for(session, sets, wanted).digest, None)
                except DepotError as error:
                    answers[key] = (None, error.problem())
            aims[row.node] = answers[key]
    with writing(engine) as session:
        moment = record.now()
        for name, (digest, problem) in aims.items():
            values: dict[str, Any] = {"bundle": digest}
            if digest is None:
                values |= {"state": "failed", "problem": problem, "ended_at": moment}
            session.connection().execute(
                update(WarmupNode)
                .where(
                    col(WarmupNode.warmup) == known.warmup.id,
                    col(WarmupNode.node) == name,
                    col(WarmupNode.state) == "waiting",
                )
                .values(**values)
            )
        session.connection().execute(
            update(Warmup)
            .where(col(Warmup.id) == known.warmup.id, col(Warmup.state) == "filling")
            .values(state="warming", updated_at=moment)
        )


def _sets(session: Session, revisions: Sequence[str]) -> list[PinSet]:
    """Return what nodes would have: the warmed revisions in place of the current ones of their names."""
    warmed = {pin_set.name: pin_set for pin_set in known_revisions(session, revisions)}
    others = [pin_set for pin_set in queries.current_pin_sets(session) if pin_set.name not in warmed]
    return [*others, *warmed.values()]


def _wave(engine: Engine, warmup_id: str) -> bool:
    """Tell as many waiting nodes as may be at work at once, or end what has no more."""
    with writing(engine) as session:
        warmup = session.get(Warmup, warmup_id, with_for_update=True)
        if warmup is None or warmup.state != "warming":
            return False
        grouped: Any = session.exec(
            select(WarmupNode.state, func.count())
            .where(WarmupNode.warmup == warmup_id)
            .group_by(col(WarmupNode.state))
        )
        counts: dict[str, int] = dict(grouped.all())
        ended = counts.get("done", 0) + counts.get("failed", 0)
        if not counts.get("waiting") and not counts.get("told"):
            failed = counts.get("failed", 0)
            why = f"{failed} of {ended} nodes failed" if failed else None
            _set_state(session, warmup, "failed" if failed else "succeeded", why=why)
            return False
        if ended >= _GRACE and counts.get("failed", 0) > warmup.failure_share * ended:
            why = f"{counts['failed']} of {ended} nodes failed, more than {warmup.failure_share:.0%}"
            _set_state(session, warmup, "paused", why=why)
            return False
        at_work = session.exec(
            select(func.count())
            .select_from(WarmupNode)
            .join(Node, col(Node.name) == col(WarmupNode.node))
            .where(
                WarmupNode.warmup == warmup_id,
                WarmupNode.state == "told",
                col(Node.heard_at) > record.now() - _SILENT,
            )
        ).one()
        free = warmup.max_parallel - at_work
        if free > 0 and counts.get("waiting"):
            names = session.exec(
                select(WarmupNode.node)
                .where(WarmupNode.warmup == warmup_id, WarmupNode.state == "waiting")
                .order_by(col(WarmupNode.node))
                .limit(free)
            ).all()
            session.connection().execute(
                update(WarmupNode)
                .where(col(WarmupNode.warmup) == warmup_id, col(WarmupNode.node).in_(names))
                .values(state="told", told_at=record.now())
            )
            warmup.updated_at = record.now()
            changes.touch_fleet(session)
    return True


def reported(
    session: Session,
    warmup_id: str,
    node: str,
    *,
    bytes_fetched: int,
    seconds: float,
    smoke: Mapping[str, int] | None,
    problem: Mapping[str, Any] | None,
) -> None:
    """Record how a node of a warmup ended; what was recorded before stays."""
    done = session.connection().execute(
        update(WarmupNode)
        .where(
            col(WarmupNode.warmup) == warmup_id,
            col(WarmupNode.node) == node,
            col(WarmupNode.state).in_(("told", "waiting")),
        )
        .values(
            state="failed" if problem is not None else "done",
            bytes=bytes_fetched,
            seconds=seconds,
            smoke=dict(smoke) if smoke is not None else None,
            problem=dict(problem) if problem is not None else None,
            ended_at=record.now(),
        )
    )
    if done.rowcount:
        session.connection().execute(
            update(Warmup).where(col(Warmup.id) == warmup_id).values(updated_at=record.now())
        )


def cancel(engine: Engine, warmup_id: str, *, who: str) -> None:
    """Tell no more nodes. Raise WarmupUnknown, WarmupEnded."""
    _order(engine, warmup_id, who=who, state="cancelled", action="warmup-cancelled", of=(*OPEN, "paused"))


def pause(engine: Engine, warmup_id: str, *, who: str) -> None:
    """Tell no more nodes until it is resumed. Raise WarmupUnknown, WarmupEnded."""
    _order(engine, warmup_id, who=who, state="paused", action="warmup-paused", of=OPEN)


def resume(engine: Engine, warmup_id: str, *, who: str) -> None:
    """Go on with a paused or cancelled warmup. Raise WarmupUnknown, WarmupEnded."""
    _order(engine, warmup_id, who=who, state="filling", action="warmup-resumed", of=("paused", "cancelled"))


def retry_failed(engine: Engine, warmup_id: str, *, who: str) -> int:
    """Let the nodes that failed try again; return how many. Raise WarmupUnknown, WarmupEnded."""
    with writing(engine) as session:
        known = facts(session, warmup_id)
        failed = [node.node for node in known.nodes if node.state in ("failed", "unseen")]
        if known.warmup.state in OPEN or not failed:
            raise WarmupEnded(
                "no node of the warmup failed" if not failed else "the warmup is still under way",
                where=f"warmups/{warmup_id}",
                expected="a warmup that ended or is paused, with failed nodes",
                found=known.warmup.state,
            )
        session.connection().execute(
            update(WarmupNode)
            .where(col(WarmupNode.warmup) == warmup_id, col(WarmupNode.state).in_(("failed", "unseen")))
            .values(state="waiting", problem=None, ended_at=None)
        )
        _set_state(session, known.warmup, "filling", why=None)
        changes.audit(
            session, who=who, action="warmup-retried", subject=warmup_id, facts={"nodes": len(failed)}
        )
    return len(failed)


def refill(engine: Engine, warmup_id: str, *, job: str) -> None:
    """Let another job fill the store for a warmup, in place of one that failed. Raise WarmupUnknown."""
    with writing(engine) as session:
        facts(session, warmup_id).warmup.job = job


def _order(engine: Engine, warmup_id: str, *, who: str, state: str, action: str, of: Sequence[str]) -> None:
    with writing(engine) as session:
        warmup = facts(session, warmup_id).warmup
        if warmup.state not in of:
            raise WarmupEnded(
                f"the warmup is {warmup.state}",
                where=f"warmups/{warmup_id}",
                expected=" or ".join(of),
                found=warmup.state,
            )
        if state == "filling":  # nodes that were told before it stopped are told again
            session.connection().execute(
                update(WarmupNode)
                .where(col(WarmupNode.warmup) == warmup_id, col(WarmupNode.state) == "told")
                .values(state="waiting")
            )
        _set_state(session, warmup, state, why=None)
        changes.audit(session, who=who, action=action, subject=warmup_id)


def _expire(engine: Engine, known: WarmupFacts) -> None:
    """End a warmup whose time is over: nodes not heard of since it began are `unseen`, others have failed."""
    problem = WarmupEnded(
        "the deadline passed before the node was done",
        where=f"warmups/{known.warmup.id}",
        expected=known.warmup.deadline.isoformat() if known.warmup.deadline is not None else None,
        remedy="retry the failed nodes, or warm again with a later deadline",
    ).problem()
    left = ("waiting", "told")
    with writing(engine) as session:
        silent = select(Node.name).where(col(Node.heard_at) < known.warmup.created_at)
        for state, who in (("unseen", col(WarmupNode.node).in_(silent)), ("failed", None)):
            statement = update(WarmupNode).where(
                col(WarmupNode.warmup) == known.warmup.id, col(WarmupNode.state).in_(left)
            )
            session.connection().execute(
                (statement.where(who) if who is not None else statement).values(
                    state=state, problem=problem, ended_at=record.now()
                )
            )
        warmup = facts(session, known.warmup.id).warmup
        if warmup.state in OPEN:
            _set_state(session, warmup, "failed", why="the deadline passed")


def _end(engine: Engine, warmup_id: str, *, state: str, why: str) -> None:
    with writing(engine) as session:
        warmup = facts(session, warmup_id).warmup
        if warmup.state in OPEN:
            _set_state(session, warmup, state, why=why)


def _set_state(session: Session, warmup: Warmup, state: str, *, why: str | None) -> None:
    moment: datetime = record.now()
    warmup.state = state
    warmup.why = why
    warmup.updated_at = moment
    warmup.finished_at = moment if state in ENDED else None
    if state == "filling":
        warmup.deadline = (
            None if warmup.deadline is None else max(warmup.deadline, moment + timedelta(minutes=1))
        )
    session.add(warmup)
    session.flush()
    changes.touch_fleet(session)
