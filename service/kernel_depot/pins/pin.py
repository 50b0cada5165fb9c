"""The pin: one exact wheel for one CUDA tag and CPU arch; and the pin set that holds them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import rfc8785

from kernel_depot.digest import sha256_bytes
from kernel_depot.pins.groups import ModuleGroup
from kernel_depot.platform import Arch, CudaTag, Sm


def project_word(name: str) -> str:
    """Return a project's name as tables and answers spell it: normalized (PEP 503), with underscores."""
    return re.sub(r"[-_.]+", "_", name).lower()


@dataclass(frozen=True, slots=True)
class UrlOrigin:
    """A wheel that lies at one URL."""

    url: str

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True)
class IndexOrigin:
    """A wheel found by its file name in a package index, which goes by a name."""

    name: str

    def __str__(self) -> str:
        return f"index {self.name}"


@dataclass(frozen=True, slots=True)
class StoreOrigin:
    """A wheel that was uploaded: it lies in the depot's own store, under its SHA-256."""

    def __str__(self) -> str:
        return "the depot's store"


Origin = UrlOrigin | IndexOrigin | StoreOrigin


@dataclass(frozen=True, slots=True)
class Pin:
    """One exact wheel. `sm` None is the monolith that carries code for every SM upstream builds for."""

    project: str
    version: str
    filename: str
    sha256: str
    cuda: CudaTag
    arch: Arch
    sm: Sm | None
    origin: Origin
    size: int | None = None
    record_sha256: str | None = None

    @property
    def table(self) -> str:
        """The TOML table this pin stands in."""
        return f"{self.project}.{self.cuda}.{self.arch}"

    def to_json(self) -> dict[str, str | int | bool]:
        """Return the pin's members in canonical spelling; absent ones are left out."""
        members: dict[str, str | int | bool | None] = {
            "project": self.project,
            "version": self.version,
            "filename": self.filename,
            "sha256": self.sha256,
            "cuda": str(self.cuda),
            "arch": str(self.arch),
            "sm": str(self.sm) if self.sm else None,
            "url": self.origin.url if isinstance(self.origin, UrlOrigin) else None,
            "index": self.origin.name if isinstance(self.origin, IndexOrigin) else None,
            "store": True if isinstance(self.origin, StoreOrigin) else None,
            "size": self.size,
            "record_sha256": self.record_sha256,
        }
        return {key: value for key, value in members.items() if value is not None}


@dataclass(frozen=True)
class PinSet:
    """A named set of pins and the text it was read from."""

    name: str
    pins: tuple[Pin, ...]
    text: str
    origin: str
    groups: tuple[ModuleGroup, ...] = ()

    @cached_property
    def digest(self) -> str:
        """The revision's name: SHA-256 of the canonical JSON of its name, pins and groups, if it has any.

        Comments and order do not matter.
        """
        pins = sorted((pin.to_json() for pin in self.pins), key=lambda members: rfc8785.dumps(members))
        members: dict[str, Any] = {"name": self.name, "pins": pins}
        if self.groups:
            members["groups"] = [group.to_json() for group in self.groups]
        return sha256_bytes(rfc8785.dumps(members))
