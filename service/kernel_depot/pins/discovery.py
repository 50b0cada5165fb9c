"""Newer pins for every platform of a set, or why there are none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from kernel_depot.pins.amendment import amend, place_of
from kernel_depot.pins.candidates import Candidate, Indexes
from kernel_depot.pins.pin import IndexOrigin, Pin, PinSet, StoreOrigin, UrlOrigin, project_word

_FAMILY: Final = "flashinfer"
"""Projects whose names begin so are released together and must have one version."""

_PYTHON: Final = "flashinfer_python"
_TVM_FFI: Final = "apache_tvm_ffi"


@dataclass(frozen=True, slots=True)
class Change:
    """A pin, and the one that would take its place."""

    before: Pin
    after: Pin


@dataclass(frozen=True, slots=True)
class Discovery:
    """What was found for one set. `text` is its TOML with the changes; without any it is as it was.

    `why_not` says of each newer version why it is not proposed.
    """

    pin_set: PinSet
    changes: tuple[Change, ...]
    why_not: tuple[str, ...]
    text: str


def discover(
    pin_set: PinSet, indexes: Indexes, *, projects: Iterable[str] = (), pre: bool = False
) -> Discovery:
    """Look for the newest version that fits every platform of a set, its projects agreeing on it.

    `projects` limits what may change; all may when it is empty. `pre` takes pre-releases and nightly builds
    too. FlashInfer's projects take one version, which flashinfer-python has too, and apache-tvm-ffi the
    newest that this flashinfer-python asks for. Raise IndexUnreachable.
    """
    search = _Search(pin_set, indexes, {project_word(name) for name in projects}, pre)
    pins = {place_of(change.before): change.after for change in search.run()}
    changes = tuple(Change(pin, pins[place_of(pin)]) for pin in pin_set.pins if place_of(pin) in pins)
    text = amend(pin_set, pins).text if changes else pin_set.text
    return Discovery(pin_set, changes, tuple(dict.fromkeys(search.why_not)), text)


class _Search:
    """One search through the indexes for one set."""

    def __init__(self, pin_set: PinSet, indexes: Indexes, chosen: set[str], pre: bool) -> None:
        self.indexes = indexes
        self.chosen = chosen
        self.pre = pre
        self.why_not: list[str] = []
        self.projects: dict[str, list[Pin]] = {}
        for pin in pin_set.pins:
            self.projects.setdefault(pin.project, []).append(pin)

    def run(self) -> list[Change]:
        family = sorted(name for name in self.projects if name.startswith(_FAMILY))
        alone = sorted(name for name in self.projects if name not in (*family, _TVM_FFI))
        now = _newest(pin for name in family for pin in self.projects[name])
        version, changes = self._family(family, now) if now is not None else (None, [])
        wanted = self._demand(version or now) if family and _TVM_FFI in self.projects else SpecifierSet()
        if wanted is None:
            return [change for name in alone for change in self._single(name, None)]
        beside = self._single(_TVM_FFI, wanted) if _TVM_FFI in self.projects else []
        if changes and _TVM_FFI in self.projects:
            unfit = self._unfit(wanted, beside)
            if unfit is not None:
                self.why_not.append(f"flashinfer {version}: {unfit}")
                return []
        return [*changes, *beside, *(change for name in alone for change in self._single(name, None))]

    def _family(self, family: Sequence[str], now: Version) -> tuple[Version | None, list[Change]]:
        """Find the newest version that every pin of FlashInfer's projects can have."""
        movable = [name for name in family if self._may_change(name)]
        if not movable:
            return None, []
        for version in self._newer({*movable}, now):
            changes: list[Change] = []
            reasons: list[str] = []
            if not any(item.public == version for item in self.indexes.wheels(_PYTHON)):
                reasons.append(f"no index has flashinfer-python {version}")
            for name in family:
                if name not in movable:
                    reasons.append(f"{name} is pinned to {now} and not among the chosen projects")
                    continue
                found, missing = self._at(name, version)
                changes += found
                reasons += missing
            if not reasons:
                return version, changes
            self.why_not += [f"flashinfer {version}: {reason}" for reason in reasons]
        return None, []

    def _single(self, project: str, wanted: SpecifierSet | None) -> list[Change]:
        """Find the newest version of one project, within a range when one is given."""
        if not self._may_change(project):
            return []
        now = _newest(self.projects[project])
        assert now is not None  # a project of the set has a pin
        outside = wanted is not None and now not in _with_pre(wanted)
        for version in self._newer({project}, None if outside else now):
            if wanted is not None and version not in _with_pre(wanted):
                self.why_not.append(f"{project} {version}: flashinfer-python asks for {wanted}")
                continue
            found, missing = self._at(project, version)
            if not missing:
                return found
            self.why_not += [f"{project} {version}: {reason}" for reason in missing]
        return []

    def _demand(self, version: Version | None) -> SpecifierSet | None:
        """Return what flashinfer-python of a version asks of apache-tvm-ffi; None: it cannot be told."""
        wheels = [item for item in self.indexes.wheels(_PYTHON) if item.public == version]
        if not wheels:
            self.why_not.append(
                f"{_TVM_FFI}: no index has flashinfer-python {version}, which says what versions it needs"
            )
            return None
        return self.indexes.demand(min(wheels, key=lambda item: item.filename), _TVM_FFI) or SpecifierSet()

    def _unfit(self, wanted: SpecifierSet, beside: Sequence[Change]) -> str | None:
        """Say why apache-tvm-ffi would be outside what the new flashinfer-python asks for, if it would."""
        now = _newest(self.projects[_TVM_FFI])
        then = Version(Version(beside[0].after.version).public) if beside else now
        if then is None or then in _with_pre(wanted):
            return None
        return f"it asks for {_TVM_FFI} {wanted}, and {then} would stay"

    def _may_change(self, project: str) -> bool:
        uploaded = [pin for pin in self.projects[project] if isinstance(pin.origin, StoreOrigin)]
        if uploaded:
            self.why_not.append(f"{project}: {uploaded[0].filename} was uploaded; no index has newer ones")
        return not uploaded and (not self.chosen or project in self.chosen)

    def _newer(self, projects: set[str], now: Version | None) -> list[Version]:
        """Return the versions above `now` that indexes list of any of the projects, the newest first."""
        found = {item.public for name in projects for item in self.indexes.wheels(name)}
        for filename in sorted(self.indexes.without_hash):
            name, version, _, _ = parse_wheel_filename(filename)
            if project_word(name) in projects and (now is None or Version(version.public) > now):
                self.why_not.append(f"{filename}: the index gives no SHA-256 of it")
        return sorted(
            (
                version
                for version in found
                if (now is None or version > now) and (self.pre or not version.is_prerelease)
            ),
            reverse=True,
        )

    def _at(self, project: str, version: Version) -> tuple[list[Change], list[str]]:
        """Return the changes that bring a project to a version, and the platforms without a wheel of it."""
        offered = [item for item in self.indexes.wheels(project) if item.public == version]
        changes, missing = [], []
        for pin in self.projects[project]:
            best = _best(pin, offered)
            if best is None:
                _, cuda, arch, sm = place_of(pin)
                missing.append(f"no wheel of {project} for {' '.join(filter(None, (cuda, arch, sm)))}")
            elif best.sha256 != pin.sha256:
                changes.append(Change(pin, _pin(pin, best)))
        return changes, missing


