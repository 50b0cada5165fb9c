"""HTTP to one server: direct connections read in large pieces, or httpx where a proxy applies.

Bodies are read with `readinto` on the connection itself: on loopback that moved 3.7 GB/s where httpx
moved 1.35 (docs/worker.md), and the bytes are hashed anyway. What httpx knows about proxies and
certificates is used, not repeated: its TLS context serves both ways.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import urljoin, urlsplit

from kernel_depot.worker.errors import ServerProtocol, ServerRefused, ServerUnreachable, WorkerError

if TYPE_CHECKING:
    import http.client
    import ssl

    import httpx

PIECE: Final = 1 << 20
MAX_REDIRECTS: Final = 5
MAX_PROBLEM: Final = 1 << 20
_OWN_READING: Final = 1 << 18  # bytes; more than the standard library's reader buffers
RETRIED_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})

_Value = TypeVar("_Value")


class Transient(Exception):
    """A failure worth another try: the connection broke, or the server said to come back."""

    def __init__(self, cause: WorkerError, *, retry_after: float | None = None) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.retry_after = retry_after


@dataclass(frozen=True)
class Patience:
    """How long to wait and how often to try. Times in seconds."""

    attempts: int = 5
    first_delay: float = 0.2
    max_delay: float = 10.0
    connect: float = 10.0
    read: float = 60.0

    def delay(self, failures: int, retry_after: float | None) -> float:
        """The pause after so many failures: exponential with jitter, or what the server asked for."""
        if retry_after is not None:
            return min(retry_after, 6 * self.max_delay)
        longest = min(self.max_delay, self.first_delay * 2.0 ** (failures - 1))
        return random.uniform(0.5, 1.0) * longest  # noqa: S311


def retrying(attempt: Callable[[], _Value], *, patience: Patience) -> _Value:
    """Call `attempt` until it returns or has failed transiently `patience.attempts` times in a row.

    An attempt that made progress before it broke says so by `Transient.cause.data["progress"]`; it
    starts the count anew. Raise the last failure's cause.
    """
    failures = 0
    while True:
        try:
            return attempt()
        except Transient as failure:
            failures = 1 if failure.cause.data.pop("progress", False) else failures + 1
            if failures >= patience.attempts:
                raise failure.cause from failure
            time.sleep(patience.delay(failures, failure.retry_after))


class Body(Protocol):
    """Where a response's bytes come from."""

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer` from its start and return how many bytes came; 0 at the end."""
        ...

    def close(self) -> None:
        """Give the connection back, or drop it when bytes are left."""
        ...


@dataclass
class Response:
    """A response whose body is still to be read. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    url: str
    body: Body
    received: int = field(default=0)

    def __enter__(self) -> Response:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.body.close()

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer` as far as one read goes. Raise Transient when the connection breaks."""
        count = self.body.readinto(buffer)
        self.received += count
        return count

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, all by default. Raise Transient when the connection breaks."""
        if size >= 0:
            piece = memoryview(bytearray(size))
            return bytes(piece[: self.readinto(piece)])
        return b"".join(self.pieces())

    def pieces(self, size: int = PIECE) -> Iterator[bytes]:
        """Read the whole body in pieces of at most `size` bytes."""
        buffer = memoryview(bytearray(size))
        while count := self.readinto(buffer):
            yield bytes(buffer[:count])

    def json(self, *, limit: int = 64 << 20) -> Any:
        """Read the body as JSON. Raise ServerProtocol when it is not, or larger than `limit` bytes."""
        data = bytearray()
        for piece in self.pieces():
            data += piece
            if len(data) > limit:
                raise ServerProtocol("the answer is too large", where=self.url, expected=f"<= {limit} bytes")
        try:
            return json.loads(data)
        except ValueError as error:
            raise ServerProtocol("the answer is not JSON", where=self.url, found=str(error)) from error


