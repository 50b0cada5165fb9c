"""Who calls, and what the caller may do: bearer tokens (RFC 6750) with scopes, or trusted loopback."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Annotated, Final
from urllib.parse import urlsplit

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool

from kernel_depot.api.attempts import Attempts
from kernel_depot.api.context import depot_of
from kernel_depot.api.problems import ApiError, HostRefused
from kernel_depot.catalog import record
from kernel_depot.catalog.database import reading, writing

_REALM = 'Bearer realm="kernel-depot"'
_TOUCH_EVERY = timedelta(minutes=1)
_BELIEVED: Final = 1.0
"""Seconds for which a token that was looked up is admitted without another look."""

_MOST_REMEMBERED: Final = 10_000
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")

bearer = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="A token made by `kernel-depot tokens create`. "
    "Scopes: `read`; `node`, which includes `read`; `admin`, which includes both.",
)


class Scope(str, Enum):
    """What a token allows; each scope includes the ones before it."""

    READ = "read"
    NODE = "node"
    ADMIN = "admin"

    def __str__(self) -> str:
        return self.value

    def includes(self, wanted: Scope) -> bool:
        """Tell whether holding this scope allows what `wanted` allows."""
        ranks = list(Scope)
        return ranks.index(self) >= ranks.index(wanted)


class TokenMissing(ApiError):
    """A request without a token where one is needed."""

    slug = "token-missing"
    title = "A bearer token is needed"
    status = 401


class TokenRefused(ApiError):
    """A token that is unknown, expired or revoked."""

    slug = "token-refused"
    title = "The token is not valid"
    status = 401


class ScopeInsufficient(ApiError):
    """A valid token that does not allow the operation."""

    slug = "scope-insufficient"
    title = "The token does not allow this"
    status = 403


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, by the name given to the token."""

    name: str


@dataclass
class Admitted:
    """Who was admitted moments ago, by the secret's digest and the scope: a thousand nodes share few tokens.

    For the event loop's thread alone.
    """

    _known: dict[tuple[str, Scope], tuple[float, Caller]] = field(default_factory=dict)

    def caller(self, secret: str, wanted: Scope) -> Caller | None:
        """Return who holds the token, when it was looked up within the last second."""
        until, caller = self._known.get((record.secret_digest(secret), wanted), (0.0, None))
        return caller if until > time.monotonic() else None

    def keep(self, secret: str, wanted: Scope, caller: Caller) -> None:
        """Believe a token that was just looked up."""
        if len(self._known) >= _MOST_REMEMBERED:
            self._known.clear()
        self._known[record.secret_digest(secret), wanted] = (time.monotonic() + _BELIEVED, caller)


def require(scope: Scope) -> Callable[..., Awaitable[Caller]]:
    """Return the dependency that admits callers who hold `scope`; a revoked token for a second more."""

    async def admit(
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)],
    ) -> Caller:
        if credentials is not None:
            admitted: Admitted = request.app.state.admitted
            caller = admitted.caller(credentials.credentials, scope)
            if caller is None:
                caller = await run_in_threadpool(_counted, request, credentials.credentials, scope)
                admitted.keep(credentials.credentials, scope, caller)
            return caller
        if "authorization" in request.headers:
            raise TokenRefused(
                "the Authorization header is not a bearer token",
                where="Authorization",
                expected="Bearer TOKEN",
                headers={"www-authenticate": f'{_REALM}, error="invalid_request"'},
            )
        return _anonymous_caller(request)

    return admit


Reader = Annotated[Caller, Depends(require(Scope.READ))]
Node = Annotated[Caller, Depends(require(Scope.NODE))]
Admin = Annotated[Caller, Depends(require(Scope.ADMIN))]


def _counted(request: Request, secret: str, wanted: Scope) -> Caller:
    """Admit the holder of a token, unless too many refused ones came from the address before."""
    attempts: Attempts = request.app.state.attempts
    peer = request.client.host if request.client is not None else ""
    attempts.check(peer, secret)
    try:
        caller = _token_caller(request, secret, wanted)
    except TokenRefused:
        attempts.failed(peer, secret)
        raise
    attempts.good(secret)
    return caller


def _token_caller(request: Request, secret: str, wanted: Scope) -> Caller:
    now = datetime.now(timezone.utc)
    engine = depot_of(request).engine
    with reading(engine) as session:
        token = record.find_token(session, secret)
    if token is None:
        raise _refused("the token is not known")
    if token.revoked_at is not None:
        raise _refused(f"the token {token.name!r} was revoked")
    if token.expires_at is not None and _aware(token.expires_at) <= now:
        raise _refused(f"the token {token.name!r} expired at {_aware(token.expires_at).isoformat()}")
    if not any(Scope(text).includes(wanted) for text in token.scopes):
        raise ScopeInsufficient(
            f"the token {token.name!r} does not allow this",
            expected=f"scope {wanted}",
            found=", ".join(token.scopes),
            remedy=f"make a token with `kernel-depot tokens create --scope {wanted} --name NAME`",
            headers={"www-authenticate": f'{_REALM}, error="insufficient_scope", scope="{wanted}"'},
        )
    if token.last_used_at is None or now - _aware(token.last_used_at) > _TOUCH_EVERY:
        with writing(engine) as session:
            record.touch_token(session, token.id)
    return Caller(token.name)


def _refused(what: str) -> TokenRefused:
    return TokenRefused(
        what,
        where="Authorization",
        remedy="ask an administrator for a token: `kernel-depot tokens create`",
        headers={"www-authenticate": f'{_REALM}, error="invalid_token"'},
    )


def _aware(moment: datetime) -> datetime:
    """SQLite returns moments without their zone; all are kept in UTC."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)


def _anonymous_caller(request: Request) -> Caller:
    """Admit a caller on this very machine, when the setting allows it. Raise TokenMissing otherwise.

    A request that came through a proxy is not local, whatever its peer is. A name that a foreign site
    made resolve to this machine shows in Host, and a foreign page's request in Origin.
    """
    peer = request.client.host if request.client is not None else ""
    allowed = depot_of(request).settings.allow_anonymous
    proxied = any(name in request.headers for name in _PROXY_HEADERS)
    if not (allowed and is_loopback(peer) and not proxied):
        raise TokenMissing(
            "this operation needs a token",
            where="Authorization",
            expected="Bearer TOKEN",
            remedy="ask an administrator for a token: `kernel-depot tokens create`",
            headers={"www-authenticate": _REALM},
        )
    for header in ("host", "origin"):
        value = request.headers.get(header)
        if value is not None and not is_loopback(_hostname(value)):
            raise HostRefused(
                "a request without a token must name this machine by a loopback name",
                where=header.capitalize(),
                expected="localhost or a loopback address",
                found=value[:200],
                remedy="send a token, or use http://127.0.0.1",
            )
    return Caller("anonymous")


def _hostname(value: str) -> str:
    try:
        return urlsplit(value if "//" in value else f"//{value}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address means this machine."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
