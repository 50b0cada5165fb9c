"""Smoking what changed: the modules of a bundle whose bytes this node did not pass under its driver yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kernel_depot.agent.memory import Memory
from kernel_depot.bundle import ArtifactKind, Bundle
from kernel_depot.smoke.cases import Host, Limits, smoke
from kernel_depot.smoke.report import Status
from kernel_depot.worker.cache import Cache

_SETTLED: Final = frozenset({Status.PASS.value, Status.SKIPPED.value})


@dataclass(frozen=True, slots=True)
class Proof:
    """How a bundle's modules did, those from before included; `fresh` are the ones smoked now."""

    fresh: tuple[dict[str, Any], ...]
    bad: tuple[dict[str, Any], ...]


def prove(
    cache: Cache,
    digest: str,
    bundle: Bundle,
    *,
    host: Host,
    driver: str | None,
    memory: Memory,
    limits: Limits,
) -> Proof:
    """Smoke what was not smoked yet, or not passed, and remember it. Raise as `smoke` does."""
    modules = {
        str(artifact.module): artifact.sha256
        for artifact in bundle.artifacts
        if artifact.kind is ArtifactKind.MODULE
    }
    known = {name: memory.outcome(sha256, driver) for name, sha256 in modules.items()}
    wanted = [
        name for name, outcome in known.items() if outcome is None or outcome["outcome"] not in _SETTLED
    ]
    fresh: list[dict[str, Any]] = []
    if wanted:
        report = smoke(cache, host=host, modules=sorted(wanted), limits=limits, digest=digest)
        for outcome in report.results():
            result = outcome.to_json()
            memory.keep(outcome.sha256, driver, result)
            fresh.append(result)
    every = [memory.outcome(sha256, driver) for sha256 in modules.values()]
    bad = [outcome for outcome in every if outcome is not None and outcome["outcome"] not in _SETTLED]
    return Proof(tuple(fresh), tuple(bad))
