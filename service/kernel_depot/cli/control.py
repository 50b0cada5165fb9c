"""Calls of the admin's commands to a server; its refusals are shown as the server's own problems."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
import typer

from kernel_depot.worker.errors import ServerRefused, ServerUnreachable

ServerOption = Annotated[str, typer.Option("--server", envvar="KERNEL_DEPOT_SERVER", help="The depot's URL.")]
TokenOption = Annotated[
    str | None, typer.Option("--token", envvar="KERNEL_DEPOT_TOKEN", help="A bearer token of the depot.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WhyOption = Annotated[
    str | None, typer.Option("--why", "-m", help="Kept in the audit log.", show_default=False)
]
_TIMEOUT = httpx.Timeout(60.0, connect=15.0)


class Control:
    """Calls to one server with one token. Raise ServerUnreachable, ServerRefused."""

    def __init__(self, url: str, *, token: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ServerUnreachable(
                f"{url!r} is not a server's address", expected="http://HOST:PORT or https://HOST", found=url
            )
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Any:
        """Read a resource."""
        return self._answer("GET", path, params=_given(query))

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        """Make a change."""
        return self._answer("POST", path, params=_given(query), json=body if body is not None else {})

    def post_toml(self, path: str, text: str, **query: Any) -> Any:
        """Post a pin set."""
        headers = {"content-type": "application/toml"}
        return self._answer("POST", path, params=_given(query), content=text.encode(), headers=headers)

    def delete(self, path: str, **query: Any) -> None:
        """Remove a resource."""
        self._answer("DELETE", path, params=_given(query))

    @contextmanager
    def events(self, path: str) -> Iterator[Iterator[dict[str, Any]]]:
        """Follow a stream of server-sent events; gives the JSON of each event's data."""
        timeout = httpx.Timeout(60.0, connect=15.0, read=120.0)
        with (
            _reaching(self.url + path),
            self._client.stream("GET", self.url + path, timeout=timeout) as answer,
        ):
            if not answer.is_success:
                answer.read()
                raise _refusal(answer)
            yield _data(answer.iter_lines())

    def _answer(self, method: str, path: str, **request: Any) -> Any:
        with _reaching(self.url + path):
            answer = self._client.request(method, self.url + path, **request)
        if not answer.is_success:
            raise _refusal(answer)
        return answer.json() if answer.content else None


def _given(query: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in query.items() if value is not None}


def _data(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Give the data of each event (HTML standard, 9.2.6)."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield json.loads("\n".join(data))
            data = []


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerUnreachable(
            f"the server does not answer: {str(error) or type(error).__name__}",
            where=url,
            remedy="check the URL, the network and the server",
        ) from error


def _refusal(answer: httpx.Response) -> ServerRefused:
    try:
        problem = answer.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {}
    what = str(problem.get("detail") or f"the server answered {answer.status_code}")
    return ServerRefused(what, problem=problem, code=answer.status_code, where=str(answer.url))
