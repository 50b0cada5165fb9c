"""Built modules: what builders compiled, by the key that names all that decides a module's bytes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlmodel import col, select

from kernel_depot.api.auth import Admin, Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.blobs import EXAMPLE, BlobUnknown, Sha256
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import ApiError, BodyTooLarge, RequestInvalid, documented
from kernel_depot.catalog import queries, record
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import BuiltModule

MAX_KEYS = 1000
Key = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class BuiltModuleDiffers(ApiError):
    """A module posted under a key under which the depot has other bytes: a build that is not reproducible."""

    slug = "built-module-differs"
    title = "This key has other bytes"
    status = 409


class ModuleRecord(BaseModel):
    """A module and how it was made, as a builder's cache keeps it."""

    model_config = ConfigDict(extra="forbid")

    key: Key
    uri: str = Field(pattern="^[A-Za-z0-9_]{1,255}$")
    sha256: Key
    size: int = Field(gt=0, lt=1 << 53)
    sms: list[str] = Field(max_length=64)
    glibc: str | None
    glibcxx: str | None
    functions: list[str] = Field(min_length=1, max_length=10_000)
    recipe: Key
    toolchain: dict[str, Any]
    seconds: float = Field(ge=0)
    peak: int = Field(ge=0, lt=1 << 53)
    isolated: bool


class BuiltModuleDocument(BaseModel):
    """A built module, and who posted it."""

    record: ModuleRecord
    posted_by: str
    posted_at: datetime


class KeysRequest(BaseModel):
    """The keys asked about."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"keys": [EXAMPLE]}]})

    keys: list[Key] = Field(min_length=1, max_length=MAX_KEYS)


class BuiltModuleList(BaseModel):
    """Those that are there, whose bytes the store holds, in no order."""

    modules: list[BuiltModuleDocument]


router = APIRouter(prefix="/v1/built-modules", tags=["builds"])
_ACCESS = (RequestInvalid, TokenMissing, TokenRefused, ScopeInsufficient)


@router.post(
    "/find",
    summary="Find built modules by their keys",
    operation_id="find_built_modules",
    responses=documented(*_ACCESS, BodyTooLarge),
)
def find_built_modules(
    depot: DepotDependency, _caller: Reader, wanted: Annotated[KeysRequest, Body()]
) -> BuiltModuleList:
    """Tell which of the keys have a module. Its bytes are `GET /v1/blobs/sha256/{sha256}`."""
    with reading(depot.engine) as session:
        rows = session.exec(select(BuiltModule).where(col(BuiltModule.key).in_(set(wanted.keys)))).all()
    held = depot.store.has({row.sha256 for row in rows})
    return BuiltModuleList(modules=[_document(row) for row in rows if row.sha256 in held])


@router.put(
    "/{sha256}",
    summary="Record a built module",
    operation_id="put_built_module",
    responses=documented(*_ACCESS, BlobUnknown, BuiltModuleDiffers),
)
def put_built_module(
    depot: DepotDependency, caller: Admin, sha256: Sha256, built: Annotated[ModuleRecord, Body()]
) -> BuiltModuleDocument:
    """Record a module under its key, the path's digest. Its bytes are uploaded before.

    The first one recorded under a key stays. Builders take it as it is, so the key's maker is trusted:
    what a module's bytes should be, nobody can tell without compiling it.
    """
    if built.key != sha256:
        raise RequestInvalid("the record is of another key", where="key", expected=sha256, found=built.key)
    with reading(depot.engine) as session:
        blob = queries.blob(session, built.sha256)
    if blob is None or blob.size != built.size:
        raise BlobUnknown(
            "the module's bytes are not in the depot",
            where=f"blobs/sha256/{built.sha256}",
            expected=f"{built.size} bytes",
            found=f"{blob.size} bytes" if blob is not None else "nothing",
            remedy="upload them first: POST /v1/uploads",
        )
    values = {
        "key": built.key,
        "uri": built.uri,
        "sha256": built.sha256,
        "size": built.size,
        "record": built.model_dump(mode="json"),
        "posted_by": caller.name,
        "posted_at": record.now(),
    }
    with writing(depot.engine) as session:
        record.insert_absent(session, BuiltModule, [values])
        kept = session.get_one(BuiltModule, built.key)
    if kept.sha256 != built.sha256:
        raise BuiltModuleDiffers(
            f"the depot has other bytes of {built.uri} under this key",
            where=f"built-modules/{built.key}",
            expected=kept.sha256,
            found=built.sha256,
            remedy="the build is not reproducible, or one of the builders is not what it says: compare both",
        )
    return _document(kept)


def _document(row: BuiltModule) -> BuiltModuleDocument:
    return BuiltModuleDocument(
        record=ModuleRecord(**row.record), posted_by=row.posted_by, posted_at=row.posted_at
    )
