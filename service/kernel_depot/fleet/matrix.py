"""Modules against nodes: how each did where, and whether that is still about what the node has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlmodel import Session

from kernel_depot.catalog.tables import Node, SmokeResult
from kernel_depot.fleet import nodes
from kernel_depot.fleet.contents import modules_of


@dataclass(frozen=True, slots=True)
class Cell:
    """One module on one node. `state` is its outcome, or `stale`: the node has other bytes or driver."""

    module: str
    node: str
    state: str
    result: SmokeResult


def matrix(
    session: Session, *, labels: Mapping[str, str] | None = None, module: str | None = None
) -> tuple[list[Node], list[Cell]]:
    """Return the nodes, and a cell for the newest result of every module on each of them.

    A result is stale when the node's driver is another than then, or when the bundle that is ready on the
    node has other bytes of the module, or none.
    """
    listed = nodes.listed(session, labels)
    by_name = {node.name: node for node in listed}
    newest: dict[tuple[str, str], SmokeResult] = {}
    for result in nodes.smoke_results(session):
        if result.node not in by_name or (module is not None and result.module != module):
            continue
        key = (result.module, result.node)
        if key not in newest or newest[key].at < result.at:
            newest[key] = result
    held = {digest: modules_of(session, digest) for digest in {n.bundle for n in listed if n.bundle}}
    cells = [
        Cell(name, node, _state(by_name[node], result, held), result)
        for (name, node), result in sorted(newest.items())
    ]
    return listed, cells


def _state(node: Node, result: SmokeResult, held: Mapping[str, Mapping[str, str]]) -> str:
    has = held[node.bundle].get(result.module) if node.bundle is not None else result.sha256
    if has != result.sha256 or (node.driver or "") != result.driver:
        return "stale"
    return result.outcome
