"""Every problem of pin-set files, alone and together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kernel_depot.pins.consistency import Place, Placed, hash_conflicts
from kernel_depot.pins.document import examine_file
from kernel_depot.pins.pin import PinSet
from kernel_depot.pins.problem import PinProblem, PinSetUnreadable


def check(paths: Iterable[Path], *, allow_file_urls: bool = False) -> list[PinProblem]:
    """Read every file and return all findings, errors and warnings, in the order of files and lines."""
    problems: list[PinProblem] = []
    sets: list[PinSet] = []
    for path in paths:
        try:
            pin_set, found = examine_file(path, allow_file_urls=allow_file_urls)
        except PinSetUnreadable as error:
            problems.append(PinProblem(str(path), None, None, "unreadable", error.what))
            continue
        problems.extend(sorted(found, key=lambda problem: problem.line or 0))
        if pin_set is not None:
            sets.append(pin_set)
    together = [Placed(pin, Place(item.origin, pin.table, None)) for item in sets for pin in item.pins]
    problems.extend(hash_conflicts(together))
    return problems
