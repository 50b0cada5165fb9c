"""Benchmark reports to and from a depot."""

from __future__ import annotations

from typing import Any

import httpx

from kernel_depot.opponent.errors import ReportRefused
from kernel_depot.opponent.results import checked

_TIMEOUT = 60.0


def post(server: str, report: dict[str, Any], *, token: str | None) -> str:
    """Post a report (scope `node`); return its digest there. Raise ReportRefused."""
    return str(_ask("POST", f"{server.rstrip('/')}/v1/benchmarks", token=token, json=report)["digest"])


def fetch(server: str, digest: str, *, token: str | None) -> dict[str, Any]:
    """Read a report by its digest. Raise ReportRefused, ReportInvalid."""
    url = f"{server.rstrip('/')}/v1/benchmarks/{digest}"
    return checked(_ask("GET", url, token=token, json=None), where=url)


def _ask(method: str, url: str, *, token: str | None, json: dict[str, Any] | None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.request(method, url, json=json, headers=headers, timeout=_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ReportRefused(
            f"the server cannot be asked: {error}", where=url, remedy="check the URL and the network"
        ) from error
    try:
        members = answer.json()
    except ValueError:
        members = None
    if answer.is_success and isinstance(members, dict):
        return members
    problem = members if isinstance(members, dict) else {}
    raise ReportRefused(
        f"the server answered {answer.status_code}: {problem.get('detail') or answer.reason_phrase}",
        where=url,
        expected=problem.get("expected"),
        found=problem.get("found"),
        remedy=problem.get("remedy"),
        server_type=problem.get("type"),
    )
