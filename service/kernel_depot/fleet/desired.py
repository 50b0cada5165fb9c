"""What each node is to have: the current revisions, a canary's for its nodes, and what a warmup tells it.

One `Outlook` is the picture at one fleet version. It is kept while that version lasts, so that a thousand
nodes of one kind cost one resolution, and an answer that has not changed costs no query.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import rfc8785
from sqlalchemy import Engine
from sqlmodel import Session, col, select

from kernel_depot.bundle import PinSetRef
from kernel_depot.catalog import changes, queries
from kernel_depot.catalog.bundles import ResolvedBundle, resolve_revisions
from kernel_depot.catalog.database import reading
from kernel_depot.catalog.tables import Canary, Node, Warmup, WarmupNode
from kernel_depot.digest import sha256_bytes
from kernel_depot.errors import DepotError
from kernel_depot.fleet.labels import matches
from kernel_depot.pins.pin import PinSet
from kernel_depot.platform import Arch, CudaTag, Platform, Sm


@dataclass(frozen=True, slots=True)
class Wanted:
    """What decides a node's bundle: its platform, its selection, and its labels."""

    platform: Platform
    modules: tuple[str, ...] | None
    groups: tuple[str, ...]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bytes that a warmup wants on the node, whatever its current bundle is."""

    warmup: str
    bundle: str

    def to_json(self) -> dict[str, str]:
        """Return the JSON members."""
        return {"warmup": self.warmup, "bundle": self.bundle}


@dataclass(frozen=True, slots=True)
class Desired:
    """What a node is to have. `bundle` None: nothing fits it, and `problem` says why."""

    bundle: str | None
    pin_sets: tuple[PinSetRef, ...]
    canary_of: tuple[str, ...]
    complete: bool
    problem: dict[str, Any] | None
    prefetch: tuple[Prefetch, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON members."""
        return {
            "bundle": self.bundle,
            "pin_sets": [{"name": ref.name, "revision": ref.revision} for ref in self.pin_sets],
            "canary_of": list(self.canary_of),
            "complete": self.complete,
            "problem": self.problem,
            "prefetch": [item.to_json() for item in self.prefetch],
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What a node is to have, as it is sent: canonical JSON (RFC 8785) and a tag that names it."""

    desired: Desired
    body: bytes
    etag: str


def _answer(desired: Desired) -> Answer:
    body = rfc8785.dumps(desired.to_json())
    return Answer(desired, body, f'"{sha256_bytes(body)[:32]}"')


def wanted_of(node: Node) -> Wanted:
    """Return what decides a node's bundle."""
    platform = Platform(
        CudaTag.parse(node.cuda), Arch.parse(node.arch), Sm.parse(node.sm) if node.sm is not None else None
    )
    modules = tuple(sorted(node.modules)) if node.modules is not None else None
    return Wanted(platform, modules, tuple(sorted(node.groups)), dict(node.labels))


@dataclass
class Outlook:
    """The picture at one version. Thread-safe."""

    engine: Engine
    version: int
    sets: list[PinSet]
    canaries: list[tuple[Canary, PinSet]]
    told: dict[str, tuple[Prefetch, ...]]
    _answers: dict[Any, Answer] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def desired(self, name: str, wanted: Wanted) -> Desired:
        """Return what a node is to have."""
        return self.answer(name, wanted).desired

    def answer(self, name: str, wanted: Wanted) -> Answer:
        """Return what a node is to have, as it is sent."""
        known = self.ready_answer(name, wanted)
        if known is not None:
            return known
        own = self.canaries_for(wanted)
        with self._lock:
            key = _key(wanted, own)
            if key not in self._answers:
                self._answers[key] = _answer(self._resolve(wanted, own))
            return self._with_prefetch(name, self._answers[key])

    def ready_answer(self, name: str, wanted: Wanted) -> Answer | None:
        """Return the same when it costs neither a query nor a wait, else None."""
        known = self._answers.get(_key(wanted, self.canaries_for(wanted)))
        return self._with_prefetch(name, known) if known is not None else None

    def _with_prefetch(self, name: str, answer: Answer) -> Answer:
        prefetch = self.told.get(name, ())
        return _answer(replace(answer.desired, prefetch=prefetch)) if prefetch else answer

    def canaries_for(self, wanted: Wanted) -> list[tuple[Canary, PinSet]]:
        """Return the canaries that a node is one of."""
        return [
            (canary, pin_set)
            for canary, pin_set in self.canaries
            if matches(wanted.labels, {canary.label: canary.value})
        ]

    def _resolve(self, wanted: Wanted, own: list[tuple[Canary, PinSet]]) -> Desired:
        replaced = {canary.name: pin_set for canary, pin_set in own}
        sets = [replaced.get(pin_set.name, pin_set) for pin_set in self.sets]
        names = tuple(sorted(replaced))
        try:
            with reading(self.engine) as session:
                found = resolve_for(session, sets, wanted)
        except DepotError as error:
            return Desired(None, (), names, False, error.problem())
        refs = tuple(
            PinSetRef(ref["name"], ref["revision"]) for ref in json.loads(found.manifest)["pin_sets"]
        )
        return Desired(found.digest, refs, names, found.complete, None)


def _key(wanted: Wanted, own: list[tuple[Canary, PinSet]]) -> Any:
    return (wanted.platform, wanted.modules, wanted.groups, tuple(pin_set.digest for _, pin_set in own))


def resolve_for(session: Session, sets: list[PinSet], wanted: Wanted) -> ResolvedBundle:
    """Resolve revisions for a node. Raise as `resolve_revisions` does."""
    return resolve_revisions(
        session, sets, platform=wanted.platform, modules=wanted.modules, groups=wanted.groups
    )


def look(engine: Engine) -> Outlook:
    """Take the picture as it is now; five queries, whatever the number of nodes."""
    with reading(engine) as session:
        version = changes.fleet_version(session)
        sets = queries.current_pin_sets(session)
        canaries = []
        for canary in session.exec(select(Canary).order_by(col(Canary.name))).all():
            pin_set = queries.pin_set_revision(session, canary.revision)
            if pin_set is not None:
                canaries.append((canary, pin_set))
        told: dict[str, list[Prefetch]] = {}
        rows = session.exec(
            select(WarmupNode)
            .join(Warmup, col(Warmup.id) == col(WarmupNode.warmup))
            .where(WarmupNode.state == "told", Warmup.state == "warming")
            .order_by(col(WarmupNode.warmup))
        )
        for row in rows:
            if row.bundle is not None:
                told.setdefault(row.node, []).append(Prefetch(row.warmup, row.bundle))
        session.expunge_all()
    return Outlook(engine, version, sets, canaries, {name: tuple(items) for name, items in told.items()})
