"""Modules against nodes: which kernels were seen to work where."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from kernel_depot.api.auth import Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.nodes import LabelFilter, SmokeDocument, smoke_document, watch_of
from kernel_depot.api.problems import ParameterUnknown, RequestInvalid, documented
from kernel_depot.catalog.database import reading
from kernel_depot.fleet import nodes
from kernel_depot.fleet.desired import wanted_of
from kernel_depot.fleet.errors import LabelInvalid
from kernel_depot.fleet.labels import parse_labels
from kernel_depot.fleet.matrix import matrix


class CellDocument(BaseModel):
    """One module on one node."""

    module: str
    node: str
    state: str = Field(
        description="`pass`, `fail` (the result says how), `skipped`, or `stale`: the node is to have other "
        "bytes of the module, or has another driver, than when it was smoked."
    )
    result: SmokeDocument = Field(description="The smoke result behind it.")


class MatrixDocument(BaseModel):
    """The nodes, the modules, and a cell where a module was smoked."""

    nodes: list[str]
    modules: list[str]
    counts: dict[str, int] = Field(description="How many cells are in each state.")
    cells: list[CellDocument]


router = APIRouter(prefix="/v1", tags=["fleet"])


@router.get(
    "/matrix",
    summary="See which modules work where",
    operation_id="get_matrix",
    responses=documented(
        RequestInvalid, ParameterUnknown, TokenMissing, TokenRefused, ScopeInsufficient, LabelInvalid
    ),
)
def get_matrix(
    request: Request,
    depot: DepotDependency,
    _caller: Reader,
    label: LabelFilter = None,
    module: Annotated[
        str | None, Query(max_length=255, description="Only this module.", examples=["norm"])
    ] = None,
) -> MatrixDocument:
    """Set how each module did against every node, for the bytes it is to have. No cell: never smoked."""
    outlook = watch_of(request).outlook()
    with reading(depot.engine) as session:
        rows = nodes.listed(session, parse_labels(label or (), where="label"))
        session.expunge_all()
    desired = {row.name: outlook.desired(row.name, wanted_of(row)).bundle for row in rows}
    with reading(depot.engine) as session:
        cells = matrix(session, rows, desired, module=module)
        return MatrixDocument(
            nodes=[row.name for row in rows],
            modules=sorted({cell.module for cell in cells}),
            counts=dict(Counter(cell.state for cell in cells)),
            cells=[
                CellDocument(
                    module=cell.module, node=cell.node, state=cell.state, result=smoke_document(cell.result)
                )
                for cell in cells
            ],
        )
