"""What is wrong in a pin set: each finding with file, table and line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kernel_depot.errors import DepotError


class Severity(str, Enum):
    """Whether a finding keeps the pin set from being used."""

    ERROR = "error"
    WARNING = "warning"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class PinProblem:
    """One finding. `line` counts from 1 and is None where the source has no lines (JSON)."""

    file: str
    table: str | None
    line: int | None
    code: str
    message: str
    severity: Severity = Severity.ERROR

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        table = f" [{self.table}]" if self.table else ""
        return f"{place}:{table} {self.severity}: {self.code}: {self.message}"

    def to_json(self) -> dict[str, str | int | None]:
        """Return the finding's members."""
        return {
            "file": self.file,
            "table": self.table,
            "line": self.line,
            "code": self.code,
            "severity": self.severity.value,
            "message": self.message,
        }


class PinsError(DepotError):
    """The base of this room's failures while pin sets are read."""


class PinSetUnreadable(PinsError):
    """A pin-set file that cannot be opened or is not text."""

    slug = "pin-set-unreadable"
    title = "The pin set cannot be read"
    status = 400


class PinSetInvalid(PinsError):
    """A pin set with errors; carries every one of them."""

    slug = "pin-set-invalid"
    title = "The pin set has errors"
    status = 400

    def __init__(self, problems: Sequence[PinProblem], *, origin: str) -> None:
        errors = [problem for problem in problems if problem.severity is Severity.ERROR]
        super().__init__(
            f"{len(errors)} error{'s' if len(errors) != 1 else ''} in {origin}: "
            + "; ".join(str(problem) for problem in errors[:3])
            + ("; …" if len(errors) > 3 else ""),
            where=origin,
            remedy="correct the pin set; `kernel-depot pins check FILE` lists every problem",
            problems=[problem.to_json() for problem in problems],
        )
        self.problems = tuple(problems)