class Transport(Protocol):
    """One thread's way to the server."""

    def send(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> Response:
        """Send one request, return whatever answer comes. Raise Transient when none does."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


def unreachable(url: str, error: BaseException, *, progress: bool = False) -> Transient:
    """Name a broken or impossible connection."""
    data = {"progress": True} if progress else {}
    return Transient(
        ServerUnreachable(
            "the connection to the server failed",
            where=url,
            found=f"{type(error).__name__}: {error}",
            remedy="check the address, the network and whether the server runs; "
            "a synced node keeps working with --offline",
            **data,
        )
    )


class _DirectBody:
    def __init__(
        self,
        transport: DirectTransport,
        origin: tuple[str, str],
        response: http.client.HTTPResponse,
        url: str,
        plain: socket.socket | None,
    ) -> None:
        self._transport = transport
        self._origin = origin
        self._response = response
        self._url = url
        self._some = False
        self._plain = plain
        self._ahead = True

    def readinto(self, buffer: memoryview) -> int:
        import http.client

        try:
            count = self._receive(buffer) or self._response.readinto(buffer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise unreachable(self._url, error, progress=self._some) from error
        if count:
            self._some = True
        elif self._response.length:
            raise unreachable(
                self._url,
                ConnectionError(f"the connection closed {self._response.length} bytes too early"),
                progress=self._some,
            )
        return count

    def _receive(self, buffer: memoryview) -> int:
        """Fill the buffer by one system call, past the response's own reader; 0 when that one has to read.

        It has to at the start, where it may have read on from the head, and at the end, after which it
        frees the connection for the next request.
        """
        left = self._response.length
        if self._plain is None or left is None or min(left, len(buffer)) <= _OWN_READING:
            return 0
        if self._ahead:
            self._ahead = False
            piece = self._response.read1(_OWN_READING)
            buffer[: len(piece)] = piece
            return len(piece)
        wanted = min(len(buffer), left - 1)
        self._plain.settimeout(None)  # with a timeout Python asks first, and takes what there is
        try:
            count = self._plain.recv_into(buffer, wanted, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError("timed out") from error
        finally:
            self._plain.settimeout(self._transport.patience.read)
        self._response.length = left - count
        return count

    def close(self) -> None:
        if not self._response.isclosed():
            self._transport.drop(self._origin)
        self._response.close()


class DirectTransport:
    """Kept-alive connections on the standard library's client, one an origin."""

    def __init__(self, *, patience: Patience, trust_env: bool) -> None:
        self.patience = patience
        self._trust_env = trust_env
        self._connections: dict[tuple[str, str], http.client.HTTPConnection] = {}

    def send(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> Response:
        """Send one request; a kept connection that the server closed meanwhile is opened anew once."""
        import http.client

        parts = urlsplit(url)
        origin = (parts.scheme, parts.netloc)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        kept = origin in self._connections
        try:
            try:
                answer = self._exchange(origin, method, target, headers, content)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self.drop(origin)
                if not kept:
                    raise
                answer = self._exchange(origin, method, target, headers, content)
        except (OSError, http.client.HTTPException) as error:
            self.drop(origin)
            raise unreachable(url, error) from error
        names = {name.lower(): value for name, value in answer.getheaders()}
        plain = self._connections[origin].sock if parts.scheme == "http" else None
        return Response(answer.status, names, url, _DirectBody(self, origin, answer, url, plain))

    def _exchange(
        self,
        origin: tuple[str, str],
        method: str,
        target: str,
        headers: Mapping[str, str],
        content: bytes | None,
    ) -> http.client.HTTPResponse:
        connection = self._connections.get(origin)
        if connection is None:
            connection = self._connect(origin)
            self._connections[origin] = connection
        connection.request(method, target, body=content, headers=dict(headers))
        return connection.getresponse()

    def _connect(self, origin: tuple[str, str]) -> http.client.HTTPConnection:
        import http.client

        scheme, netloc = origin
        parts = urlsplit(f"//{netloc}")
        host, port = parts.hostname or "", parts.port
        connection: http.client.HTTPConnection
        if scheme == "https":
            connection = http.client.HTTPSConnection(
                host, port, timeout=self.patience.connect, context=tls_context(trust_env=self._trust_env)
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self.patience.connect)
        connection.connect()
        if connection.sock is not None:
            connection.sock.settimeout(self.patience.read)
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(self.patience.read))
        return connection

    def drop(self, origin: tuple[str, str]) -> None:
        """Close the connection to an origin, whose state is unknown."""
        connection = self._connections.pop(origin, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Close every connection."""
        for origin in list(self._connections):
            self.drop(origin)


class _ProxiedBody:
    def __init__(self, response: httpx.Response, url: str) -> None:
        self._response = response
        self._url = url
        self._pieces = response.iter_raw(PIECE)
        self._rest = memoryview(b"")
        self._some = False

    def readinto(self, buffer: memoryview) -> int:
        import httpx

        while not self._rest:
            try:
                self._rest = memoryview(next(self._pieces))
            except StopIteration:
                return 0
            except (httpx.HTTPError, httpx.StreamError) as error:
                raise unreachable(self._url, error, progress=self._some) from error
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        self._some = True
        return count

    def close(self) -> None:
        self._response.close()


class ProxiedTransport:
    """httpx, which finds the proxy in the environment."""

    def __init__(self, *, patience: Patience) -> None:
        import httpx

        self._client = httpx.Client(
            timeout=httpx.Timeout(patience.read, connect=patience.connect),
            follow_redirects=False,
            trust_env=True,
        )

    def send(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> Response:
        """Send one request through the proxy."""
        import httpx

        # httpx adds its own Accept-Encoding and would be asked for forms that only this client decodes.
        sent = {"Accept-Encoding": "identity", **headers}
        try:
            answer = self._client.send(
                self._client.build_request(method, url, headers=sent, content=content), stream=True
            )
        except httpx.HTTPError as error:
            raise unreachable(url, error) from error
        names = {name.lower(): value for name, value in answer.headers.items()}
        return Response(answer.status_code, names, url, _ProxiedBody(answer, url))

    def close(self) -> None:
        """Close every connection."""
        self._client.close()


def _timeval(seconds: float) -> bytes:
    """Return the kernel's form of a time (socket(7), SO_RCVTIMEO)."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def proxy_applies(url: str) -> bool:
    """Tell whether the environment names a proxy for this address (urllib.request's rules)."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    proxies = getproxies()
    if not (proxies.get(parts.scheme) or proxies.get("all")):
        return False
    return not proxy_bypass(parts.netloc)


def tls_context(*, trust_env: bool) -> ssl.SSLContext:
    """The TLS settings httpx would use: its CA bundle, or SSL_CERT_FILE and SSL_CERT_DIR."""
    global _tls
    if _tls is None:
        import httpx

        _tls = httpx.create_ssl_context(trust_env=trust_env)
    return _tls


_tls: ssl.SSLContext | None = None


def open_transport(url: str, *, patience: Patience, trust_env: bool = True) -> Transport:
    """Choose the way to a server: httpx when a proxy applies to `url`, else direct connections."""
    if trust_env and proxy_applies(url):
        return ProxiedTransport(patience=patience)
    return DirectTransport(patience=patience, trust_env=trust_env)


def follow(
    transport: Transport,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    content: bytes | None = None,
    token: str | None = None,
) -> Response:
    """Send a request and follow its redirects; the token goes to the first origin alone.

    Raise Transient for answers worth a retry, ServerRefused for other errors, ServerProtocol for a
    redirect that leads nowhere or from https to http. A response that is returned has a status below 400.
    """
    origin = urlsplit(url)[:2]
    first = url
    for _ in range(MAX_REDIRECTS + 1):
        sent = dict(headers)
        if token is not None and urlsplit(url)[:2] == origin:
            sent["Authorization"] = f"Bearer {token}"
        response = transport.send(method, url, sent, content)
        if response.status in (301, 302, 303, 307, 308):
            location = response.headers.get("location", "")
            with response:
                pass
            target = urljoin(url, location)
            scheme = urlsplit(target).scheme
            if (
                not location
                or scheme not in ("http", "https")
                or (origin[0] == "https" and scheme != "https")
            ):
                raise ServerProtocol(
                    "the server redirects where this client does not follow", where=url, found=location
                )
            url = target
            continue
        if response.status < 400:
            return response
        with response:
            raise _refusal(response)
    raise ServerProtocol("the server redirects without end", where=first, expected=f"<= {MAX_REDIRECTS}")


def _refusal(response: Response) -> Exception:
    data = bytearray()
    try:
        for piece in response.pieces(1 << 16):
            data += piece
            if len(data) > MAX_PROBLEM:
                break
    except Transient:
        data.clear()
    try:
        problem = json.loads(data)
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {}
    what = str(problem.get("detail") or problem.get("title") or f"the server answered {response.status}")
    refusal = ServerRefused(what, problem=problem, code=response.status, where=response.url)
    if response.status in RETRIED_STATUS:
        return Transient(refusal, retry_after=_seconds(response.headers.get("retry-after")))
    return refusal


def _seconds(text: str | None) -> float | None:
    """Read Retry-After (RFC 9110, 10.2.3): seconds, or a date."""
    if text is None:
        return None
    if text.strip().isdigit():
        return float(text)
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
