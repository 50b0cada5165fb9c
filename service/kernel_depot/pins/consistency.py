"""What must hold between the pins of one set, and between sets that are used together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kernel_depot.pins.pin import Pin
from kernel_depot.pins.problem import PinProblem, Severity

# What flashinfer-python's own metadata asks of apache-tvm-ffi, by the FlashInfer versions that ask it.
_TVM_FFI_RANGES = (
    (SpecifierSet(">=0.6.1,<0.7"), SpecifierSet(">=0.1.6,!=0.1.8,!=0.1.8.post0,<0.2")),
    (SpecifierSet(">=0.7.4,<0.8"), SpecifierSet(">=0.1.11,<0.2")),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pin stands."""

    file: str
    table: str
    line: int | None

    def problem(self, code: str, message: str, severity: Severity = Severity.ERROR) -> PinProblem:
        """Return a finding at this place."""
        return PinProblem(self.file, self.table, self.line, code, message, severity)

    def __str__(self) -> str:
        return f"[{self.table}] in {self.file}" + (f" line {self.line}" if self.line else "")


@dataclass(frozen=True, slots=True)
class Placed:
    """A pin and its place."""

    pin: Pin
    place: Place


@dataclass(frozen=True, slots=True)
class Slot:
    """A platform for which a project has a table, whether or not the pin in it can be read."""

    project: str
    cuda: str
    arch: str
    place: Place


def set_problems(placed: Sequence[Placed], slots: Sequence[Slot]) -> list[PinProblem]:
    """Find what is wrong between the pins of one set."""
    return [
        *hash_conflicts(placed),
        *_same_place(placed),
        *_versions(placed),
        *_gaps(slots),
        *_tvm_ffi_range(placed),
    ]


def hash_conflicts(placed: Iterable[Placed]) -> list[PinProblem]:
    """Find one file name pinned with different hashes, in one set or across several."""
    first: dict[str, Placed] = {}
    problems: list[PinProblem] = []
    for item in placed:
        other = first.setdefault(item.pin.filename, item)
        if other.pin.sha256 != item.pin.sha256:
            problems.append(
                item.place.problem(
                    "hash-conflict",
                    f"{item.pin.filename} has sha256 {item.pin.sha256} here, "
                    f"{other.pin.sha256} at {other.place}",
                )
            )
    return problems


def _same_place(placed: Sequence[Placed]) -> list[PinProblem]:
    """Find two pins of one project for one platform and SM, which no rule could choose between."""
    first: dict[tuple[str, str, str, str], Placed] = {}
    problems: list[PinProblem] = []
    for item in placed:
        pin = item.pin
        key = (pin.project, str(pin.cuda), str(pin.arch), str(pin.sm or ""))
        other = first.setdefault(key, item)
        if other is not item:
            what = f"{pin.project} for {pin.cuda} {pin.arch}" + (f" {pin.sm}" if pin.sm else "")
            problems.append(
                item.place.problem("duplicate-pin", f"{what} is pinned twice, first at {other.place}")
            )
    return problems


def _versions(placed: Sequence[Placed]) -> list[PinProblem]:
    """Find a project whose platforms are pinned to different public versions (PEP 440)."""
    first: dict[str, Placed] = {}
    problems: list[PinProblem] = []
    for item in placed:
        other = first.setdefault(item.pin.project, item)
        here, there = Version(item.pin.version).public, Version(other.pin.version).public
        if here != there:
            message = f"{item.pin.project} is version {here} here and {there} at {other.place}"
            problems.append(item.place.problem("mixed-versions", message))
    return problems


def _gaps(slots: Sequence[Slot]) -> list[PinProblem]:
    """Find platforms for which one project of the set is pinned and another is not."""
    platforms: dict[tuple[str, str], set[str]] = defaultdict(set)
    first: dict[str, Place] = {}
    for slot in slots:
        platforms[(slot.cuda, slot.arch)].add(slot.project)
        first.setdefault(slot.project, slot.place)
    problems: list[PinProblem] = []
    for (cuda, arch), present in sorted(platforms.items()):
        for project in sorted(first.keys() - present):
            message = f"{project} is not pinned for {cuda} {arch}, where {', '.join(sorted(present))} is"
            problems.append(first[project].problem("platform-gap", message))
    return problems


def _tvm_ffi_range(placed: Sequence[Placed]) -> list[PinProblem]:
    """Warn of an apache-tvm-ffi outside the range that the pinned FlashInfer version declares."""
    versions = {
        Version(Version(item.pin.version).public)
        for item in placed
        if item.pin.project.startswith("flashinfer")
    }
    problems: list[PinProblem] = []
    seen: set[str] = set()
    for item in placed:
        if item.pin.project != "apache_tvm_ffi" or item.pin.filename in seen:
            continue
        seen.add(item.pin.filename)
        for flashinfer in sorted(versions):
            for applies, wanted in _TVM_FFI_RANGES:
                if flashinfer in applies and Version(item.pin.version) not in wanted:
                    message = (
                        f"apache-tvm-ffi {item.pin.version} is outside what flashinfer-python {flashinfer} "
                        f"declares ({wanted})"
                    )
                    problems.append(item.place.problem("tvm-ffi-range", message, Severity.WARNING))
    return problems
