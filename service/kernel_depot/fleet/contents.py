"""What bundles hold, read from their manifests; a digest never means anything else, so it is read once."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Final

from sqlmodel import Session

from kernel_depot.catalog import queries

_KEPT: Final = 64
_lock = Lock()
_known: OrderedDict[str, Contents] = OrderedDict()


@dataclass(frozen=True, slots=True)
class HeldModule:
    """A kernel module of a bundle, and the targets it has code for."""

    sha256: str
    sms: tuple[str, ...]
    ptx: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """A bundle's distinct blobs with their sizes in bytes, and its modules by URI."""

    blobs: Mapping[str, int]
    modules: Mapping[str, HeldModule]


def contents(session: Session, digest: str) -> Contents | None:
    """Return what a bundle holds, None when it is not known."""
    with _lock:
        if digest in _known:
            _known.move_to_end(digest)
            return _known[digest]
    manifest = queries.bundle_manifest(session, digest)
    return read_contents(digest, manifest) if manifest is not None else None


def read_contents(digest: str, manifest: bytes) -> Contents:
    """Return what a manifest says, which `digest` names."""
    artifacts = json.loads(manifest)["artifacts"]
    found = Contents(
        {item["sha256"]: item["size"] for item in artifacts},
        {
            item["module"]: HeldModule(
                item["sha256"], tuple(item.get("sms") or ()), tuple(item.get("ptx") or ())
            )
            for item in artifacts
            if item["kind"] == "module" and item.get("module")
        },
    )
    with _lock:
        _known[digest] = found
        while len(_known) > _KEPT:
            _known.popitem(last=False)
    return found


def modules_of(session: Session, digest: str) -> Mapping[str, str]:
    """Return a bundle's modules with the digests of their bytes; none for a bundle that is not known."""
    found = contents(session, digest)
    return {name: module.sha256 for name, module in found.modules.items()} if found is not None else {}
