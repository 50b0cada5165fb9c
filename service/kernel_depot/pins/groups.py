"""Module groups: kernel modules of a pin set that a node gets when it asks for their group by name.

A set names them in tables `[groups.NAME]`. The group's name in a bundle's manifest is what callers look for;
that a module lies there for others says nothing about the group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

TABLE: Final = "groups"
"""The table of a pin set that holds groups; no project can have this name there."""

KEYS: Final = ("modules", "default")
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,62}")
_URI: Final = re.compile(r"[A-Za-z0-9_]{1,255}")


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Kernel modules that belong together. `default` says that everyone else gets them too."""

    name: str
    modules: tuple[str, ...]
    default: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the members in canonical order."""
        return {"name": self.name, "modules": list(self.modules), "default": self.default}

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> ModuleGroup:
        """Read what `to_json` wrote."""
        return cls(members["name"], tuple(members["modules"]), members["default"])


@dataclass(frozen=True, slots=True)
class GroupFault:
    """What is wrong with a group's table: the key under `groups.NAME`, a code and a sentence."""

    path: tuple[str, ...]
    code: str
    message: str


def read_groups(document: object) -> tuple[tuple[ModuleGroup, ...], list[GroupFault]]:
    """Read the `groups` table of a pin set; return the groups by name, and every fault."""
    if not isinstance(document, dict) or not document:
        return (), [GroupFault((), "not-a-table", "expected tables [groups.NAME]")]
    faults: list[GroupFault] = []
    groups = []
    for name, table in sorted(document.items()):
        if _NAME.fullmatch(name) is None:
            faults.append(
                GroupFault((name,), "bad-group", f"a group is a word like 'opponent', found {name!r}")
            )
        elif not isinstance(table, dict):
            faults.append(GroupFault((name,), "not-a-table", f"expected a table [groups.{name}]"))
        else:
            wrong = _faults(name, table)
            faults += wrong
            if not wrong:
                modules = tuple(sorted(table["modules"]))
                groups.append(ModuleGroup(name, modules, table.get("default", False)))
    return tuple(groups), faults


def withheld(groups: Iterable[ModuleGroup], asked: Iterable[str]) -> set[str]:
    """Return the modules that only groups not asked for hold."""
    names = set(asked)
    given: set[str] = set()
    kept: set[str] = set()
    for group in groups:
        (given if group.default or group.name in names else kept).update(group.modules)
    return kept - given


def _faults(name: str, table: dict[str, Any]) -> list[GroupFault]:
    faults = [
        GroupFault((name, key), "unknown-key", f"{key!r} is not one of {', '.join(KEYS)}")
        for key in table
        if key not in KEYS
    ]
    modules = table.get("modules")
    if not isinstance(modules, list) or not modules:
        faults.append(GroupFault((name, "modules"), "missing-key", "'modules' must list kernel modules"))
    else:
        for module in modules:
            if not isinstance(module, str) or _URI.fullmatch(module) is None:
                faults.append(GroupFault((name, "modules"), "bad-module", f"not a kernel module: {module!r}"))
        if len({str(module) for module in modules}) != len(modules):
            faults.append(GroupFault((name, "modules"), "duplicate-module", "a module is listed twice"))
    if not isinstance(table.get("default", False), bool):
        faults.append(GroupFault((name, "default"), "wrong-type", "'default' must be true or false"))
    return faults
