"""A changed pin set: some pins put in the place of those for the same platforms, written as TOML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tomlkit

from kernel_depot.pins.document import parse_pin_set
from kernel_depot.pins.groups import TABLE, ModuleGroup
from kernel_depot.pins.pin import Pin, PinSet


@dataclass(frozen=True, slots=True)
class Proposal:
    """A pin set as it would be, and the pins that it would no longer have."""

    pin_set: PinSet
    replaced: tuple[Pin, ...]


def propose(
    current: PinSet | None, pins: Sequence[Pin], *, name: str, origin: str, allow_file_urls: bool = False
) -> Proposal:
    """Return the set `name` with `pins` in place of its own for the same project, platform and SM.

    `current` is the set as it is, None for a set that there is not yet. The text is written anew: comments
    of the current one are not in it. Raise PinSetInvalid with every error of what would come out.
    """
    places = {_place(pin) for pin in pins}
    kept = [pin for pin in current.pins if _place(pin) not in places] if current is not None else []
    replaced = tuple(pin for pin in current.pins if _place(pin) in places) if current is not None else ()
    text = pin_set_text([*kept, *pins], groups=current.groups if current is not None else ())
    pin_set = parse_pin_set(text, name=name, origin=origin, allow_file_urls=allow_file_urls)
    return Proposal(pin_set, tuple(pin for pin in replaced if pin not in pins))


def pin_set_text(pins: Iterable[Pin], *, groups: Iterable[ModuleGroup] = ()) -> str:
    """Return a pin set's TOML, its tables in the order of project, CUDA tag, CPU and SM."""
    places: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for pin in sorted(pins, key=_place):
        members = pin.to_json()
        path = tuple(str(members.pop(key)) for key in ("project", "cuda", "arch"))
        del members["version"]  # the filename states it
        places.setdefault((path[0], path[1], path[2]), []).append(members)
    document: dict[str, Any] = {}
    for (project, cuda, arch), tables in places.items():
        archs = document.setdefault(project, {}).setdefault(cuda, {})
        archs[arch] = tables[0] if len(tables) == 1 else tables
    for group in groups:
        members = group.to_json()
        document.setdefault(TABLE, {})[members.pop("name")] = members
    return tomlkit.dumps(document)


def _place(pin: Pin) -> tuple[str, str, str, str]:
    return pin.project, str(pin.cuda), str(pin.arch), str(pin.sm or "")
