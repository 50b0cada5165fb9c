"""The audit log: who changed what, when, why, from which digest to which."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from kernel_depot.api.auth import Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import ParameterUnknown, RequestInvalid, documented
from kernel_depot.catalog import changes
from kernel_depot.catalog.database import reading


class AuditEntryDocument(BaseModel):
    """One change."""

    id: int
    at: datetime
    who: str
    action: str
    subject: str = Field(description="A pin set's name, a warmup's id, a node's name, a token's id.")
    before: str | None = Field(description="The digest that it was.")
    after: str | None = Field(description="The digest that it is.")
    why: str | None
    facts: dict[str, Any]


class AuditPage(BaseModel):
    """Some changes, the newest first."""

    entries: list[AuditEntryDocument]
    next: int | None = Field(description="Ask for `before` this id for the next page; null: it was the last.")


router = APIRouter(prefix="/v1", tags=["fleet"])


@router.get(
    "/audit",
    summary="Read the audit log",
    operation_id="get_audit",
    responses=documented(RequestInvalid, ParameterUnknown, TokenMissing, TokenRefused, ScopeInsufficient),
)
def get_audit(
    depot: DepotDependency,
    _caller: Reader,
    subject: Annotated[
        str | None, Query(max_length=200, description="Only of this.", examples=["flashinfer-0.6.3"])
    ] = None,
    action: Annotated[
        str | None, Query(max_length=50, description="Only of this kind.", examples=["activated"])
    ] = None,
    before: Annotated[int | None, Query(ge=1, description="Only older entries than this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many.")] = 100,
) -> AuditPage:
    """List changes, the newest first. Entries are only ever added; the database refuses anything else."""
    with reading(depot.engine) as session:
        rows = changes.audit_page(session, subject=subject, action=action, before=before, limit=limit + 1)
        entries = [
            AuditEntryDocument(**{name: getattr(row, name) for name in AuditEntryDocument.model_fields})
            for row in rows[:limit]
        ]
    return AuditPage(entries=entries, next=entries[-1].id if len(rows) > limit else None)
