"""From a platform to the pins that fit it, with the reason for every choice and every pass-over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kernel_depot.errors import DepotError
from kernel_depot.pins.pin import Pin, PinSet
from kernel_depot.platform import Platform


class Verdict(str, Enum):
    """What became of a pin that was looked at."""

    TAKEN = "taken"
    PASSED_OVER = "passed over"
    UNFIT = "does not fit"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One pin, or one whole set, looked at: what became of it and why."""

    pin_set: str
    project: str | None
    filename: str | None
    verdict: Verdict
    reason: str

    def __str__(self) -> str:
        subject = self.filename or self.project or "the set"
        return f"{self.pin_set}: {subject}: {self.verdict}: {self.reason}"

    def to_json(self) -> dict[str, str | None]:
        """Return the line's members."""
        return {
            "pin_set": self.pin_set,
            "project": self.project,
            "filename": self.filename,
            "verdict": self.verdict.value,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """The pin taken for one project."""

    pin: Pin
    pin_set: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resolution:
    """The pins for a platform, and the trace of how they were found."""

    platform: Platform
    choices: tuple[Choice, ...]
    trace: tuple[TraceLine, ...]


class ResolveError(DepotError):
    """A platform for which no single answer exists."""


class NothingFits(ResolveError):
    """No pin set has every one of its projects for the platform."""

    slug = "nothing-fits"
    title = "No pinned wheels fit this platform"
    status = 404


class PinsConflict(ResolveError):
    """Two pin sets pin one project to different wheels."""

    slug = "pins-conflict"
    title = "Pin sets contradict each other for this platform"
    status = 409


def resolve(pin_sets: Sequence[PinSet], platform: Platform) -> Resolution:
    """Choose a pin per project for `platform` from the union of the sets that fit it.

    Per project: the exact CUDA tag, else the nearest lower minor of the same major; then the provider
    built for the platform's SM, else the monolith. A set counts only whole: with one project missing
    for the platform, none of its pins is used.

    Raise NothingFits when no set counts, PinsConflict when two sets name different wheels for a project.
    """
    trace: list[TraceLine] = []
    choices: dict[str, Choice] = {}
    for pin_set in sorted(pin_sets, key=lambda item: item.name):
        for choice in _resolve_set(pin_set, platform, trace):
            other = choices.get(choice.pin.project)
            if other is not None and other.pin.sha256 != choice.pin.sha256:
                raise PinsConflict(
                    f"two pin sets name different wheels of {choice.pin.project} for {platform}",
                    where=f"pin sets {other.pin_set} and {choice.pin_set}",
                    expected=f"{other.pin.filename} (sha256 {other.pin.sha256})",
                    found=f"{choice.pin.filename} (sha256 {choice.pin.sha256})",
                    remedy="say which set is meant: pins=NAME over REST, --pins NAME on the command line",
                    trace=[str(line) for line in trace],
                )
            choices.setdefault(choice.pin.project, choice)
    if not choices:
        available = _available(pin_sets)
        raise NothingFits(
            f"no pinned wheels fit {platform}",
            where="pin sets " + (", ".join(sorted(item.name for item in pin_sets)) or "(none)"),
            expected=f"wheels for {platform}",
            found="; ".join(available) or "no pins at all",
            remedy="pin wheels for this platform, or ask for one of those that exist",
            available=available,
            trace=[str(line) for line in trace],
        )
    ordered = tuple(choices[project] for project in sorted(choices))
    return Resolution(platform=platform, choices=ordered, trace=tuple(trace))


def _resolve_set(pin_set: PinSet, platform: Platform, trace: list[TraceLine]) -> list[Choice]:
    """Choose this set's pins, or none if one of its projects has none that fits."""
    taken: list[Choice] = []
    lacking: list[str] = []
    for project in sorted({pin.project for pin in pin_set.pins}):
        pins = [pin for pin in pin_set.pins if pin.project == project]
        choice = _resolve_project(pin_set.name, pins, platform, trace)
        if choice is None:
            lacking.append(project)
        else:
            taken.append(choice)
    if lacking:
        reason = f"it has no {', '.join(lacking)} for {platform}, and a set is used whole or not at all"
        trace.append(TraceLine(pin_set.name, None, None, Verdict.UNFIT, reason))
        return []
    return taken


def _resolve_project(
    pin_set: str, pins: Sequence[Pin], platform: Platform, trace: list[TraceLine]
) -> Choice | None:
    def note(pin: Pin, verdict: Verdict, reason: str) -> None:
        trace.append(TraceLine(pin_set, pin.project, pin.filename, verdict, reason))

    fitting: list[Pin] = []
    for pin in sorted(pins, key=lambda pin: (pin.cuda, pin.arch.value, str(pin.sm or ""))):
        if pin.arch is not platform.arch:
            note(pin, Verdict.UNFIT, f"built for {pin.arch}, the platform is {platform.arch}")
        elif pin.cuda.major != platform.cuda.major:
            note(pin, Verdict.UNFIT, f"pinned for {pin.cuda}, another major than {platform.cuda}")
        elif pin.cuda > platform.cuda:
            note(pin, Verdict.UNFIT, f"pinned for {pin.cuda}, newer than {platform.cuda}")
        elif pin.sm is not None and platform.sm is None:
            note(pin, Verdict.UNFIT, f"a provider for {pin.sm} only, the platform's SM is not known")
        elif pin.sm is not None and platform.sm is not None and not platform.sm.runs(pin.sm):
            note(pin, Verdict.UNFIT, f"a provider for {pin.sm}, whose code {platform.sm} cannot run")
        else:
            fitting.append(pin)
    if not fitting:
        return None
    nearest = max(pin.cuda for pin in fitting)
    at_nearest = [pin for pin in fitting if pin.cuda == nearest]
    chosen = max(at_nearest, key=lambda pin: (pin.sm is not None, pin.sm.rank if pin.sm else ()))
    reason = _reason(chosen, platform)
    for pin in fitting:
        if pin is chosen:
            note(pin, Verdict.TAKEN, reason)
        elif pin.cuda != nearest:
            note(pin, Verdict.PASSED_OVER, f"pinned for {pin.cuda}, {nearest} is nearer to {platform.cuda}")
        elif pin.sm is None:
            note(pin, Verdict.PASSED_OVER, f"the monolith; {chosen.filename} is built for {chosen.sm}")
        else:
            note(pin, Verdict.PASSED_OVER, f"built for {pin.sm}; {chosen.sm} is nearer to {platform.sm}")
    return Choice(pin=chosen, pin_set=pin_set, reason=reason)


def _reason(pin: Pin, platform: Platform) -> str:
    if pin.cuda == platform.cuda:
        cuda = f"exact CUDA tag {pin.cuda}"
    else:
        cuda = f"nearest lower minor {pin.cuda} for {platform.cuda}"
    if pin.sm is not None:
        return f"{cuda}, provider for {pin.sm}"
    return cuda


def _available(pin_sets: Iterable[PinSet]) -> list[str]:
    """List the platforms each set's projects are pinned for."""
    lines: list[str] = []
    for pin_set in pin_sets:
        for project in sorted({pin.project for pin in pin_set.pins}):
            platforms = sorted(
                f"{pin.cuda} {pin.arch}" + (f" {pin.sm}" if pin.sm else "")
                for pin in pin_set.pins
                if pin.project == project
            )
            lines.append(f"{pin_set.name}: {project}: {', '.join(platforms)}")
    return lines
