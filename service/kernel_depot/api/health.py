"""Is the process up, and can it answer?"""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import ApiError, documented
from kernel_depot.catalog.database import check_schema
from kernel_depot.errors import DepotError


class NotReady(ApiError):
    """The catalog or the store cannot be used now."""

    slug = "not-ready"
    title = "The server cannot answer yet"
    status = 503


class Health(BaseModel):
    """The process is up."""

    status: str = Field(examples=["ok"])


router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Is the process up", operation_id="healthz")
def healthz() -> Health:
    """Answer as long as the process serves requests. Needs no token."""
    return Health(status="ok")


@router.get(
    "/readyz",
    summary="Can the server answer",
    operation_id="readyz",
    responses=documented(NotReady),
)
def readyz(depot: DepotDependency) -> Health:
    """Check that the catalog has the schema this server knows and the store is reached. Needs no token."""
    try:
        check_schema(depot.engine)
    except DepotError as error:
        raise NotReady(
            f"the catalog cannot be used: {error.what}", where="catalog", cause=error.type
        ) from error
    except Exception as error:
        raise NotReady(f"the catalog cannot be reached: {type(error).__name__}", where="catalog") from error
    try:
        depot.store.size("0" * 64)
    except Exception as error:
        raise NotReady(f"the store cannot be reached: {type(error).__name__}", where="store") from error
    return Health(status="ok")
