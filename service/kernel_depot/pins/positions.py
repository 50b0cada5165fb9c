"""On which line of a TOML text each table and key stands.

The standard parser gives values without positions, so the text is cut into statements (a table header,
or a key with its value over one or more lines) and each statement is given to that same parser alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_STATEMENT_LINES = 2_000


def positions(text: str) -> dict[KeyPath, int]:
    """Map the path of every table and key of a valid TOML text to its line, counted from 1.

    An element of an array of tables has its number in the path: `("project", "cu130", "x86_64", 0)`.
    """
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    prefix: KeyPath = ()
    for line, statement in _statements(text):
        document = _parse(statement)
        if document is None:
            continue
        if statement.lstrip().startswith("["):
            prefix = _header(document, counts)
            lines.setdefault(prefix, line)
        else:
            for path in _paths(document):
                lines.setdefault(prefix + path, line)
    return lines


def line_of(lines: Mapping[KeyPath, int], path: KeyPath) -> int | None:
    """Return the line of `path`, or of the nearest thing around it that has one."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    # A dotted header names only its innermost table; an outer one starts where its first child does.
    return min((line for key, line in lines.items() if key[: len(path)] == path), default=None)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    pending: list[str] = []
    start = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not pending:
            stripped = line.strip()
            if not stripped or stripped.startswith("#"):
                continue
            start = number
        pending.append(line)
        statement = "\n".join(pending)
        if len(pending) >= MAX_STATEMENT_LINES or _parse(statement) is not None:
            yield start, statement
            pending = []


def _parse(statement: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(statement)
    except tomllib.TOMLDecodeError:
        return None


def _header(document: dict[str, Any], counts: dict[KeyPath, int]) -> KeyPath:
    """Return the path a lone header opens; an outer array of tables means its latest element."""
    path: KeyPath = ()
    value: Any = document
    while value:
        (key, value) = next(iter(value.items()))
        path += (key,)
        if isinstance(value, list):
            index = counts.get(path, -1) + 1
            counts[path] = index
            return (*path, index)
        if path in counts and value:
            path += (counts[path],)
    return path


def _paths(document: dict[str, Any]) -> Iterator[KeyPath]:
    for key, value in document.items():
        yield (key,)
        if isinstance(value, dict):
            for path in _paths(value):
                yield (key, *path)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield (key, index)
                if isinstance(item, dict):
                    for path in _paths(item):
                        yield (key, index, *path)
