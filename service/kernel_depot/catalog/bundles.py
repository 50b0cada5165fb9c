"""From a platform to the bundle a node gets: resolution, then the artifacts the catalog knows."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rfc8785
import sqlalchemy
from sqlalchemy import Engine
from sqlmodel import Session, col, select

from kernel_depot.bundle import (
    ArtifactKind,
    Bundle,
    BundleArtifact,
    BundleGroup,
    BundleWheel,
    MissingWheel,
    PinSetRef,
)
from kernel_depot.catalog import queries, record
from kernel_depot.catalog.database import writing
from kernel_depot.catalog.errors import CatalogError
from kernel_depot.catalog.tables import BundleAnswer, BundleRow, Inspection, Member, Wheel
from kernel_depot.digest import sha256_bytes
from kernel_depot.pins.groups import ModuleGroup, withheld
from kernel_depot.pins.pin import Pin, PinSet
from kernel_depot.pins.resolve import Resolution, TraceLine, resolve
from kernel_depot.platform import Platform
from kernel_depot.wheels.kinds import is_compiled_by

_NOT_TRIED = "not materialized"


class ModuleUnknown(CatalogError):
    """A kernel module that no wheel of the resolved pin sets has."""

    slug = "module-unknown"
    title = "No such kernel module"
    status = 404


class PinSetUnknown(CatalogError):
    """A name that means no pin set of this depot."""

    slug = "pin-set-unknown"
    title = "No such pin set"
    status = 404


class RevisionUnknown(CatalogError):
    """A digest that names no revision of this depot's pin sets, or none of the set asked about."""

    slug = "revision-unknown"
    title = "No such revision"
    status = 404


class GroupUnknown(CatalogError):
    """A module group that none of the resolved pin sets has."""

    slug = "module-group-unknown"
    title = "No such module group"
    status = 404


@dataclass(frozen=True, slots=True)
class ResolvedBundle:
    """A bundle's canonical bytes under their digest, and how it came about. Sizes are in bytes."""

    digest: str
    manifest: bytes
    missing: tuple[MissingWheel, ...]
    trace: tuple[TraceLine, ...]
    artifact_count: int
    total_size: int

    @property
    def complete(self) -> bool:
        """Tell whether every pinned wheel's artifacts are in the bundle."""
        return not self.missing


def resolve_bundle(
    session: Session,
    *,
    platform: Platform,
    pin_sets: Sequence[str] | None = None,
    modules: Sequence[str] | None = None,
    groups: Sequence[str] = (),
) -> ResolvedBundle:
    """Return the bundle for a platform, from all pin sets or those named; `modules` None takes everything.

    With `modules` the bundle holds these kernel modules, what they compile when they run, libtvm_ffi.so, and
    the metadata of the wheels all these come from.

    `groups` adds the modules of groups by name; without it, modules that only groups hold stay out,
    unless `modules` names them. A new bundle is recorded in a transaction of its own, so `session` must
    be one that reads.
    Raise PinSetUnknown, ModuleUnknown, GroupUnknown, and NothingFits or PinsConflict of `pins.resolve`.
    """
    sets = known_pin_sets(session, pin_sets)
    return resolve_revisions(session, sets, platform=platform, modules=modules, groups=groups)


def resolve_revisions(
    session: Session,
    sets: Sequence[PinSet],
    *,
    platform: Platform,
    modules: Sequence[str] | None = None,
    groups: Sequence[str] = (),
) -> ResolvedBundle:
    """Return the bundle for a platform from recorded revisions, current or not; as `resolve_bundle`."""
    resolution = resolve(sets, platform)
    pins = [choice.pin for choice in resolution.choices]
    wheels = {wheel.sha256: wheel for wheel in queries.wheels(session, {pin.sha256 for pin in pins})}
    missing = _missing(session, [pin for pin in pins if pin.sha256 not in wheels])
    wanted = tuple(sorted(set(modules))) if modules is not None else None
    refs = _refs(sets, resolution)
    defined = _groups(sets, refs)
    asked = tuple(sorted(set(groups)))
    _check_groups(defined, asked)
    question = _question(refs, platform, wanted, asked, pins, missing)
    answer = session.exec(
        select(BundleRow)
        .join(BundleAnswer, col(BundleAnswer.bundle) == col(BundleRow.digest))
        .where(BundleAnswer.question == question)
    ).one_or_none()
    if answer is None:
        bundle = _assemble(session, refs, platform, wanted, defined, asked, pins, wheels, missing)
        answer = _keep(session, question, bundle)
    return ResolvedBundle(
        digest=answer.digest,
        manifest=answer.manifest.encode(),
        missing=missing,
        trace=tuple(resolution.trace),
        artifact_count=answer.artifact_count,
        total_size=answer.total_size,
    )


