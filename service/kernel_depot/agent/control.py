"""What an agent says to the server and hears from it: registration, desired state, reports."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

from kernel_depot.digest import is_sha256
from kernel_depot.worker.client import Endpoint
from kernel_depot.worker.errors import ServerProtocol
from kernel_depot.worker.transport import Patience, Transient, Transport, follow

_CALM: Final = Patience(attempts=1)
"""The agent itself decides when to try again."""

_LONGEST_SPREAD: Final = 300.0


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A bundle that a warmup wants in the cache."""

    warmup: str
    bundle: str


@dataclass(frozen=True, slots=True)
class Desired:
    """What the node is to have, and the tag to ask with next time. `bundle` None: nothing fits.

    `spread` is for how many seconds at most to wait before beginning, where many nodes begin at once.
    """

    bundle: str | None
    complete: bool
    problem: dict[str, Any] | None
    prefetch: tuple[Prefetch, ...]
    etag: str
    spread: float = 0.0


class Control:
    """One connection to the server; not for several threads. Errors are the transport's, tried once.

    Raise ServerRefused, ServerUnreachable, ServerProtocol.
    """

    def __init__(self, endpoint: Endpoint, *, node: str, longest_wait: float) -> None:
        patience = replace(
            _CALM, connect=endpoint.patience.connect, read=endpoint.patience.read + longest_wait
        )
        self._endpoint = replace(endpoint, patience=patience)
        self._path = f"/v1/nodes/{quote(node, safe='')}"
        self._transport: Transport | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def register(self, facts: dict[str, Any]) -> None:
        """Tell what this node is."""
        self._send("PUT", self._path, body=facts)

    def desired(self, *, etag: str | None, wait: float, fresh: bool = False) -> Desired | None:
        """Ask what the node is to have, waiting up to `wait` seconds; None: nothing is new."""
        headers = {"If-None-Match": etag} if etag is not None else {}
        if fresh:
            headers["Cache-Control"] = "no-cache"
        url = self._endpoint.address(f"{self._path}/desired", wait=f"{wait:.1f}" if wait else None)
        status, headers, members = self._exchange("GET", url, headers=headers)
        if status == 304:
            return None
        try:
            bundle = members["bundle"]
            if bundle is not None and not is_sha256(bundle):
                raise ValueError(bundle)
            return Desired(
                bundle,
                bool(members["complete"]),
                members["problem"],
                tuple(Prefetch(item["warmup"], item["bundle"]) for item in members["prefetch"]),
                headers["etag"],
                min(max(float(headers.get("kernel-depot-spread", 0)), 0.0), _LONGEST_SPREAD),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerProtocol(
                "the server's answer says nothing of what this node is to have", where=url, found=str(error)
            ) from error

    def report(self, **members: Any) -> None:
        """Tell what the node is doing."""
        self._send("POST", f"{self._path}/report", body=members)

    def smoke(self, **members: Any) -> None:
        """Bring smoke results."""
        self._send("POST", f"{self._path}/smoke", body=members)

    def _send(self, method: str, path: str, *, body: dict[str, Any]) -> None:
        content = json.dumps({key: value for key, value in body.items() if value is not None}).encode()
        self._exchange(
            method,
            self._endpoint.address(path),
            headers={"Content-Type": "application/json"},
            content=content,
        )

    def _exchange(
        self, method: str, url: str, *, headers: dict[str, str], content: bytes | None = None
    ) -> tuple[int, dict[str, str], dict[str, Any]]:
        if self._transport is None:
            self._transport = self._endpoint.open()
        try:
            response = follow(
                self._transport,
                method,
                url,
                headers={"Accept": "application/json", **headers},
                content=content,
                token=self._endpoint.token,
            )
            with response:
                if response.status in (204, 304):
                    return response.status, dict(response.headers), {}
                members = response.json()
        except Transient as failure:
            self.close()
            raise failure.cause from failure
        if not isinstance(members, dict):
            raise ServerProtocol("the server's answer is no JSON object", where=url)
        return response.status, dict(response.headers), members
