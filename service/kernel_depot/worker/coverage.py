"""Which modules programs on this node asked for and did not find built."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_depot.bundle import ArtifactKind, Bundle
from kernel_depot.worker.errors import RecordUnreadable


@dataclass(frozen=True, slots=True)
class Asked:
    """A module that FlashInfer asked for, the version that did, and whether it was there built."""

    module: str
    flashinfer: str
    found: bool


def read_record(path: Path) -> list[Asked]:
    """Read what `run --record` wrote. Raise RecordUnreadable, which names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordUnreadable(
            f"the record cannot be read: {error}",
            where=str(path),
            remedy="write one with kernel-depot run --record FILE -- CMD; a program that asked for no module "
            "leaves none",
        ) from error
    return [_asked(line, where=f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _asked(line: str, *, where: str) -> Asked:
    try:
        match json.loads(line):
            case {"module": str(module), "flashinfer": str(version), "found": bool(found)} if module:
                return Asked(module, version, found)
    except ValueError:
        pass
    raise RecordUnreadable(
        "the record has a line that is none",
        where=where,
        expected='{"module": "norm", "found": false, "flashinfer": "0.6.3"}',
        found=line[:200],
    )


def compiled_here(base: Path) -> list[Asked]:
    """Return the modules that FlashInfer compiled, or began to, under a FLASHINFER_WORKSPACE_BASE.

    What lies in `.cache/flashinfer/<version>/<GPUs>/cached_ops/<uri>` was in no bundle when it was asked for.
    """
    found = (base / ".cache" / "flashinfer").glob("*/*/cached_ops/*/build.ninja")
    return [Asked(path.parent.name, path.parents[3].name, found=False) for path in sorted(found)]


def lacking(asked: Iterable[Asked], bundle: Bundle) -> list[str]:
    """Return the modules that were not found and that the bundle lacks, sorted.

    Other versions of FlashInfer than that of the bundle's modules are left out: see `other_versions`.
    """
    present = {artifact.module for artifact in bundle.artifacts if artifact.kind is ArtifactKind.MODULE}
    version = flashinfer_version(bundle)
    return sorted(
        {
            one.module
            for one in asked
            if not one.found and one.module not in present and version in (None, public(one.flashinfer))
        }
    )


def other_versions(asked: Sequence[Asked], bundle: Bundle) -> list[str]:
    """Return the versions of FlashInfer that lacked a module and are not the bundle's, sorted."""
    return sorted(
        {public(one.flashinfer) for one in asked if not one.found} - {flashinfer_version(bundle) or ""}
    )


def flashinfer_version(bundle: Bundle) -> str | None:
    """Return the public version of the FlashInfer that the bundle's modules were compiled from."""
    for wheel in bundle.wheels:
        if wheel.project.replace("_", "-").lower().startswith("flashinfer-jit-cache"):
            return public(wheel.version)
    return None


def public(version: str) -> str:
    """Return a version without its local part: `0.6.3` of `0.6.3+cu130`."""
    return version.partition("+")[0]