def known_pin_sets(session: Session, names: Sequence[str] | None) -> list[PinSet]:
    """Return the revisions that the names, or all names, mean now. Raise PinSetUnknown."""
    sets = queries.current_pin_sets(session, names)
    if unknown := sorted(set(names or ()) - {pin_set.name for pin_set in sets}):
        known = [facts.name for facts in queries.pin_sets(session)]
        raise PinSetUnknown(
            f"this depot has no pin set {', '.join(map(repr, unknown))}",
            where="pins",
            expected=", ".join(known) or "none is recorded",
            found=", ".join(unknown),
            remedy="record it with POST /v1/pins or `kernel-depot materialize`",
        )
    return sets


def known_revisions(session: Session, digests: Sequence[str]) -> list[PinSet]:
    """Return recorded revisions, be they current or not. Raise RevisionUnknown."""
    found = [queries.pin_set_revision(session, digest) for digest in dict.fromkeys(digests)]
    sets = [pin_set for pin_set in found if pin_set is not None]
    if unknown := sorted(set(digests) - {pin_set.digest for pin_set in sets}):
        raise RevisionUnknown(
            f"this depot has no revision {', '.join(unknown)}",
            where="revisions",
            found=unknown,
            remedy="see GET /v1/pins/{name}/revisions",
        )
    return sets


def _refs(sets: Sequence[PinSet], resolution: Resolution) -> tuple[PinSetRef, ...]:
    """Name the revisions that pins were taken from, in the order of their names."""
    used = {choice.pin_set for choice in resolution.choices}
    return tuple(
        PinSetRef(pin_set.name, pin_set.digest)
        for pin_set in sorted(sets, key=lambda pin_set: pin_set.name)
        if pin_set.name in used
    )


def _groups(sets: Sequence[PinSet], refs: Sequence[PinSetRef]) -> tuple[ModuleGroup, ...]:
    """Return the groups of the pin sets that were used."""
    used = {ref.name for ref in refs}
    return tuple(group for pin_set in sets if pin_set.name in used for group in pin_set.groups)


def _check_groups(defined: Sequence[ModuleGroup], asked: Sequence[str]) -> None:
    known = sorted({group.name for group in defined})
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise GroupUnknown(
            f"no pin set that fits has the module group {', '.join(map(repr, unknown))}",
            where="group",
            expected=f"one of {', '.join(known)}" if known else "no group: none is defined",
            found=", ".join(unknown),
            remedy="define it in the pin set: a table [groups.NAME] with `modules`",
        )


def _asked_groups(
    defined: Sequence[ModuleGroup],
    asked: Sequence[str],
    artifacts: Sequence[BundleArtifact],
    missing: Sequence[MissingWheel],
) -> tuple[BundleGroup, ...]:
    """Return the groups asked for, with those of their modules that the wheels for this platform have.

    Sets that define a group of the same name give it together. Raise ModuleUnknown when nothing is left of
    one, unless a wheel that is missing could have its modules.
    """
    modules: dict[str, set[str]] = {name: set() for name in asked}
    for group in defined:
        if group.name in modules:
            modules[group.name].update(group.modules)
    there = {artifact.module for artifact in artifacts}
    for listed in modules.values():
        if not listed & there:
            _check_modules(artifacts, sorted(listed), missing)
    return tuple(BundleGroup(name, tuple(sorted(modules[name] & there))) for name in asked)


def _missing(session: Session, pins: Sequence[Pin]) -> tuple[MissingWheel, ...]:
    failures = {row.sha256: row.problem for row in queries.failures(session, {pin.sha256 for pin in pins})}
    found = {
        pin.sha256: MissingWheel(
            project=pin.project,
            filename=pin.filename,
            sha256=pin.sha256,
            reason=str(failures.get(pin.sha256, {}).get("type", _NOT_TRIED)),
        )
        for pin in pins
    }
    return tuple(sorted(found.values(), key=lambda wheel: (wheel.project, wheel.filename)))


def _question(
    refs: Sequence[PinSetRef],
    platform: Platform,
    modules: tuple[str, ...] | None,
    groups: tuple[str, ...],
    pins: Sequence[Pin],
    missing: Sequence[MissingWheel],
) -> str:
    """Name what a bundle depends on; the wheels' contents are fixed by their digests."""
    facts: dict[str, Any] = {
        "pin_sets": [[ref.name, ref.revision] for ref in refs],
        "platform": platform.to_json(),
        "modules": list(modules) if modules is not None else None,
        "groups": list(groups),
        "wheels": sorted(pin.sha256 for pin in pins),
        "missing": [[wheel.sha256, wheel.reason] for wheel in missing],
    }
    return sha256_bytes(rfc8785.dumps(facts))


