"""Smoking what changed: the modules of a bundle whose bytes this node did not pass under its driver yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kernel_depot.agent.memory import Memory
from kernel_depot.bundle import ArtifactKind, Bundle
from kernel_depot.smoke.cases import Host, Limits, smoke
from kernel_depot.smoke.report import Outcome, Status
from kernel_depot.worker.cache import Cache

_SETTLED: Final = frozenset({Status.PASS.value, Status.SKIPPED.value})
_WORST: Final = (Status.CRASHED, Status.FAIL, Status.REFUSED, Status.PASS, Status.SKIPPED)
"""What the outcomes of one module come to: the first of these that one of them has."""


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
        general = [outcome for outcome in report.outcomes if outcome.subject not in modules]
        for name in wanted:
            own = [outcome for outcome in report.outcomes if outcome.subject == name]
            result = _combined(name, modules[name], own or general)
            memory.keep(modules[name], driver, result)
            fresh.append(result)
    every = [memory.outcome(sha256, driver) for sha256 in modules.values()]
    bad = [outcome for outcome in every if outcome is not None and outcome["outcome"] not in _SETTLED]
    return Proof(tuple(fresh), tuple(bad))


def _combined(module: str, sha256: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    worst = min(outcomes, key=lambda outcome: _WORST.index(outcome.status))
    return {
        "module": module,
        "sha256": sha256,
        "outcome": worst.status.value,
        "why": worst.detail[:4000],
        "expected": worst.expected,
        "found": worst.found,
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 4),
    }
