"""Labels: words that administrators give nodes, and selectors over them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kernel_depot.fleet.errors import LabelInvalid

LABEL = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,99}$"
"""What a label's name and its value look like."""


def parse_labels(words: Iterable[str], *, where: str) -> dict[str, str]:
    """Read `name=value` words. Raise LabelInvalid for another shape, or one name with two values."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.match(LABEL, name) or not re.match(LABEL, value):
            raise LabelInvalid(
                f"{word!r} is not a label",
                where=where,
                expected="NAME=VALUE of letters, digits and ._/-",
                found=word,
            )
        if found.setdefault(name, value) != value:
            raise LabelInvalid(
                f"the label {name!r} is given two values", where=where, found=f"{found[name]}, {value}"
            )
    return found


def matches(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Tell whether a node's labels have every wanted one; no wanted ones match every node."""
    return all(labels.get(name) == value for name, value in wanted.items())