def _assemble(
    session: Session,
    refs: tuple[PinSetRef, ...],
    platform: Platform,
    modules: tuple[str, ...] | None,
    defined: tuple[ModuleGroup, ...],
    asked: tuple[str, ...],
    pins: Sequence[Pin],
    wheels: dict[str, Wheel],
    missing: tuple[MissingWheel, ...],
) -> Bundle:
    artifacts = _artifacts(session, list(wheels))
    groups = _asked_groups(defined, asked, artifacts, missing)
    grouped = {module for group in groups for module in group.modules}
    if modules is not None:
        _check_modules(artifacts, modules, missing)
        artifacts = _select(artifacts, set(modules) | grouped)
    else:
        kept = withheld(defined, asked)
        artifacts = [artifact for artifact in artifacts if artifact.module not in kept]
    used = {artifact.wheel for artifact in artifacts}
    by_digest = {pin.sha256: pin for pin in pins}
    return Bundle(
        pin_sets=refs,
        platform=platform,
        modules=modules,
        groups=groups,
        wheels=tuple(
            BundleWheel(
                project=wheel.project,
                version=wheel.version,
                filename=wheel.filename,
                sha256=sha256,
                size=wheel.size,
                cuda=str(by_digest[sha256].cuda),
                sm=str(by_digest[sha256].sm) if by_digest[sha256].sm is not None else None,
            )
            for sha256, wheel in sorted(wheels.items(), key=lambda item: (item[1].project, item[0]))
            if modules is None or sha256 in used
        ),
        artifacts=tuple(artifacts),
        missing=missing,
    )


def _artifacts(session: Session, wheels: Sequence[str]) -> list[BundleArtifact]:
    """Return all artifacts of the wheels, by path."""
    columns: list[Any] = [Member.path, Member.kind, Member.sha256, Member.size, Member.wheel, Member.module]
    columns += [Inspection.sms, Inspection.ptx]
    rows = session.connection().execute(
        sqlalchemy.select(*columns)
        .outerjoin(Inspection, col(Member.sha256) == col(Inspection.sha256))
        .where(col(Member.wheel).in_(wheels), col(Member.kind).is_not(None))
    )
    found = [
        BundleArtifact(
            path=path,
            kind=ArtifactKind(kind),
            sha256=sha256,
            size=size,
            wheel=wheel,
            module=module,
            sms=tuple(sms or ()),
            ptx=tuple(ptx or ()),
        )
        for path, kind, sha256, size, wheel, module, sms, ptx in rows
    ]
    return sorted(found, key=lambda artifact: (artifact.path, artifact.wheel))


def _check_modules(
    artifacts: Sequence[BundleArtifact], modules: Sequence[str], missing: Sequence[MissingWheel]
) -> None:
    """Raise ModuleUnknown, unless a wheel that is missing could have the module."""
    known = {artifact.module for artifact in artifacts if artifact.module is not None}
    unknown = [name for name in modules if name not in known]
    if not unknown or missing:
        return
    near = {name: difflib.get_close_matches(name, known, n=5, cutoff=0.5) for name in unknown}
    suggestion = sorted({match for matches in near.values() for match in matches})
    raise ModuleUnknown(
        f"no pinned wheel has the kernel module {', '.join(map(repr, unknown))}",
        where="modules",
        expected=f"one of {len(known)} modules"
        + (f", such as {', '.join(suggestion)}" if suggestion else ""),
        found=", ".join(unknown),
        remedy="see GET /v1/artifacts for the modules there are",
        nearest=near,
    )


def _select(artifacts: Sequence[BundleArtifact], modules: set[str]) -> list[BundleArtifact]:
    chosen = [
        artifact
        for artifact in artifacts
        if artifact.kind is ArtifactKind.TVM_FFI
        or artifact.module in modules
        or any(is_compiled_by(artifact.path, module) for module in modules)
    ]
    wheels = {artifact.wheel for artifact in chosen}
    metadata = [
        artifact
        for artifact in artifacts
        if artifact.kind is ArtifactKind.METADATA and artifact.wheel in wheels
    ]
    return sorted([*chosen, *metadata], key=lambda artifact: (artifact.path, artifact.wheel))


def _keep(session: Session, question: str, bundle: Bundle) -> BundleRow:
    """Record a bundle as the answer to a question; who was faster recorded the same."""
    manifest = rfc8785.dumps(bundle.to_json())
    values = {
        "digest": sha256_bytes(manifest),
        "manifest": manifest.decode(),
        "artifact_count": len(bundle.artifacts),
        "total_size": bundle.total_size,
        "created_at": record.now(),
    }
    bind = session.get_bind()
    engine = bind if isinstance(bind, Engine) else bind.engine
    with writing(engine) as writer:
        record.insert_absent(writer, BundleRow, [values])
        record.insert_absent(writer, BundleAnswer, [{"question": question, "bundle": values["digest"]}])
    return BundleRow(**values)
