"""Benchmark reports that nodes post, each under the digest of its content."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import rfc8785
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from sqlmodel import col, select

from kernel_depot.api.auth import Node, Reader, ScopeInsufficient, TokenMissing, TokenRefused
from kernel_depot.api.context import DepotDependency
from kernel_depot.api.problems import ApiError, ParameterUnknown, RequestInvalid, documented
from kernel_depot.catalog import record
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import Benchmark
from kernel_depot.digest import sha256_bytes


class BenchmarkUnknown(ApiError):
    """A digest that names no report."""

    slug = "benchmark-unknown"
    title = "No such benchmark report"
    status = 404


_Count = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]


class ShapeDocument(BaseModel):
    """What was computed: requests of `rows` tokens together, their lengths drawn from `seed`."""

    model_config = ConfigDict(extra="forbid")

    batch: _Count
    rows: _Count
    head_dim: _Count
    num_qo_heads: _Count
    num_kv_heads: _Count
    causal: bool
    seed: int = Field(default=0, strict=True, ge=0, le=2**31 - 1)


class SideDocument(BaseModel):
    """Who produced numbers, and which. Times in milliseconds; null where a side was not timed."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=200)
    version: str = Field(max_length=100)
    module_sha256: str | None = None
    relative_error: float | None = None
    median_ms: float | None = Field(default=None, gt=0)
    spread_ms: float | None = Field(default=None, ge=0, description="Needed beside a median.")

    @model_validator(mode="after")
    def _a_time_has_its_spread(self) -> SideDocument:
        if self.median_ms is not None and self.spread_ms is None:
            raise ValueError("median_ms without spread_ms cannot be compared")
        return self


class RowDocument(BaseModel):
    """One shape."""

    model_config = ConfigDict(extra="allow")

    shape: ShapeDocument
    opponent: SideDocument
    challenger: SideDocument
    ratio: float | None = Field(description="The challenger's time over the opponent's.")


class MachineDocument(BaseModel):
    """What it was measured on."""

    model_config = ConfigDict(extra="allow")

    gpu: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00]*$")
    driver: str | None = Field(max_length=100)


_EXAMPLE: dict[str, JsonValue] = {
    "schema": 1,
    "benchmark": "ragged-prefill",
    "machine": {"gpu": "NVIDIA H200", "driver": "580.159.04", "matmul_tflops": 774.0},
    "rows": [
        {
            "shape": {
                "batch": 4,
                "rows": 512,
                "head_dim": 128,
                "num_qo_heads": 32,
                "num_kv_heads": 8,
                "causal": True,
                "seed": 0,
            },
            "opponent": {
                "name": "FlashInfer ragged prefill, fa3",
                "version": "0.6.3",
                "median_ms": 0.016,
                "spread_ms": 0.001,
            },
            "challenger": {"name": "mine:kernel", "version": "1.0", "median_ms": 0.02, "spread_ms": 0.001},
            "ratio": 1.25,
        }
    ],
}


class ReportDocument(BaseModel):
    """A report as `kernel-depot bench ragged-prefill --output` writes it."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [_EXAMPLE]})

    schema_number: Literal[1] = Field(alias="schema")
    benchmark: Literal["ragged-prefill"]
    machine: MachineDocument
    rows: list[RowDocument] = Field(min_length=1, max_length=2000)

    @model_validator(mode="before")
    @classmethod
    def _has_a_name(cls, members: Any) -> Any:
        """Refuse what canonical JSON (RFC 8785), which a report's digest is of, cannot write: NaN, 2**53."""
        try:
            rfc8785.dumps(members)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"canonical JSON cannot write it: {error}") from error
        return members


class BenchmarkDocument(BaseModel):
    """A report's name, and where it comes from."""

    digest: str
    benchmark: str
    gpu: str
    posted_by: str
    posted_at: datetime


class BenchmarkList(BaseModel):
    """The newest reports first."""

    benchmarks: list[BenchmarkDocument]


router = APIRouter(prefix="/v1", tags=["benchmarks"])
_REFUSALS = (RequestInvalid, ParameterUnknown, TokenMissing, TokenRefused, ScopeInsufficient)


@router.post(
    "/benchmarks",
    summary="Post a benchmark report",
    operation_id="post_benchmark",
    status_code=201,
    responses=documented(*_REFUSALS),
)
def post_benchmark(depot: DepotDependency, caller: Node, report: ReportDocument) -> BenchmarkDocument:
    """Keep a report. The same report posted again is the same: its name is the digest of its content."""
    members = report.model_dump(mode="json", by_alias=True)
    values = {
        "digest": sha256_bytes(rfc8785.dumps(members)),
        "benchmark": report.benchmark,
        "gpu": report.machine.gpu,
        "report": members,
        "posted_by": caller.name,
        "posted_at": record.now(),
    }
    with writing(depot.engine) as session:
        record.insert_absent(session, Benchmark, [values])
        kept = session.get_one(Benchmark, values["digest"])
        return _document(kept)


@router.get(
    "/benchmarks",
    summary="List benchmark reports",
    operation_id="list_benchmarks",
    responses=documented(*_REFUSALS),
)
def list_benchmarks(
    depot: DepotDependency,
    _caller: Reader,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many, the newest first.")] = 100,
) -> BenchmarkList:
    """List the reports, the newest first, without their rows."""
    with reading(depot.engine) as session:
        rows = session.exec(select(Benchmark).order_by(col(Benchmark.posted_at).desc()).limit(limit))
        return BenchmarkList(benchmarks=[_document(row) for row in rows])


@router.get(
    "/benchmarks/{digest}",
    summary="Read a benchmark report",
    operation_id="read_benchmark",
    responses=documented(*_REFUSALS, BenchmarkUnknown),
)
def read_benchmark(depot: DepotDependency, _caller: Reader, digest: str) -> dict[str, Any]:
    """Return a report as it was posted."""
    with reading(depot.engine) as session:
        found = session.get(Benchmark, digest)
        if found is None:
            raise BenchmarkUnknown(
                f"there is no benchmark report {digest!r}",
                found=digest,
                remedy="see GET /v1/benchmarks for those there are",
            )
        return found.report


def _document(row: Benchmark) -> BenchmarkDocument:
    return BenchmarkDocument(
        digest=row.digest,
        benchmark=row.benchmark,
        gpu=row.gpu,
        posted_by=row.posted_by,
        posted_at=row.posted_at,
    )
