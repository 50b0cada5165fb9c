"""The service as a node sees it: resolve a platform, read a manifest. Blobs are in `blobs` and `stream`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from kernel_depot.digest import is_sha256
from kernel_depot.platform import Platform
from kernel_depot.worker.errors import ServerProtocol, WorkerError
from kernel_depot.worker.transport import Patience, Response, Transport, follow, open_transport, retrying


class AddressInvalid(WorkerError):
    """A server address that is no http or https URL."""

    slug = "address-invalid"
    title = "Not a server's address"
    status = 400


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The bundle asked about is still the one to have."""

    digest: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The bundle for a platform, named. `members` is the whole answer, with its trace."""

    digest: str
    members: dict[str, Any]


Resolution = Unchanged | Resolved


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server is, and what opens it. `trust_env`: proxies and CA bundles from the environment."""

    url: str
    token: str | None = None
    trust_env: bool = True
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AddressInvalid(
                f"{self.url!r} is not a server's address", expected="http://HOST:PORT or https://HOST"
            )

    def address(self, path: str, **query: str | None) -> str:
        """The URL of a resource."""
        text = urlencode({key: value for key, value in query.items() if value is not None})
        return self.url.rstrip("/") + path + (f"?{text}" if text else "")

    def open(self) -> Transport:
        """Open a way to the server for one thread."""
        return open_transport(self.url, patience=self.patience, trust_env=self.trust_env)


class Client:
    """Control requests over one transport; every call retries what is worth it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._transport = endpoint.open()

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def resolve(
        self,
        platform: Platform,
        *,
        modules: tuple[str, ...] | None = None,
        groups: tuple[str, ...] = (),
        pins: tuple[str, ...] = (),
        known: str | None = None,
    ) -> Resolution:
        """Ask which bundle the platform gets; `known` is the digest the node already has.

        Raise ServerRefused (nothing fits, unknown module or group, no permission), ServerUnreachable.
        """
        url = self.endpoint.address(
            "/v1/resolve",
            cuda=str(platform.cuda),
            arch=str(platform.arch),
            sm=str(platform.sm) if platform.sm else None,
            modules=",".join(modules) if modules is not None else None,
            group=",".join(groups) or None,
            pins=",".join(pins) or None,
        )
        headers = {"Accept": "application/json"}
        if known is not None:
            headers["If-None-Match"] = f'"{known}"'

        def attempt() -> Resolution:
            with self._get(url, headers) as response:
                if response.status == 304:
                    if known is None:
                        raise ServerProtocol("the server says unchanged though nothing was named", where=url)
                    return Unchanged(known)
                members = response.json()
            digest = members.get("digest") if isinstance(members, dict) else None
            if not isinstance(digest, str) or not is_sha256(digest):
                raise ServerProtocol("the server names no bundle", where=url, found=digest)
            return Resolved(digest, members)

        return retrying(attempt, patience=self.endpoint.patience)

    def manifest(self, digest: str) -> bytes:
        """Read a bundle's bytes; the caller checks them. Raise ServerRefused or ServerUnreachable."""
        url = self.endpoint.address(f"/v1/bundles/{digest}")

        def attempt() -> bytes:
            with self._get(url, {"Accept": "application/json", "Accept-Encoding": "zstd"}) as response:
                return read_decoded(response)

        return retrying(attempt, patience=self.endpoint.patience)

    def ready(self) -> dict[str, Any]:
        """Ask whether the server is ready to serve. Raise ServerRefused or ServerUnreachable."""

        def attempt() -> dict[str, Any]:
            with self._get(self.endpoint.address("/readyz"), {"Accept": "application/json"}) as response:
                answer = response.json()
                return answer if isinstance(answer, dict) else {}

        return retrying(attempt, patience=Patience(attempts=1, connect=self.endpoint.patience.connect))

    def _get(self, url: str, headers: dict[str, str]) -> Response:
        return follow(self._transport, "GET", url, headers=headers, token=self.endpoint.token)


def read_decoded(response: Response) -> bytes:
    """Read a small body whole, undoing zstd. Raise Transient or ServerProtocol."""
    data = response.read()
    encoding = response.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return data
    if encoding != "zstd":
        raise ServerProtocol(
            "the server sends an encoding that was not asked for", where=response.url, found=encoding
        )
    import zstandard

    try:
        return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    except zstandard.ZstdError as error:
        raise ServerProtocol("the body is no zstd stream", where=response.url, found=str(error)) from error
