"""The root of every error this product raises, and the one rendering of an error as data.

Each package derives one base from `DepotError`; each kind of failure is a subclass with a stable slug.
The API turns `DepotError.problem()` into problem+json (RFC 9457), the CLI turns it into text.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, ClassVar

PROBLEM_NAMESPACE = "urn:kernel-depot:problem:"


class DepotError(Exception):
    """A failure that says what happened, where, what was expected and found, and what to do next.

    Subclasses set `slug` (the stable last part of the problem type), `title` and `status` (HTTP).
    Further keyword arguments are kept in `data` and travel as problem members.
    """

    slug: ClassVar[str] = "internal"
    title: ClassVar[str] = "Something failed"
    status: ClassVar[int] = 500

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        found: object = None,
        remedy: str | None = None,
        **data: Any,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.remedy = remedy
        self.data = data

    @property
    def type(self) -> str:
        """The problem type, a URN that never changes for one kind of failure."""
        return PROBLEM_NAMESPACE + self.slug

    def problem(self) -> dict[str, Any]:
        """Return the RFC 9457 members of this failure; absent facts are left out."""
        members: dict[str, Any] = {
            "type": self.type,
            "title": self.title,
            "status": self.status,
            "detail": self.what,
            "where": self.where,
            "expected": _plain(self.expected),
            "found": _plain(self.found),
            "remedy": self.remedy,
        }
        members.update({key: _plain(value) for key, value in self.data.items()})
        return {key: value for key, value in members.items() if value is not None}

    def __str__(self) -> str:
        parts = [self.what]
        if self.where is not None:
            parts.append(f"where: {self.where}")
        if self.expected is not None:
            parts.append(f"expected: {self.expected}")
        if self.found is not None:
            parts.append(f"found: {self.found}")
        if self.remedy is not None:
            parts.append(f"what to do: {self.remedy}")
        return "\n  ".join(parts)


def _plain(value: object) -> object:
    """Reduce a fact to JSON types: numbers, strings, lists and objects of these."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)


def all_problems(root: type[DepotError] = DepotError) -> list[type[DepotError]]:
    """List every failure kind loaded so far, for the documentation and its test."""
    found: list[type[DepotError]] = []
    for kind in root.__subclasses__():
        found.append(kind)
        found.extend(all_problems(kind))
    return found
