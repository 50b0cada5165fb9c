"""Outcomes of smoke checks, and the one table of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Status(str, Enum):
    """How a check ended: `refused` is a file not fit to be loaded, `crashed` a child killed by loading."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    SKIPPED = "skipped"
    CRASHED = "crashed"
    REFUSED = "refused"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check: of which kind, of what, how it ended and why; `seconds` of wall time.

    `expected` and `found` are of a check that compares.
    """

    check: str
    subject: str
    status: Status
    detail: str = ""
    seconds: float = 0.0
    expected: str | None = None
    found: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON members."""
        return {
            "check": self.check,
            "subject": self.subject,
            "status": self.status.value,
            "detail": self.detail,
            "seconds": round(self.seconds, 4),
            "expected": self.expected,
            "found": self.found,
        }


@dataclass(frozen=True, slots=True)
class SmokeReport:
    """Every outcome for one bundle on this host."""

    digest: str
    platform: str
    gpu: str | None
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """Tell whether nothing is wrong; what was skipped is not wrong."""
        return all(outcome.status in (Status.PASS, Status.SKIPPED) for outcome in self.outcomes)

    @property
    def counts(self) -> dict[str, int]:
        """How many checks ended how."""
        return dict(Counter(outcome.status.value for outcome in self.outcomes))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON members."""
        return {
            "bundle": self.digest,
            "platform": self.platform,
            "gpu": self.gpu,
            "ok": self.ok,
            "counts": self.counts,
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return rows (check, subject, status, detail): equal endings of one check together when many."""
        groups: dict[tuple[str, Status, str], list[Outcome]] = {}
        rows: list[tuple[str, str, str, str]] = []
        for outcome in self.outcomes:
            fold = outcome.detail if outcome.status is Status.SKIPPED else ""
            groups.setdefault((outcome.check, outcome.status, fold), []).append(outcome)
        for (check, status, _), members in groups.items():
            folded = len(members) > 4 and status in (Status.PASS, Status.SKIPPED)
            if folded:
                detail = members[0].detail if status is Status.SKIPPED else ""
                rows.append((check, f"{len(members)} of them", _said(status, detail), ""))
                continue
            for member in members:
                said = _said(status, member.detail)
                rows.append((check, member.subject, said, "" if status is Status.SKIPPED else member.detail))
        return rows


def _said(status: Status, detail: str) -> str:
    return f"skipped: {detail}" if status is Status.SKIPPED else status.value