def _best(pin: Pin, offered: Iterable[Candidate]) -> Candidate | None:
    """Return the wheel that suits a pin's platform best: its CUDA tag or the nearest lower minor."""
    wanted = str(pin.sm) if pin.sm is not None else None
    _, _, _, tags = parse_wheel_filename(pin.filename)
    same = {(tag.interpreter, tag.abi) for tag in tags}
    fits = [
        item
        for item in offered
        if item.runs_on(pin.arch)
        and item.sm == wanted
        and (item.cuda is None or (item.cuda.major == pin.cuda.major and item.cuda.minor <= pin.cuda.minor))
    ]
    return min(
        fits,
        key=lambda item: (
            -(item.cuda.minor if item.cuda is not None else 0),
            not same & item.interpreters(),
            item.version.local or "",
            item.filename,
        ),
        default=None,
    )


def _pin(pin: Pin, found: Candidate) -> Pin:
    """Return the pin of a found wheel, named by its index where the pin was and the index has a name."""
    by_name = isinstance(pin.origin, IndexOrigin) and found.index is not None
    return replace(
        pin,
        version=str(found.version),
        filename=found.filename,
        sha256=found.sha256,
        origin=IndexOrigin(found.index) if by_name and found.index else UrlOrigin(found.url),
        size=found.size if pin.size is not None else None,
        record_sha256=None,
    )


def _newest(pins: Iterable[Pin]) -> Version | None:
    return max((Version(Version(pin.version).public) for pin in pins), default=None)


def _with_pre(wanted: SpecifierSet) -> SpecifierSet:
    return SpecifierSet(str(wanted), prereleases=True)
