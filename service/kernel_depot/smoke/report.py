"""Outcomes of smoke checks, and the one table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final


class Status(str, Enum):
    """How a check ended: `refused` is a file not fit to be loaded, `crashed` a child that died or hung."""

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

    `expected` and `found` are of a check that compares. A numeric case has its name in `case`; `error` is how
    far off it was, `limit` how far it may be.
    """

    check: str
    subject: str
    status: Status
    detail: str = ""
    seconds: float = 0.0
    expected: str | None = None
    found: str | None = None
    case: str | None = None
    error: float | None = None
    limit: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON members; those of numeric cases are there where they say something."""
        numeric = {"case": self.case, "error": self.error, "limit": self.limit}
        return {
            **{name: value for name, value in numeric.items() if value is not None},
            "check": self.check,
            "subject": self.subject,
            "status": self.status.value,
            "detail": self.detail,
            "seconds": round(self.seconds, 4),
            "expected": self.expected,
            "found": self.found,
        }


_WORST: Final = (Status.CRASHED, Status.FAIL, Status.REFUSED, Status.SKIPPED, Status.PASS)
"""What the checks of one module come to: the first of these that one of them has."""

MOST_TEXT: Final = 4000
"""Characters that a module's result may take in a report (POST /v1/nodes/{name}/smoke)."""


@dataclass(frozen=True, slots=True)
class ModuleResult:
    """What all checks of one module come to. It passed when each did, its numeric cases included."""

    module: str
    sha256: str
    status: Status
    why: str
    expected: str | None
    found: str | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON members, as a node reports them."""
        return {
            "module": self.module,
            "sha256": self.sha256,
            "outcome": self.status.value,
            "why": self.why[:MOST_TEXT],
            "expected": self.expected and self.expected[:MOST_TEXT],
            "found": self.found and self.found[:MOST_TEXT],
            "seconds": round(self.seconds, 4),
        }


def combined(module: str, sha256: str, outcomes: Sequence[Outcome]) -> ModuleResult:
    """Return what the outcomes of one module come to: the worst, with what each bad case says."""
    worst = min(outcomes, key=lambda outcome: _WORST.index(outcome.status))
    why = _cases_said([outcome for outcome in outcomes if outcome.case is not None]) or worst.detail
    if worst.status in (Status.CRASHED, Status.FAIL, Status.REFUSED):
        bad = [one for one in outcomes if one.status not in (Status.PASS, Status.SKIPPED)]
        why = "\n".join(f"{one.case or one.check}: {one.status}: {one.detail}" for one in bad)
    elif worst.status is Status.SKIPPED and worst.case is None:
        why = worst.detail
    return ModuleResult(
        module,
        sha256,
        worst.status,
        why,
        worst.expected,
        worst.found,
        sum(outcome.seconds for outcome in outcomes),
    )


def _cases_said(cases: Sequence[Outcome]) -> str:
    """Sum up the numeric cases of one module; nothing where there are none."""
    if not cases:
        return ""
    passed = [one for one in cases if one.status is Status.PASS]
    text = f"{len(passed)} of {len(cases)} cases"
    measured = [one for one in passed if one.error is not None and one.limit]
    if measured:
        nearest = max(measured, key=lambda one: (one.error or 0.0) / (one.limit or 1.0))
        text += f", at most {nearest.error:.1e} of {nearest.limit:.0e} off ({nearest.case})"
    skipped = [one for one in cases if one.status is Status.SKIPPED]
    return text + "".join(f"; {one.case} skipped: {one.detail}" for one in skipped)


@dataclass(frozen=True, slots=True)
class SmokeReport:
    """Every outcome for one bundle on this host; `modules` are the digests of those that were checked."""

    digest: str
    platform: str
    gpu: str | None
    outcomes: tuple[Outcome, ...]
    driver: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Tell whether nothing is wrong; what was skipped is not wrong."""
        return all(outcome.status in (Status.PASS, Status.SKIPPED) for outcome in self.outcomes)

    @property
    def counts(self) -> dict[str, int]:
        """How many checks ended how."""
        return dict(Counter(outcome.status.value for outcome in self.outcomes))

    def results(self) -> list[ModuleResult]:
        """Return what each module's checks come to. One without any has what was checked before them."""
        own: dict[str, list[Outcome]] = {name: [] for name in self.modules}
        general: list[Outcome] = []
        for outcome in self.outcomes:
            own.get(outcome.subject, general).append(outcome)
        return [combined(name, sha256, own[name] or general) for name, sha256 in self.modules.items()]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON members."""
        return {
            "bundle": self.digest,
            "platform": self.platform,
            "gpu": self.gpu,
            "driver": self.driver,
            "ok": self.ok,
            "counts": self.counts,
            "modules": [result.to_json() for result in self.results()],
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return rows (check, subject, status, detail): equal endings of one check together when many.

        Numeric cases that passed have one row a module.
        """
        groups: dict[tuple[str, Status, str], list[Outcome]] = {}
        numeric: dict[str, list[Outcome]] = {}
        rows: list[tuple[str, str, str, str]] = []
        for outcome in self.outcomes:
            if outcome.case is not None:
                numeric.setdefault(outcome.subject, []).append(outcome)
                continue
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
        for module, cases in numeric.items():
            good = [one for one in cases if one.status in (Status.PASS, Status.SKIPPED)]
            if good:
                status = min((one.status for one in good), key=lambda one: one is not Status.PASS)
                rows.append(("numeric", module, status.value, _cases_said(good)))
            rows += [_bad_case(one) for one in cases if one not in good]
        return rows


def _bad_case(one: Outcome) -> tuple[str, str, str, str]:
    detail = f"{one.case}: {one.detail}"
    if one.expected is not None:
        detail += f"; expected {one.expected}, found {one.found}"
    return one.check, one.subject, one.status.value, detail


def _said(status: Status, detail: str) -> str:
    return f"skipped: {detail}" if status is Status.SKIPPED else status.value
