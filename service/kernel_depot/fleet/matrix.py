"""Modules against nodes: how each did where, and whether that is still about what the node is to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlmodel import Session

from kernel_depot.catalog.tables import Node, SmokeResult
from kernel_depot.fleet import nodes
from kernel_depot.fleet.contents import modules_of
from kernel_depot.fleet.nodes import BAD_OUTCOMES

STALE: Final = "stale"


@dataclass(frozen=True, slots=True)
class Cell:
    """One module on one node: `pass`, `fail`, `skipped` or `stale`, and the result that says so.

    `stale`: the node is to have other bytes of the module, or none, or has another driver by now.
    """

    module: str
    node: str
    state: str
    result: SmokeResult


def matrix(
    session: Session,
    listed: Sequence[Node],
    desired: Mapping[str, str | None],
    *,
    module: str | None = None,
) -> list[Cell]:
    """Return a cell for each module that was smoked on each of the nodes.

    `desired` names each node's bundle. A result about its bytes under the node's driver is told, however old;
    where there is none, the newest other one, as stale.
    """
    by_name = {node.name: node for node in listed}
    held = {digest: modules_of(session, digest) for digest in set(desired.values()) if digest is not None}
    chosen: dict[tuple[str, str], Cell] = {}
    for result in nodes.smoke_results(session):
        if result.node not in by_name or (module is not None and result.module != module):
            continue
        wanted = held.get(desired.get(result.node) or "", {}).get(result.module)
        current = (wanted, by_name[result.node].driver or "") == (result.sha256, result.driver)
        state = STALE if not current else "fail" if result.outcome in BAD_OUTCOMES else result.outcome
        key = (result.module, result.node)
        if key not in chosen or _before(chosen[key], state, result):
            chosen[key] = Cell(result.module, result.node, state, result)
    return [chosen[key] for key in sorted(chosen)]


def _before(cell: Cell, state: str, result: SmokeResult) -> bool:
    """Tell whether another result goes before a cell's."""
    return (state != STALE, result.at) > (cell.state != STALE, cell.result.at)
