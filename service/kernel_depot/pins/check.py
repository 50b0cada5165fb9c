"""Every problem of pin-set files, alone and together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kernel_depot.pins.consistency import Placed, hash_conflicts
from kernel_depot.pins.document import examine_file
from kernel_depot.pins.problem import PinProblem, PinSetUnreadable


def check(paths: Iterable[Path], *, allow_file_urls: bool = False) -> list[PinProblem]:
    """Read every file and return all findings, errors and warnings, in the order of files and lines."""
    problems: list[PinProblem] = []
    placed: list[Placed] = []
    for path in paths:
        try:
            examined = examine_file(path, allow_file_urls=allow_file_urls)
        except PinSetUnreadable as error:
            problems.append(PinProblem(str(path), None, None, "unreadable", error.what))
            continue
        problems.extend(sorted(examined.problems, key=lambda problem: problem.line or 0))
        placed.extend(examined.placed)
    problems.extend(problem for problem in hash_conflicts(placed) if problem not in problems)
    return problems
