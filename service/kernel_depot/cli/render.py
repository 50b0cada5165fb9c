"""How failures and reports become text or JSON on the terminal: the one place that does it."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from kernel_depot.errors import PROBLEM_NAMESPACE, DepotError

_WORDS = {"detail", "title", "status", "type", "where", "expected", "found", "remedy"}


def show_failure(error: BaseException, *, as_json: bool, debug: bool) -> None:
    """Print a failure: JSON on standard output when asked for, else text on standard error."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    problem = problem_of(error)
    if as_json:
        print_json(problem)
    else:
        print(problem_text(problem, debug_hint=not debug), file=sys.stderr)


def problem_of(error: BaseException) -> dict[str, Any]:
    """Return the RFC 9457 members of any exception; one we did not foresee is `internal`."""
    if isinstance(error, DepotError):
        return error.problem()
    return {
        "type": PROBLEM_NAMESPACE + DepotError.slug,
        "title": DepotError.title,
        "status": DepotError.status,
        "detail": f"{type(error).__name__}: {error}".splitlines()[0],
    }


def problem_text(problem: dict[str, Any], *, debug_hint: bool = True) -> str:
    """Return a problem as lines for people; its first line alone says what failed."""
    lines = [f"error: {problem.get('detail', problem.get('title'))}"]
    for member, label in (
        ("where", "where"),
        ("expected", "expected"),
        ("found", "found"),
        ("remedy", "what to do"),
        ("type", "type"),
    ):
        if (value := problem.get(member)) is not None:
            lines.append(f"  {label}: {_inline(value)}")
    for member, value in problem.items():
        if member in _WORDS:
            continue
        if isinstance(value, list) and value:
            lines.append(f"  {member}:")
            lines.extend(f"    - {_inline(item)}" for item in value)
        elif not isinstance(value, list):
            lines.append(f"  {member}: {_inline(value)}")
    if debug_hint and problem.get("type") == PROBLEM_NAMESPACE + DepotError.slug:
        lines.append("  the whole traceback: --debug before the command, or KERNEL_DEPOT_DEBUG=1")
    return "\n".join(lines)


def print_json(value: object) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def size_text(size: float) -> str:
    """Return a byte count for people, in binary units: `151.2 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_inline(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_inline(item) for item in value)
    return str(value)
