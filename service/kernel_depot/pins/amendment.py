"""Changing pins within a pin set's text, whose comments and order stay as they were written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import tomlkit

from kernel_depot.pins import groups
from kernel_depot.pins.document import parse_pin_set
from kernel_depot.pins.pin import IndexOrigin, Pin, PinSet, StoreOrigin, UrlOrigin, project_word

Place: TypeAlias = tuple[str, str, str, str]
"""Project, CUDA tag, CPU and SM; the SM is empty for the monolith."""


@dataclass(frozen=True, slots=True)
class Amendment:
    """A pin set with other pins in some places."""

    pin_set: PinSet

    @property
    def text(self) -> str:
        """The TOML."""
        return self.pin_set.text


def place_of(pin: Pin) -> Place:
    """Return where a pin stands in its set."""
    return pin.project, str(pin.cuda), str(pin.arch), str(pin.sm or "")


def amend(pin_set: PinSet, pins: Mapping[Place, Pin], *, allow_file_urls: bool = False) -> Amendment:
    """Return the set with `pins` in place of those that stand there. `pin_set` was read from TOML.

    Only the keys that differ are written anew. Raise PinSetInvalid with every error of what would come out.
    """
    document = tomlkit.parse(pin_set.text)
    for project, tags in document.items():
        if project == groups.TABLE:
            continue
        for tag, archs in _tables(tags):
            for arch, entry in _tables(archs):
                for table in entry if isinstance(entry, list) else [entry]:
                    place = (project_word(project), tag, arch, str(table.get("sm", "")))
                    if place in pins:
                        _write(table, pins[place])
    amended = parse_pin_set(
        tomlkit.dumps(document), name=pin_set.name, origin=pin_set.origin, allow_file_urls=allow_file_urls
    )
    return Amendment(amended)


def _tables(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _write(table: Any, pin: Pin) -> None:
    origin = pin.origin
    wanted: dict[str, str | int | bool | None] = {
        "filename": pin.filename,
        "url": origin.url if isinstance(origin, UrlOrigin) else None,
        "index": origin.name if isinstance(origin, IndexOrigin) else None,
        "store": True if isinstance(origin, StoreOrigin) else None,
        "sha256": pin.sha256,
        "size": pin.size,
        "record_sha256": pin.record_sha256,
    }
    for key, value in wanted.items():
        if value is None:
            table.pop(key, None)
        elif table.get(key) != value:
            table[key] = value
