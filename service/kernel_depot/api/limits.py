"""What a request may carry: known query parameters, each once, and a body of bounded size."""

from __future__ import annotations

import difflib
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernel_depot.api.problems import BodyTooLarge, ParameterUnknown, RequestInvalid, problem_response

MAX_BODY = 4 << 20


async def known_parameters(request: Request) -> None:
    """Refuse query parameters that the operation's OpenAPI entry does not list, and repeated ones.

    A parameter that is misspelled and ignored would answer another question than the one asked.
    """
    if not request.query_params:
        return
    allowed = _parameters(request)
    for name, value in request.query_params.multi_items():
        if "\0" in value:  # PostgreSQL keeps no text with it
            raise RequestInvalid(
                "a parameter holds a NUL character", where=f"query.{name}", found=value[:100]
            )
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            raise ParameterUnknown(
                f"this operation has no parameter {name!r}",
                where=request.url.path,
                expected=", ".join(sorted(allowed)) or "no parameters",
                found=name,
                remedy=f"did you mean {near[0]!r}?" if near else None,
            )
        if not allowed[name] and len(request.query_params.getlist(name)) > 1:
            raise ParameterUnknown(
                f"the parameter {name!r} is given more than once", where=request.url.path, found=name
            )


def _parameters(request: Request) -> dict[str, bool]:
    """Return the query parameters of the operation, and whether each may be repeated."""
    route = request.scope.get("route")
    paths: dict[str, Any] = request.app.openapi()["paths"]
    operation = paths.get(getattr(route, "path_format", ""), {}).get(request.method.lower(), {})
    return {
        item["name"]: _is_list(item["schema"])
        for item in operation.get("parameters", ())
        if item["in"] == "query"
    }


def _is_list(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "array" or any(map(_is_list, schema.get("anyOf", ())))


class BodyLimit:
    """Refuses bodies over a limit, announced or not, before they are kept in memory."""

    def __init__(self, app: ASGIApp, *, limit: int = MAX_BODY) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if (
            announced.isascii()
            and announced.isdigit()
            and (len(announced) > 18 or int(announced) > self.limit)
        ):
            await problem_response(self._refused(announced[:30]))(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.limit:
                raise self._refused(taken)
            return message

        await self.app(scope, counted, send)

    def _refused(self, found: object) -> BodyTooLarge:
        return BodyTooLarge(
            "the request's body is too large",
            expected=f"at most {self.limit} bytes",
            found=found,
            headers={"connection": "close"},
        )
