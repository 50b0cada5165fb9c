"""How a wheel came about, as an in-toto statement with an SLSA provenance predicate (in-toto v1, SLSA v1)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import kernel_depot
from kernel_depot.builder.cache import BuiltModule, room
from kernel_depot.builder.errors import MergeRefused
from kernel_depot.builder.plan import PinnedWheel, Plan
from kernel_depot.builder.wheel import BuiltWheel
from kernel_depot.liveness import process_name
from kernel_depot.pins.pin import UrlOrigin

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:kernel-depot:build-type:modules:1"


def statement_path(wheel: Path) -> Path:
    """Return where the statement of a wheel lies: beside it."""
    return wheel.with_name(wheel.name + ".intoto.json")


def statement(
    plan: Plan, wheel: BuiltWheel, modules: Sequence[BuiltModule], *, started: datetime, finished: datetime
) -> dict[str, Any]:
    """Return the statement: the wheel, the plan, the source, and each module with its toolchain."""
    toolchains = {json.dumps(module.toolchain, sort_keys=True) for module in modules}
    return {
        "_type": STATEMENT,
        "subject": [{"name": wheel.path.name, "digest": {"sha256": wheel.sha256}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"plan": plan.to_json()},
                "internalParameters": {"planDigest": {"sha256": plan.digest}, "zlib": zlib.ZLIB_VERSION},
                "resolvedDependencies": [
                    _dependency(plan.source),
                    *(
                        {"name": f"toolchain {number}", "annotations": json.loads(text)}
                        for number, text in enumerate(sorted(toolchains), start=1)
                    ),
                ],
            },
            "runDetails": {
                "builder": {
                    "id": "urn:kernel-depot:builder",
                    "version": {"kernel-depot": kernel_depot.__version__},
                },
                "metadata": {"startedOn": _time(started), "finishedOn": _time(finished)},
                "byproducts": [
                    {
                        "name": f"flashinfer_jit_cache/jit_cache/{module.uri}/{module.uri}.so",
                        "digest": {"sha256": module.sha256},
                        "annotations": module.to_json(),
                    }
                    for module in sorted(modules, key=lambda one: one.uri)
                ],
            },
        },
    }


def write_statement(wheel: Path, content: dict[str, Any]) -> Path:
    """Write the statement beside its wheel; it appears whole. Raise BuildDiskFull."""
    final = statement_path(wheel)
    private = final.with_name(f".{final.name}.{process_name()}")
    with room(str(final)):
        try:
            private.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            private.replace(final)
        finally:
            private.unlink(missing_ok=True)
    return final


def read_statement(wheel: Path, *, plan: Plan, sha256: str) -> list[BuiltModule]:
    """Return the modules that a wheel's statement tells of.

    Raise MergeRefused when there is no statement, or it is of another wheel, source or CUDA tag.
    """
    path = statement_path(wheel)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        subject = content["subject"][0]["digest"]["sha256"]
        predicate = content["predicate"]
        theirs = predicate["buildDefinition"]["externalParameters"]["plan"]
        modules = [BuiltModule.from_json(one["annotations"]) for one in predicate["runDetails"]["byproducts"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise MergeRefused(
            "the partial result has no statement of its provenance",
            where=str(path),
            found=f"{type(error).__name__}: {error}",
            remedy="bring the .intoto.json file beside the wheel along",
        ) from error
    if subject != sha256:
        raise MergeRefused(
            "the statement is of another wheel than the one it lies beside",
            where=str(path),
            expected=subject,
            found=sha256,
        )
    ours = plan.to_json()
    for member in ("source", "cuda"):
        if theirs.get(member) != ours[member]:
            raise MergeRefused(
                f"the partial result was built with another {member}",
                where=str(path),
                expected=ours[member],
                found=theirs.get(member),
                remedy="merge only what was built from the same plan",
            )
    return modules


def _dependency(wheel: PinnedWheel) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": wheel.filename,
        "uri": f"pkg:pypi/{wheel.project}@{wheel.version}",
        "digest": {"sha256": wheel.sha256},
    }
    if isinstance(wheel.origin, UrlOrigin):
        described["downloadLocation"] = wheel.origin.url
    return described


def _time(moment: datetime) -> str:
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
