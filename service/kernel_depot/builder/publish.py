"""From a built wheel to a revision of a pin set in a depot, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any

from kernel_depot.builder.build import BuildReport
from kernel_depot.builder.compile import Stopped
from kernel_depot.builder.depot import Depot, Progress
from kernel_depot.builder.errors import DepotRefused, PublishFailed
from kernel_depot.builder.wheel import PROJECT, BuiltWheel

_GLANCE = 0.5  # seconds between two looks at a job


@dataclass(frozen=True, slots=True)
class Publication:
    """A wheel in a depot, and the revision that pins it. `replaced` are filenames it no longer pins."""

    filename: str
    sha256: str
    size: int
    pin_set: str
    revision: str
    replaced: tuple[str, ...]
    active: bool

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {
            "outcome": "published",
            "filename": self.filename,
            "sha256": self.sha256,
            "size": self.size,
            "pin_set": self.pin_set,
            "revision": self.revision,
            "replaced": list(self.replaced),
            "active": self.active,
        }


def publish(
    report: BuildReport,
    depot: Depot,
    *,
    pin_set: str | None = None,
    activate: bool = False,
    progress: Progress,
    stop: Event | None = None,
) -> Publication:
    """Upload a build's wheel and statement, propose a revision that pins it, and have it brought in.

    The pin is one for each SM of the plan, so that it is preferred there and nowhere else. `pin_set` is the
    plan's name when absent. What the name means changes with `activate` only, as the last step.
    Raise PublishFailed when the depot cannot bring the wheel in, DepotRefused, DepotUnreachable, Stopped.
    """
    wheel = report.wheel
    if wheel is None or report.statement is None:
        raise PublishFailed("a dry run has no wheel to publish", where=report.plan.name)
    name = pin_set or report.plan.name
    depot.upload(wheel.path, sha256=wheel.sha256, name=wheel.path.name, progress=progress, stop=stop)
    depot.put_provenance(wheel.sha256, json.loads(report.statement.read_text(encoding="utf-8")))
    proposal = depot.propose(name, _pins(report, wheel))
    revision = str(proposal["revision"])
    _brought_in(depot, depot.materialize(revision), wheel, stop)
    active = proposal["based_on"] == revision
    if activate and not active:
        try:
            depot.activate(name, revision, expected=proposal["based_on"])
        except DepotRefused as error:
            if not error.says("revision-moved"):
                raise
            raise PublishFailed(
                f"the pin set {name!r} was changed meanwhile; the revision is proposed, not active",
                where=f"{depot.url}/v1/pins/{name}",
                expected=error.expected,
                found=error.found,
                remedy="publish again: the change is then proposed on top of it",
            ) from error
        active = True
    return Publication(
        filename=wheel.path.name,
        sha256=wheel.sha256,
        size=wheel.size,
        pin_set=name,
        revision=revision,
        replaced=tuple(pin["filename"] for pin in proposal["replaced"]),
        active=active,
    )


def _pins(report: BuildReport, wheel: BuiltWheel) -> dict[str, Any]:
    tables = [
        {
            "filename": wheel.path.name,
            "sha256": wheel.sha256,
            "size": wheel.size,
            "sm": str(sm),
            "store": True,
        }
        for sm in report.plan.sms
    ]
    return {PROJECT: {str(report.plan.cuda): {str(report.toolchain.arch): tables}}}


def _brought_in(depot: Depot, job_id: str, wheel: BuiltWheel, stop: Event | None) -> None:
    """Wait until the depot has verified and extracted the wheel."""
    pause: Callable[[float], object] = (stop or Event()).wait
    while True:
        job = depot.job(job_id)
        if job["state"] == "succeeded":
            return
        if job["state"] == "failed":
            mine = [one for one in job["wheels"] if one.get("sha256") == wheel.sha256]
            problem = (mine[0].get("problem") if mine else None) or job["problem"] or {}
            raise PublishFailed(
                f"the depot could not bring the wheel in: {problem.get('detail')}",
                where=f"{depot.url}/v1/jobs/{job_id}",
                expected=problem.get("expected"),
                found=problem.get("found"),
                remedy=problem.get("remedy") or "see the job; the revision is proposed, not active",
                server_type=problem.get("type"),
            )
        pause(_GLANCE)
        if stop is not None and stop.is_set():
            raise Stopped(f"{wheel.path.name} was uploaded; whether it was brought in was not waited for")
