"""A depot over HTTP, as builders see it: uploads, built modules, pin sets, and builds to claim."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Final
from urllib.parse import quote

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from kernel_depot.builder.cache import BuiltModule, room
from kernel_depot.builder.compile import Stopped
from kernel_depot.builder.errors import DepotRefused, DepotUnreachable
from kernel_depot.platform import Arch, CudaTag

_TIMEOUT = httpx.Timeout(60.0, connect=15.0)
_PATIENCE: Final = 60.0
"""Seconds for which a call is tried again while the depot does not answer."""

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_ROUNDS = 5  # how often an upload is looked at again for parts that went missing
_KEYS = 500  # keys asked about in one request

Progress = Callable[[str, int, int | None], None]
"""Told a name, the bytes so far and the total."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A build that this builder holds, for `lease` seconds after each renewal."""

    id: str
    word: str
    plan: str
    options: dict[str, Any]
    lease: float


class Depot:
    """Calls to one depot with one token; usable from any thread. Close it after use.

    A call raises DepotRefused with the depot's own problem, and DepotUnreachable when it did not answer
    for `patience` seconds.
    """

    def __init__(self, url: str, *, token: str | None, patience: float = _PATIENCE) -> None:
        if re.match(r"https?://[^/\s]+", url) is None:
            raise DepotUnreachable(
                f"{url!r} is not a depot's address", expected="http://HOST:PORT or https://HOST"
            )
        self.url = url.rstrip("/")
        self._patience = patience
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT)

    def __enter__(self) -> Depot:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def require_admin(self) -> None:
        """Raise DepotRefused unless the token may publish: said before hours are spent on compiling."""
        try:
            self._ask("GET", f"/v1/uploads/{'0' * 64}")
        except DepotRefused as error:
            if not error.says("upload-unknown"):
                raise

    def upload(
        self, path: Path, *, sha256: str, name: str, progress: Progress, stop: Event | None = None
    ) -> None:
        """Bring a file's bytes into the depot's store; what is there already is not sent again.

        Raise Stopped when `stop` is set on the way: the next upload of these bytes goes on there.
        """
        size = path.stat().st_size
        state = self._json("POST", "/v1/uploads", json={"sha256": sha256, "size": size})
        for _ in range(_ROUNDS):
            if state["state"] == "stored":
                return
            part_size, missing = int(state["part_size"]), list(state["missing"])
            done = size - sum(min(part_size, size - number * part_size) for number in missing)
            with path.open("rb") as file:
                for number in missing:
                    if stop is not None and stop.is_set():
                        raise Stopped(f"the upload of {name} was stopped")
                    file.seek(number * part_size)
                    data = file.read(part_size)
                    self._send_part(sha256, number, data)
                    done += len(data)
                    progress(name, done, size)
            try:
                self._json("POST", f"/v1/uploads/{sha256}/complete")
                return
            except DepotRefused as error:
                if not error.says("upload-incomplete"):
                    raise
            state = self._json("GET", f"/v1/uploads/{sha256}")
        raise DepotRefused(
            f"parts of {name} went missing again and again", where=f"{self.url}/v1/uploads/{sha256}"
        )

    def _send_part(self, sha256: str, number: int, data: bytes) -> None:
        digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
        headers = {"content-type": "application/octet-stream", "content-digest": f"sha-256=:{digest}:"}
        self._ask("PUT", f"/v1/uploads/{sha256}/parts/{number}", content=data, headers=headers)

    def find(self, keys: Sequence[str]) -> dict[str, BuiltModule]:
        """Return the built modules that the depot has under these keys."""
        found: dict[str, BuiltModule] = {}
        for start in range(0, len(keys), _KEYS):
            body = {"keys": list(keys[start : start + _KEYS])}
            for row in self._json("POST", "/v1/built-modules/find", json=body)["modules"]:
                try:
                    built = BuiltModule.from_json(row["record"])
                except (KeyError, TypeError):  # of a newer product: its keys are others anyway
                    continue
                found[built.key] = built
        return found

    def fetch(self, built: BuiltModule, target: Path) -> bool:
        """Write a built module's bytes to `target`; False when they are not those of its record."""
        data = self._ask("GET", f"/v1/blobs/sha256/{built.sha256}").content
        if hashlib.sha256(data).hexdigest() != built.sha256:
            return False
        with room(str(target)):
            target.write_bytes(data)
        return True

    def offer(self, built: BuiltModule, library: Path, *, stop: Event | None = None) -> None:
        """Give the depot a built module for others to take."""
        name = f"{built.uri}.so"
        self.upload(library, sha256=built.sha256, name=name, progress=lambda *_: None, stop=stop)
        self._json("PUT", f"/v1/built-modules/{built.key}", json=built.to_json())

    def put_provenance(self, sha256: str, statement: Mapping[str, Any]) -> None:
        """Post the statement of an uploaded wheel."""
        self._ask("PUT", f"/v1/provenance/{sha256}", json=dict(statement))

    def propose(self, name: str, pins: Mapping[str, Any]) -> dict[str, Any]:
        """Propose a revision of the pin set `name`; return what the depot says of it."""
        return self._json("POST", f"/v1/pins/{quote(name, safe='')}/proposals", json={"pins": dict(pins)})

    def materialize(self, revision: str) -> str:
        """Have a revision's wheels brought in; return the job's id."""
        return str(self._json("POST", "/v1/materialize", json={"revisions": [revision]})["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """Return a job."""
        return self._json("GET", f"/v1/jobs/{job_id}")

    def revisions(self, name: str) -> dict[str, Any]:
        """Return the revisions of a pin set, the newest first."""
        return self._json("GET", f"/v1/pins/{quote(name, safe='')}/revisions")

    def activate(self, name: str, revision: str, *, expected: str | None = None) -> dict[str, Any]:
        """Let the pin set's name mean a revision; with `expected`, only if it means that one now."""
        body = {"revision": revision, "expected": expected}
        return self._json("POST", f"/v1/pins/{quote(name, safe='')}/activate", json=body)

    def queue(self, plan: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Queue a plan's TOML for a builder; return the job."""
        return self._json("POST", "/v1/builds", json={"plan": plan, **options})

    def claim(self, *, builder: str, arch: Arch, cuda: Sequence[CudaTag]) -> Claim | None:
        """Claim a build for this machine, None when none waits."""
        body = {"builder": builder, "arch": str(arch), "cuda": [str(tag) for tag in cuda]}
        answer = self._ask("POST", "/v1/builds/claim", json=body, patience=0.0)
        if answer.status_code == 204:
            return None
        members = answer.json()
        return Claim(
            members["id"], members["claim"], members["plan"], members["options"], members["lease_seconds"]
        )

    def renew(self, claim: Claim, modules: Sequence[Mapping[str, Any]]) -> None:
        """Hold a build for another lease, and tell how far its modules are."""
        self._tell("heartbeat", claim, modules, patience=0.0)

    def release(self, claim: Claim, modules: Sequence[Mapping[str, Any]]) -> None:
        """Give a build back to the queue."""
        self._tell("release", claim, modules, patience=5.0)

    def finish(
        self,
        claim: Claim,
        modules: Sequence[Mapping[str, Any]],
        *,
        wheels: Sequence[Mapping[str, Any]] = (),
        problem: Mapping[str, Any] | None = None,
    ) -> None:
        """Say how a build ended."""
        more = {"wheels": list(wheels), "problem": problem}
        self._tell("finish", claim, modules, patience=self._patience, **more)

    def _tell(
        self, what: str, claim: Claim, modules: Sequence[Mapping[str, Any]], *, patience: float, **more: Any
    ) -> None:
        body = {"claim": claim.word, "modules": list(modules), **more}
        self._ask("POST", f"/v1/builds/{claim.id}/{what}", json=body, patience=patience)

    def _json(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        answer = self._ask(method, path, **request)
        try:
            members = answer.json()
        except ValueError:
            members = None
        if not isinstance(members, dict):
            raise DepotRefused(
                "this is no depot: its answer is no JSON object",
                where=f"{method} {self.url}{path}",
                remedy="check the URL",
            )
        return members

    def _ask(
        self, method: str, path: str, *, patience: float | None = None, **request: Any
    ) -> httpx.Response:
        retrying = Retrying(
            retry=retry_if_exception_type(DepotUnreachable),
            stop=stop_after_delay(self._patience if patience is None else patience),
            wait=wait_random_exponential(multiplier=0.5, max=5.0),
            reraise=True,
        )
        return retrying(self._once, method, path, **request)

    def _once(self, method: str, path: str, **request: Any) -> httpx.Response:
        where = f"{method} {self.url}{path}"
        try:
            answer = self._client.request(method, self.url + path, **request)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DepotUnreachable(
                f"the depot does not answer: {str(error) or type(error).__name__}",
                where=where,
                remedy="check the URL, the network and the server; an upload goes on where it was",
            ) from error
        if answer.is_success:
            return answer
        try:
            members = answer.json()
        except ValueError:
            members = None
        problem: dict[str, Any] = members if isinstance(members, dict) else {}
        kind = DepotUnreachable if answer.status_code in _TRANSIENT else DepotRefused
        raise kind(
            f"the depot answered {answer.status_code}: {problem.get('detail') or answer.reason_phrase}",
            where=where,
            expected=problem.get("expected"),
            found=problem.get("found"),
            remedy=problem.get("remedy"),
            server_type=problem.get("type"),
        )
