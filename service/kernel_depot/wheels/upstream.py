"""One HTTP answer from upstream: hosts and addresses checked at every hop, errors told apart.

httpx follows no redirect and resolves no name here: each hop's host is checked against the allowed ones
and resolved once, the request goes to the checked address with the host's own name in TLS (SNI,
certificate) and `Host`, and connections are never reused, so what was checked is what is talked to.
"""

from __future__ import annotations

import email.utils
import logging
import ssl
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urljoin, urlsplit, urlunsplit

from kernel_depot import __version__
from kernel_depot.wheels.addresses import checked_addresses, require_host, require_literal
from kernel_depot.wheels.fetch_problems import (
    CaBundleUnusable,
    DownloadTimeout,
    FetchError,
    ProxyUnusable,
    RedirectRefused,
    UpstreamDropped,
    UpstreamInvalid,
    UpstreamStatus,
    UpstreamUnreachable,
    UpstreamUntrusted,
    UrlRefused,
    shown,
)

if TYPE_CHECKING:
    import httpx

    from kernel_depot.wheels.policy import FetchPolicy

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 507, 508, 509, 520, 521, 522, 523, 524, 529})


@dataclass(frozen=True, slots=True)
class Answer:
    """A status that is not an error, its headers, and the body not read yet."""

    status: int
    headers: Mapping[str, str]
    url: str
    _response: httpx.Response

    def pieces(self) -> Iterator[bytes]:
        """Yield the body's bytes as sent. Raise DownloadTimeout or UpstreamDropped."""
        import httpx

        try:
            yield from self._response.iter_raw()
        except httpx.TimeoutException as error:
            raise DownloadTimeout(
                "no byte came within the read timeout", where=shown(self.url), retryable=True
            ) from error
        except httpx.HTTPError as error:
            raise UpstreamDropped(f"the connection broke: {error}", where=shown(self.url)) from error


def check_url(url: str, policy: FetchPolicy, *, origin: SplitResult | None = None) -> SplitResult:
    """Check all of a URL but its host's addresses; `origin` is the URL that redirected to it.

    Raise UrlRefused (RedirectRefused for a redirect) or HostNotAllowed.
    """
    refuse: type[FetchError] = UrlRefused if origin is None else RedirectRefused
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname, parts.port
    except ValueError as error:
        raise refuse(f"the URL cannot be read: {error}", found=shown(url)) from error
    secure = not policy.allow_http or (origin is not None and origin.scheme == "https")
    schemes = ("https",) if secure else ("https", "http")
    if parts.scheme not in schemes:
        raise refuse(
            "the URL is not https" if origin is None else "a redirect leaves https",
            where=shown(url if origin is None else urlunsplit(origin)),
            expected=" or ".join(schemes),
            found=shown(url) if origin is not None else parts.scheme or "no scheme",
            remedy="set allow_http if this is a mirror of your own" if origin is None else None,
        )
    if not host or not url.isascii() or any(ord(char) <= 32 or ord(char) == 127 for char in url):
        raise refuse("the URL has no host, or characters that no URL has", where=shown(url))
    if parts.username is not None or parts.password is not None:
        raise refuse(
            "the URL carries credentials",
            where=shown(url),
            remedy="remove the user name and password from the URL",
        )
    require_host(host, policy.allowed_hosts, where=shown(url))
    return parts


