"""What the API answers when it refuses: RFC 9457 problem+json with a stable type, never a traceback."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernel_depot.errors import PROBLEM_NAMESPACE, DepotError

MEDIA_TYPE = "application/problem+json"
log = logging.getLogger("kernel_depot.api")


class ApiError(DepotError):
    """A request that the API refuses. `headers` travel with the answer."""

    slug: ClassVar[str] = "request-refused"
    title: ClassVar[str] = "The request is refused"
    status: ClassVar[int] = 400

    def __init__(self, what: str, *, headers: Mapping[str, str] | None = None, **facts: Any) -> None:
        super().__init__(what, **facts)
        self.headers = dict(headers or {})


class RequestInvalid(ApiError):
    """Parameters or a body that do not have the documented shape; `problems` lists all of them."""

    slug = "request-invalid"
    title = "The request does not have the documented shape"


class ParameterUnknown(ApiError):
    """A query parameter that the operation does not have, or one given twice."""

    slug = "parameter-unknown"
    title = "The operation has no such parameter"


class RouteUnknown(ApiError):
    """A path that no operation serves."""

    slug = "route-unknown"
    title = "Nothing is served under this path"
    status = 404


class MethodRefused(ApiError):
    """A method that the path does not serve."""

    slug = "method-refused"
    title = "The path does not serve this method"
    status = 405


class HostRefused(ApiError):
    """A Host header that is no host, or a foreign one on a request that asks to be trusted as local."""

    slug = "host-refused"
    title = "The Host header is refused"
    status = 421


class BodyTooLarge(ApiError):
    """A request body over the limit."""

    slug = "body-too-large"
    title = "The request's body is too large"
    status = 413


class MediaTypeUnsupported(ApiError):
    """A request body in a format that the operation does not read."""

    slug = "media-type-unsupported"
    title = "The body's format is not read here"
    status = 415


class InternalFailure(ApiError):
    """A failure that is the server's own fault; its log has the details under `incident`."""

    slug = "internal"
    title = "The server failed"
    status = 500


class Problem(BaseModel):
    """A problem (RFC 9457). Further members carry the facts of one kind of problem."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="What kind of problem it is; never changes for one kind.")
    title: str = Field(description="The kind of problem in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What happened this time.")
    where: str | None = Field(default=None, description="Where it happened: a parameter, a file, a digest.")
    expected: Any = Field(default=None, description="What was expected there.")
    found: Any = Field(default=None, description="What was found there.")
    remedy: str | None = Field(default=None, description="What to do next.")


def problem_response(error: DepotError) -> Response:
    """Render a failure as problem+json with its status and headers."""
    headers = {"cache-control": "no-store", **getattr(error, "headers", {})}
    # Escaped to ASCII: what a client sent and is told back may hold lone surrogates.
    content = json.dumps(error.problem(), ensure_ascii=True, allow_nan=False)
    return Response(content, status_code=error.status, headers=headers, media_type=MEDIA_TYPE)


def documented(*kinds: type[DepotError]) -> dict[int | str, dict[str, Any]]:
    """Describe the problems an operation answers with, for its OpenAPI `responses`."""
    by_status: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        entry = by_status.setdefault(
            kind.status,
            {
                "description": "",
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}},
            },
        )
        entry["description"] = "; ".join(filter(None, [entry["description"], kind.title]))
        entry["content"][MEDIA_TYPE]["examples"][kind.slug] = {
            "summary": kind.title,
            "value": {
                "type": PROBLEM_NAMESPACE + kind.slug,
                "title": kind.title,
                "status": kind.status,
                "detail": (kind.__doc__ or kind.title).strip().splitlines()[0],
            },
        }
    return by_status


def install(app: FastAPI) -> None:
    """Make every failure of `app` a problem: our own, the framework's, and unexpected ones."""
    app.add_exception_handler(DepotError, _known)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _framework)


async def _known(request: Request, error: Exception) -> Response:
    assert isinstance(error, DepotError)
    if error.status >= 500:
        log.error("%s %s: %s", request.method, request.url.path, error)
    return problem_response(error)


async def _validation(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [
        {"where": ".".join(str(part) for part in item["loc"]), "detail": item["msg"]}
        for item in error.errors()
    ]
    what = f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in the request"
    first = problems[0] if problems else {"where": "request", "detail": "unreadable"}
    return problem_response(
        RequestInvalid(
            f"{what}: {first['where']}: {first['detail']}", where=first["where"], problems=problems
        )
    )


async def _framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    headers = dict(error.headers or {})
    if isinstance(error.__cause__, DepotError):  # what failed while the framework read the body
        return problem_response(error.__cause__)
    if error.status_code == 404:
        return problem_response(
            RouteUnknown(f"nothing is served under {path}", where=path, remedy="see /openapi.json")
        )
    if error.status_code == 405:
        allowed = headers.get("Allow") or headers.get("allow")
        return problem_response(
            MethodRefused(
                f"{request.method} is not served under {path}",
                where=path,
                expected=allowed,
                found=request.method,
                headers={"allow": allowed} if allowed else None,
            )
        )
    return problem_response(RequestInvalid(str(error.detail), where=path))


class Incidents:
    """The outermost layer: an unexpected failure is logged under an id and answered without its text."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; a failure after the answer has begun cuts it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            if isinstance(error, DepotError):
                failure = error
                log.error("%s %s: %s", scope["method"], scope["path"], error)
            else:
                incident = uuid.uuid4().hex
                log.exception("incident %s: %s %s", incident, scope["method"], scope["path"])
                failure = InternalFailure(
                    "the server failed unexpectedly",
                    remedy=f"look for incident {incident} in the server's log",
                    incident=incident,
                )
            if not started:
                await problem_response(failure)(scope, receive, send)
            # An answer that has begun is left unfinished: the server then cuts the connection, and no
            # client can take the part it got for the whole.
