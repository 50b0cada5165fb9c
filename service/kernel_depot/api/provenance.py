"""Provenance: the in-toto statement of an uploaded wheel."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from kernel_depot.api.auth import Admin, Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.blobs import EXAMPLE, BlobUnknown, Sha256
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import ApiError, BodyTooLarge, RequestInvalid, documented
from kernel_depot.catalog import queries, record
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import Provenance

_EXAMPLE: dict[str, JsonValue] = {
    "_type": "https://in-toto.io/Statement/v1",
    "subject": [{"name": "flashinfer_jit_cache-0.6.3+cu130.small-….whl", "digest": {"sha256": EXAMPLE}}],
    "predicateType": "https://slsa.dev/provenance/v1",
    "predicate": {},
}


class ProvenanceUnknown(ApiError):
    """A wheel of which nobody posted a statement."""

    slug = "provenance-unknown"
    title = "No statement of this wheel"
    status = 404


class DigestDocument(BaseModel):
    """A subject's digests."""

    model_config = ConfigDict(extra="allow")

    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class SubjectDocument(BaseModel):
    """What a statement is about."""

    model_config = ConfigDict(extra="allow")

    name: str
    digest: DigestDocument


class StatementDocument(BaseModel):
    """An in-toto statement (v1) of one wheel."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [_EXAMPLE]})

    statement_type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: list[SubjectDocument] = Field(min_length=1, max_length=1)
    predicate_type: str = Field(alias="predicateType")
    predicate: dict[str, Any]


router = APIRouter(prefix="/v1/provenance", tags=["builds"])
_ACCESS = (RequestInvalid, TokenMissing, TokenRefused, ScopeInsufficient)


@router.put(
    "/{sha256}",
    summary="Post a wheel's provenance",
    operation_id="put_provenance",
    status_code=204,
    responses=documented(*_ACCESS, BlobUnknown, BodyTooLarge),
)
def put_provenance(
    depot: DepotDependency,
    caller: Admin,
    sha256: Sha256,
    statement: Annotated[StatementDocument, Body()],
) -> None:
    """Keep an in-toto statement (v1) whose one subject is the wheel. The last one posted is kept."""
    [subject] = statement.subject
    if subject.digest.sha256 != sha256:
        raise RequestInvalid(
            "the statement is of another wheel", where="subject", expected=sha256, found=subject.digest.sha256
        )
    members = statement.model_dump(mode="json", by_alias=True)
    with writing(depot.engine) as session:
        if queries.blob(session, sha256) is None:
            raise BlobUnknown(
                f"this depot has no blob {sha256}", where="provenance", remedy="upload the wheel first"
            )
        session.merge(
            Provenance(wheel=sha256, statement=members, posted_by=caller.name, posted_at=record.now())
        )


@router.get(
    "/{sha256}",
    summary="Read a wheel's provenance",
    operation_id="get_provenance",
    responses=documented(*_ACCESS, ProvenanceUnknown),
)
def get_provenance(depot: DepotDependency, _caller: Reader, sha256: Sha256) -> dict[str, Any]:
    """Return the statement as it was posted."""
    with reading(depot.engine) as session:
        row = session.get(Provenance, sha256)
    if row is None:
        raise ProvenanceUnknown(
            f"nobody posted a statement of the wheel {sha256}", where="provenance", found=sha256
        )
    return row.statement
