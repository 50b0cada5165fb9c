"""What a revision would change: wheels, modules, and for each node the bytes it would fetch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine
from sqlmodel import Session

from kernel_depot.catalog import queries
from kernel_depot.catalog.bundles import RevisionUnknown
from kernel_depot.catalog.database import reading
from kernel_depot.catalog.tables import Node
from kernel_depot.errors import DepotError
from kernel_depot.fleet import nodes
from kernel_depot.fleet.contents import Contents, read_contents
from kernel_depot.fleet.desired import Wanted, resolve_for, wanted_of
from kernel_depot.pins.pin import Pin, PinSet
from kernel_depot.platform import Sm, has_code_for


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """A module that nodes would get, lose, or get with other bytes."""

    module: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class NodeChange:
    """What a node would do: fetch `bytes` that its bundle of now does not hold.

    `without_code` are the modules of the bundle that have no code for the node's SM. `problem`: nothing fits.
    """

    node: str
    before: str | None
    after: str | None
    complete: bool
    bytes: int
    without_code: tuple[str, ...]
    problem: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class RevisionPlan:
    """The difference that a revision makes to the current one."""

    name: str
    before: str | None
    after: str
    wheels_added: tuple[Pin, ...]
    wheels_removed: tuple[Pin, ...]
    modules: tuple[ModuleChange, ...]
    nodes: tuple[NodeChange, ...]


def plan(engine: Engine, name: str, revision: str) -> RevisionPlan:
    """Compare a recorded revision of a pin set with its current one. Raise RevisionUnknown."""
    with reading(engine) as session:
        new = queries.pin_set_revision(session, revision)
        if new is None or new.name != name:
            raise RevisionUnknown(
                f"the pin set {name!r} has no revision {revision}",
                where=f"pins/{name}",
                found=revision,
                remedy=f"see GET /v1/pins/{name}/revisions",
            )
        old = queries.pin_set(session, name)
        sets = queries.current_pin_sets(session)
        listed = nodes.listed(session)
        then = [*(pin_set for pin_set in sets if pin_set.name != name), new]
        seen: dict[Any, tuple[_Outcome, _Outcome]] = {}
        modules: dict[tuple[str, str | None, str | None], ModuleChange] = {}
        changes = []
        for node in listed:
            wanted = wanted_of(node)
            key = (wanted.platform, wanted.modules, wanted.groups)
            if key not in seen:
                seen[key] = (_outcome(session, sets, wanted), _outcome(session, then, wanted))
                for change in _modules(*seen[key]):
                    modules[(change.module, change.before, change.after)] = change
            changes.append(_node(node, *seen[key]))
    kept = set(old.pins) & set(new.pins) if old is not None else set()
    return RevisionPlan(
        name=name,
        before=old.digest if old is not None else None,
        after=revision,
        wheels_added=tuple(pin for pin in new.pins if pin not in kept),
        wheels_removed=tuple(pin for pin in old.pins if pin not in kept) if old is not None else (),
        modules=tuple(modules[key] for key in sorted(modules, key=lambda key: key[0])),
        nodes=tuple(changes),
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    digest: str | None
    complete: bool
    held: Contents
    problem: dict[str, Any] | None


_NOTHING = Contents({}, {})


def _outcome(session: Session, sets: Sequence[PinSet], wanted: Wanted) -> _Outcome:
    try:
        found = resolve_for(session, list(sets), wanted)
    except DepotError as error:
        return _Outcome(None, False, _NOTHING, error.problem())
    held = read_contents(found.digest, found.manifest)
    return _Outcome(found.digest, found.complete, held, None)


def _modules(before: _Outcome, after: _Outcome) -> list[ModuleChange]:
    old = {name: module.sha256 for name, module in before.held.modules.items()}
    new = {name: module.sha256 for name, module in after.held.modules.items()}
    return [
        ModuleChange(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _node(node: Node, before: _Outcome, after: _Outcome) -> NodeChange:
    missing: Mapping[str, int] = {
        sha256: size for sha256, size in after.held.blobs.items() if sha256 not in before.held.blobs
    }
    sm = Sm.parse(node.sm) if node.sm is not None else None
    without = [
        name
        for name, module in after.held.modules.items()
        if sm is not None
        and (module.sms or module.ptx)
        and not has_code_for(sm, sms=module.sms, ptx=module.ptx)
    ]
    return NodeChange(
        node=node.name,
        before=before.digest,
        after=after.digest,
        complete=after.complete,
        bytes=sum(missing.values()),
        without_code=tuple(sorted(without)),
        problem=after.problem,
    )
