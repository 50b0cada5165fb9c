"""The HTTP application over one depot."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI

from kernel_depot.api import (
    artifacts,
    audit,
    benchmarks,
    blobs,
    builds,
    built_modules,
    bundles,
    health,
    jobs,
    matrix,
    metrics,
    modules,
    nodes,
    pins,
    problems,
    provenance,
    resolve,
    stream,
    uploads,
    warmups,
)
from kernel_depot.api.attempts import Attempts, TooManyFailures
from kernel_depot.api.auth import Admitted
from kernel_depot.api.limits import BodyLimit, known_parameters
from kernel_depot.fleet.watch import Watch
from kernel_depot.jobs.depot import Depot

DESCRIPTION = """\
Exactly the GPU kernel binaries that were pinned, verified once, shared by all.

A node asks `GET /v1/resolve` which bundle fits its platform, reads the manifest from
`GET /v1/bundles/{digest}` and fetches what it lacks: big files from `GET /v1/blobs/sha256/{sha256}`, many
small ones at once from `POST /v1/blobs/stream`. Everything named by a digest is immutable.

Failures are problems (RFC 9457, `application/problem+json`): `type` never changes for one kind of failure,
`detail` says what happened, `expected` and `found` what differed, `remedy` what to do.

Callers send `Authorization: Bearer TOKEN`. Query parameters that an operation does not list are refused.
"""
_TAGS = [
    {"name": "bundles", "description": "Platform in, immutable manifest out."},
    {"name": "blobs", "description": "Bytes by their SHA-256."},
    {"name": "artifacts", "description": "What the wheels hold, with what was read out of each file."},
    {"name": "pins", "description": "The pin sets, and their revisions."},
    {"name": "jobs", "description": "Bringing pinned wheels into the store, and builds."},
    {"name": "uploads", "description": "Bytes that an administrator brings, in parts."},
    {"name": "builds", "description": "Plans queued for builders, and what they compiled."},
    {"name": "benchmarks", "description": "What nodes measured against the opponent."},
    {"name": "fleet", "description": "Nodes, what they are to have, warmups, smoke results, the audit log."},
    {"name": "health", "description": "For orchestrators and monitoring; no token needed."},
]


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Describe the API: what the framework knows, with our one shape of failure in place of its own."""
        if self.openapi_schema is None:
            document = super().openapi()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas["Problem"] = problems.Problem.model_json_schema()
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    if "401" in operation["responses"]:
                        refused = problems.documented(TooManyFailures)[TooManyFailures.status]
                        operation["responses"][str(TooManyFailures.status)] = refused
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(depot: Depot) -> FastAPI:
    """Return the ASGI application that serves `depot`."""
    app = _Application(
        title="Kernel Depot",
        summary="Build-and-artifact manager for GPU kernel binaries",
        description=DESCRIPTION,
        version=version("kernel-depot"),
        openapi_tags=_TAGS,
        redoc_url=None,
        dependencies=[Depends(known_parameters)],
    )
    app.state.depot = depot
    app.state.watch = Watch(depot.engine)
    app.state.admitted = Admitted()
    app.state.attempts = Attempts()
    app.state.instruments = metrics.Instruments(depot.engine)
    problems.install(app)
    for room in (
        resolve,
        bundles,
        blobs,
        stream,
        artifacts,
        modules,
        pins,
        jobs,
        uploads,
        builds,
        built_modules,
        provenance,
        benchmarks,
        nodes,
        matrix,
        warmups,
        audit,
        health,
        metrics,
    ):
        app.include_router(room.router)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit)
    app.add_middleware(problems.Incidents)
    app.add_middleware(metrics.Measured, instruments=app.state.instruments)
    return app
