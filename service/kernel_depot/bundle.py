"""The bundle: the resolved, immutable list of artifacts for pin-set revisions and a platform.

A bundle's bytes are canonical JSON (RFC 8785) made by the server; its name is their SHA-256. Readers
check the digest over the bytes they got and never re-serialize.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kernel_depot.digest import is_sha256, sha256_bytes
from kernel_depot.errors import DepotError
from kernel_depot.platform import Platform

SCHEMA = 1


class BundleError(DepotError):
    """Bytes that are not the bundle they claim to be."""

    slug = "bundle-invalid"
    title = "Not a bundle"
    status = 502


class ArtifactKind(str, Enum):
    """What a useful file out of a wheel is."""

    MODULE = "module"  # jit_cache/<uri>/<uri>.so
    TVM_FFI = "tvm_ffi"  # libtvm_ffi.so
    CUBIN = "cubin"
    SUPPORT = "support"  # what is read beside modules and cubins: checksums, headers, package code
    METADATA = "metadata"  # *.dist-info/*

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class PinSetRef:
    """One revision of a pin set."""

    name: str
    revision: str


@dataclass(frozen=True, slots=True)
class BundleWheel:
    """A wheel that a bundle takes artifacts from, and the CUDA tag of the pin that chose it."""

    project: str
    version: str
    filename: str
    sha256: str
    size: int
    cuda: str
    sm: str | None = None


@dataclass(frozen=True, slots=True)
class BundleArtifact:
    """One file a node gets: `path` as in its wheel, bytes named by `sha256`.

    `sms` and `ptx` are the targets embedded in a module's fatbin or a cubin (`sm_90a`).
    """

    path: str
    kind: ArtifactKind
    sha256: str
    size: int
    wheel: str
    module: str | None = None
    sms: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MissingWheel:
    """A pinned wheel that is not in the store yet, so its artifacts are not in the bundle."""

    project: str
    filename: str
    sha256: str
    reason: str


@dataclass(frozen=True, slots=True)
class BundleGroup:
    """A module group that was asked for by name, and the kernel modules it stands for."""

    name: str
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """The manifest. `modules` is the selection asked for, None for all; `groups` were asked for by name."""

    pin_sets: tuple[PinSetRef, ...]
    platform: Platform
    wheels: tuple[BundleWheel, ...]
    artifacts: tuple[BundleArtifact, ...]
    missing: tuple[MissingWheel, ...] = ()
    modules: tuple[str, ...] | None = None
    groups: tuple[BundleGroup, ...] = ()

    @property
    def complete(self) -> bool:
        """Tell whether every pinned wheel's artifacts are listed."""
        return not self.missing

    @property
    def total_size(self) -> int:
        """The bytes of all distinct blobs."""
        return sum({artifact.sha256: artifact.size for artifact in self.artifacts}.values())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's members, ready for canonical serialization."""
        return {
            "schema": SCHEMA,
            "pin_sets": [{"name": ref.name, "revision": ref.revision} for ref in self.pin_sets],
            "platform": self.platform.to_json(),
            "modules": list(self.modules) if self.modules is not None else None,
            "groups": [{"name": group.name, "modules": list(group.modules)} for group in self.groups],
            "wheels": [
                {
                    "project": wheel.project,
                    "version": wheel.version,
                    "filename": wheel.filename,
                    "sha256": wheel.sha256,
                    "size": wheel.size,
                    "cuda": wheel.cuda,
                    "sm": wheel.sm,
                }
                for wheel in self.wheels
            ],
            "artifacts": [
                {
                    "path": artifact.path,
                    "kind": artifact.kind.value,
                    "sha256": artifact.sha256,
                    "size": artifact.size,
                    "wheel": artifact.wheel,
                    "module": artifact.module,
                    "sms": list(artifact.sms),
                    "ptx": list(artifact.ptx),
                }
                for artifact in self.artifacts
            ],
            "missing": [
                {
                    "project": wheel.project,
                    "filename": wheel.filename,
                    "sha256": wheel.sha256,
                    "reason": wheel.reason,
                }
                for wheel in self.missing
            ],
        }


def read_bundle(data: bytes, *, digest: str, where: str) -> Bundle:
    """Read a manifest's bytes and check them against the digest that names them.

    Raise BundleError when the digest differs, the JSON is not a manifest of a known schema, or an
    artifact path could leave the directory a view is built in.
    """
    actual = sha256_bytes(data)
    if actual != digest:
        raise BundleError(
            "the bundle's bytes do not match its digest",
            where=where,
            expected=digest,
            found=actual,
            remedy="sync again; if it repeats, scrub the server's store",
        )
    try:
        members = json.loads(data)
        if members["schema"] != SCHEMA:
            raise BundleError(
                "the bundle's schema is not known to this client",
                where=where,
                expected=SCHEMA,
                found=members["schema"],
                remedy="upgrade kernel-depot on this node",
            )
        bundle = Bundle(
            pin_sets=tuple(PinSetRef(**ref) for ref in members["pin_sets"]),
            platform=Platform.from_json(members["platform"]),
            modules=tuple(members["modules"]) if members["modules"] is not None else None,
            groups=tuple(
                BundleGroup(group["name"], tuple(group["modules"])) for group in members.get("groups", ())
            ),
            wheels=tuple(BundleWheel(**wheel) for wheel in members["wheels"]),
            artifacts=tuple(_artifact(item) for item in members["artifacts"]),
            missing=tuple(MissingWheel(**wheel) for wheel in members["missing"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f"the bundle cannot be read: {error!r}", where=where) from error
    _check_artifacts(bundle.artifacts, where=where)
    return bundle


def _artifact(item: dict[str, Any]) -> BundleArtifact:
    return BundleArtifact(
        path=item["path"],
        kind=ArtifactKind(item["kind"]),
        sha256=item["sha256"],
        size=item["size"],
        wheel=item["wheel"],
        module=item["module"],
        sms=tuple(item["sms"]),
        ptx=tuple(item["ptx"]),
    )


def _check_artifacts(artifacts: Iterable[BundleArtifact], *, where: str) -> None:
    for artifact in artifacts:
        parts = artifact.path.split("/")
        if (
            not artifact.path
            or artifact.path.startswith("/")
            or any(part in ("", ".", "..") for part in parts)
        ):
            raise BundleError("an artifact's path leaves its directory", where=where, found=artifact.path)
        if "\\" in artifact.path or "\0" in artifact.path:
            raise BundleError(
                "an artifact's path has a forbidden character", where=where, found=artifact.path
            )
        if not is_sha256(artifact.sha256) or not is_sha256(artifact.wheel) or artifact.size < 0:
            raise BundleError("an artifact's digest or size is wrong", where=where, found=artifact.path)