class Upstream:
    """The connections of one download; use as a context manager."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._stack = ExitStack()
        self._clients: dict[str | None, httpx.Client] = {}
        self._trust: ssl.SSLContext | None = None

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def get(self, url: str, headers: Mapping[str, str], *, accept: frozenset[int]) -> Iterator[Answer]:
        """Request `url`, follow redirects the policy allows, and yield an answer whose status is in `accept`.

        Raise UrlRefused, HostNotAllowed, AddressRefused, RedirectRefused, UpstreamUnreachable,
        UpstreamUntrusted, ProxyUnusable, DownloadTimeout or UpstreamStatus.
        """
        parts, chain = check_url(url, self._policy), [shown(url)]
        while True:
            current = urlunsplit(parts)
            response = self._send(parts, headers)
            try:
                if response.status_code in accept:
                    yield Answer(response.status_code, response.headers, current, response)
                    return
                if response.status_code not in _REDIRECTS:
                    raise _status_error(response, current)
                target = response.headers.get("location")
            finally:
                response.close()
            if not target:
                raise RedirectRefused("a redirect names no target", where=shown(current))
            try:
                following = urljoin(current, target)
            except ValueError as error:
                raise RedirectRefused(f"a redirect cannot be read: {error}", where=shown(current)) from error
            chain.append(shown(following))
            if len(chain) > self._policy.max_redirects + 1:
                raise RedirectRefused(
                    f"more than {self._policy.max_redirects} redirects",
                    where=chain[0],
                    found=" -> ".join(chain),
                )
            parts = check_url(following, self._policy, origin=parts)

    def _send(self, parts: SplitResult, headers: Mapping[str, str]) -> httpx.Response:
        """Send one request to a checked address, or through the proxy the environment names."""
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        where = shown(urlunsplit(parts))
        proxy = self._proxy_for(parts.scheme, host)
        if proxy is not None:
            require_literal(host, allow_private=self._policy.allow_private_addresses, where=where)
            return self._request(self._client(proxy), urlunsplit(parts), headers, where=where, host=host)
        addresses = checked_addresses(
            host, port, allow_private=self._policy.allow_private_addresses, where=where
        )
        for address in addresses[:-1]:
            try:
                return self._request(
                    self._client(None), _to_address(parts, address, port), headers, where=where, host=host
                )
            except UpstreamUnreachable:
                continue
        return self._request(
            self._client(None), _to_address(parts, addresses[-1], port), headers, where=where, host=host
        )

    def _request(
        self, client: httpx.Client, url: str, headers: Mapping[str, str], *, where: str, host: str
    ) -> httpx.Response:
        import httpx

        client.cookies.clear()
        try:
            request = client.build_request(
                "GET",
                url,
                headers={**headers, "Host": urlsplit(where).netloc},
                extensions={"sni_hostname": host},
            )
        except httpx.InvalidURL as error:
            raise UrlRefused(f"the URL cannot be read: {error}", where=where) from error
        try:
            return client.send(request, stream=True)
        except httpx.ConnectTimeout as error:
            raise UpstreamUnreachable("connecting took too long", where=where) from error
        except httpx.TimeoutException as error:
            raise DownloadTimeout("no answer within the read timeout", where=where, retryable=True) from error
        except httpx.ProxyError as error:
            raise UpstreamUnreachable(f"the proxy refused: {error}", where=where) from error
        except httpx.ConnectError as error:
            if _is_certificate_failure(error):
                raise UpstreamUntrusted(
                    f"the server's certificate is not trusted: {error}",
                    where=where,
                    remedy="name the CA that signs for it in SSL_CERT_FILE or REQUESTS_CA_BUNDLE",
                ) from error
            raise UpstreamUnreachable(f"no connection: {error}", where=where) from error
        except (httpx.HTTPError, ValueError) as error:
            # ValueError: headers that the libraries below fail to read, such as odd redirect targets.
            raise UpstreamUnreachable(f"no answer that can be read: {error}", where=where) from error

    def _proxy_for(self, scheme: str, host: str) -> str | None:
        if not self._policy.trust_env:
            return None
        proxies = urllib.request.getproxies()
        proxy = proxies.get(scheme) or proxies.get("all")
        if not proxy or urllib.request.proxy_bypass(host):
            return None
        return proxy if "://" in proxy else f"http://{proxy}"

    def _client(self, proxy: str | None) -> httpx.Client:
        import httpx

        if proxy in self._clients:
            return self._clients[proxy]
        policy = self._policy
        # httpx logs each URL with its query, which is where signatures are.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        if self._trust is None:
            try:
                self._trust = httpx.create_ssl_context(trust_env=policy.trust_env)
                bundle = policy.ca_bundle
                if bundle is not None and bundle.is_dir():
                    self._trust.load_verify_locations(capath=bundle)
                elif bundle is not None:
                    self._trust.load_verify_locations(cafile=bundle)
            except OSError as error:
                raise CaBundleUnusable(
                    f"the CA bundle cannot be used: {error}",
                    where=str(policy.ca_bundle) if policy.ca_bundle is not None else None,
                    remedy="check the setting ca_bundle, SSL_CERT_FILE and SSL_CERT_DIR",
                ) from error
        try:
            client = httpx.Client(
                verify=self._trust,
                proxy=proxy,
                trust_env=False,
                follow_redirects=False,
                timeout=httpx.Timeout(policy.read_timeout, connect=policy.connect_timeout),
                limits=httpx.Limits(max_keepalive_connections=0),
                headers={"User-Agent": f"kernel-depot/{__version__}", "Accept-Encoding": "identity"},
            )
        except (ValueError, ImportError, httpx.InvalidURL) as error:
            raise ProxyUnusable(
                "the proxy that the environment names cannot be used",
                expected="an http or https proxy",
                found=shown(proxy or ""),
            ) from error
        self._clients[proxy] = self._stack.enter_context(client)
        return client


def _to_address(parts: SplitResult, address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return urlunsplit((parts.scheme, f"{host}:{port}", parts.path or "/", parts.query, ""))


def _is_certificate_failure(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _status_error(response: httpx.Response, url: str) -> FetchError:
    status = response.status_code
    if status < 400:
        return UpstreamInvalid(f"HTTP {status} answers no such request", where=shown(url), found=status)
    remedy = {
        401: "the file needs credentials, which downloads do not send",
        403: "the host refuses this machine; check the URL or use a mirror",
        404: "check the pin's URL",
        410: "the file was taken away; use a mirror",
        407: "the proxy wants credentials",
    }.get(status)
    return UpstreamStatus(
        f"HTTP {status} {response.reason_phrase}".rstrip(),
        where=shown(url),
        found=status,
        remedy=remedy,
        retryable=status in _TRANSIENT,
        retry_after=retry_after(response.headers.get("retry-after")),
    )


def retry_after(value: str | None, *, now: float | None = None) -> float | None:
    """Return the seconds a Retry-After header asks to wait: a number or an HTTP date (RFC 9110, 10.2.3).

    `now` is seconds since the epoch, by default the clock. A header that cannot be read is None.
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    return max(0.0, when.timestamp() - (time.time() if now is None else now))
