"""Judging canaries: enough ready nodes promote a revision, one failed smoke ends it."""

from __future__ import annotations

import logging

from sqlalchemy import Engine

from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import Canary, Node
from kernel_depot.fleet import nodes, revisions
from kernel_depot.fleet.desired import Outlook, wanted_of
from kernel_depot.fleet.errors import SmokeFailed

_log = logging.getLogger(__name__)


def judge(engine: Engine, outlook: Outlook, name: str) -> None:
    """Look at the canaries that a node is one of, after it told something new."""
    if not outlook.canaries:
        return
    with reading(engine) as session:
        node = session.get(Node, name)
    if node is None:
        return
    for canary, _ in outlook.canaries_for(wanted_of(node)):
        _judge(engine, outlook, canary)


def _judge(engine: Engine, outlook: Outlook, canary: Canary) -> None:
    """Count the canary's nodes that are ready with its bundle, or find one that failed on it."""
    with reading(engine) as session:
        members = nodes.listed(session, {canary.label: canary.value})
    ready = []
    for node in members:
        digest = outlook.desired(node.name, wanted_of(node)).bundle
        if digest is None:
            continue
        with reading(engine) as session:
            tally = nodes.tally(session, node.name, digest, since=canary.begun_at)
        if tally.worst is not None:
            worst = tally.worst
            failed = SmokeFailed(
                f"the module {worst.module} {worst.outcome} on the node {node.name}",
                where=f"pins/{canary.name}, revision {canary.revision}, bundle {digest}",
                expected=worst.expected,
                found=worst.found or worst.why or worst.outcome,
                remedy="look at GET /v1/matrix; propose a revision without this module's bytes",
                node=node.name,
                module=worst.module,
                sha256=worst.sha256,
            )
            with writing(engine) as session:
                if _still(session.get(Canary, canary.name), canary):
                    revisions.end_canary(
                        session, canary.name, who="canary", why=failed.what, problem=failed.problem()
                    )
                    _log.warning("canary of %s failed: %s", canary.name, failed.what)
            return
        if node.state == nodes.NodeState.READY and node.bundle == digest:
            ready.append(node.name)
    if len(ready) >= canary.require:
        why = f"{len(ready)} canaries are ready with it: {', '.join(ready[:10])}"
        with writing(engine) as session:
            if _still(session.get(Canary, canary.name), canary):
                revisions.promote(session, canary, why=why)
                _log.info("canary of %s promoted: %s", canary.name, why)


def _still(there: Canary | None, seen: Canary) -> bool:
    return there is not None and (there.revision, there.begun_at) == (seen.revision, seen.begun_at)
