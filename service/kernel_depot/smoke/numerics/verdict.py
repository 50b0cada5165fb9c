"""Judging an output against its float64 reference, and two launches against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernel_depot.smoke.numerics.bench import Output
from kernel_depot.smoke.numerics.formats import Reals

ELEMENT: Final = 10.0
"""No element may be further off than this many limits, of its reference and the output's root mean square."""


class Wrong(Exception):
    """An output that is not what it should be: where, what was expected there, and what was found."""

    def __init__(self, what: str, *, expected: str | None = None, found: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.found = found


@dataclass(frozen=True, slots=True)
class Distance:
    """How far an output was from its reference, and how far it may be.

    `error` is |out - reference| / |reference| of the whole output, or the largest difference of `lse`.
    """

    of: str
    error: float
    limit: float

    @property
    def share(self) -> float:
        """The part of what is allowed that was used."""
        return self.error / self.limit if self.limit else 0.0


def near(name: str, output: Output, reference: Reals, *, limit: float) -> Distance:
    """Judge an output by its relative distance, and each element by itself. Raise Wrong."""
    found = output.values()
    _intact(name, output)
    if found.shape != reference.shape:
        raise Wrong(f"{name} has another shape", expected=str(reference.shape), found=str(found.shape))
    _finite(name, found, reference)
    difference = np.abs(found - reference)
    size = float(np.linalg.norm(reference))
    distance = Distance(name, float(np.linalg.norm(difference)) / max(size, 1e-30), limit)
    allowed = ELEMENT * limit * (np.abs(reference) + size / max(reference.size, 1) ** 0.5) + 1e-30
    worst = _worst(difference / allowed)
    if distance.error > limit or difference[worst] > allowed[worst]:
        at = worst if difference[worst] > allowed[worst] else _worst(difference)
        raise Wrong(
            f"{name} is {distance.error:.3g} off, relative to its norm; allowed is {limit:.3g}; "
            f"the worst element is {_place(at)}",
            expected=f"{reference[at]:.9g}",
            found=f"{found[at]:.9g}",
        )
    return distance


def close(name: str, output: Output, reference: Reals, *, limit: float) -> Distance:
    """Judge an output by its largest difference. Raise Wrong."""
    found = output.values()
    _intact(name, output)
    _finite(name, found, reference)
    difference = np.abs(found - reference)
    at = _worst(difference)
    if difference[at] > limit:
        raise Wrong(
            f"{name} is {difference[at]:.3g} off at {_place(at)}; allowed is {limit:.3g}",
            expected=f"{reference[at]:.9g}",
            found=f"{found[at]:.9g}",
        )
    return Distance(name, float(difference[at]), limit)


def same(name: str, output: Output, expected: NDArray[Any]) -> Distance:
    """Judge an output by its bits. Raise Wrong."""
    found = output.bits()
    _intact(name, output)
    unequal = np.argwhere(found != expected.view(found.dtype))
    if unequal.size:
        at = tuple(int(index) for index in unequal[0])
        raise Wrong(
            f"{name} differs in {len(unequal)} of {found.size} elements, the first at {_place(at)}",
            expected=str(expected[at]),
            found=str(found[at]),
        )
    return Distance(name, 0.0, 0.0)


def repeated(name: str, first: Output, second: Output) -> None:
    """Judge a second launch, which must give the same bits. Raise Wrong."""
    one, two = first.bits(), second.bits()
    unequal = np.argwhere(one.view(f"u{one.itemsize}") != two.view(f"u{two.itemsize}"))
    if unequal.size:
        at = tuple(int(index) for index in unequal[0])
        raise Wrong(
            f"{name}: a second launch differs in {len(unequal)} of {one.size} elements, the first at "
            f"{_place(at)}",
            expected=str(one[at]),
            found=str(two[at]),
        )


def _intact(name: str, output: Output) -> None:
    count = output.trespassed()
    if count:
        raise Wrong(f"{name}: bytes beside it were written to", expected="none", found=str(count))


def _finite(name: str, found: Reals, reference: Reals) -> None:
    wrong = np.argwhere(~np.isfinite(found))
    if wrong.size:
        at = tuple(int(index) for index in wrong[0])
        raise Wrong(
            f"{name}: {len(wrong)} of {found.size} elements are not finite, the first at {_place(at)}",
            expected=f"{reference[at]:.9g}",
            found=str(found[at]),
        )


def _worst(difference: Reals) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(int(difference.argmax()), difference.shape))


def _place(at: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, at))}]"
