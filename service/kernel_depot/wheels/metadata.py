"""What a wheel says it is: file name (PEP 427), dist-info directory and METADATA, which must agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from kernel_depot.platform import Arch
from kernel_depot.wheels.errors import (
    MetadataContradiction,
    MetadataMissing,
    RecordMissing,
    WheelArchContradiction,
    WheelFilenameInvalid,
)


@dataclass(frozen=True, slots=True)
class WheelName:
    """What a wheel's file name says; `project` is normalized (PEP 503)."""

    filename: str
    project: str
    version: Version
    platforms: frozenset[str]


def read_filename(filename: str) -> WheelName:
    """Read a wheel's file name. Raise WheelFilenameInvalid."""
    try:
        project, version, _, tags = parse_wheel_filename(filename)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise WheelFilenameInvalid(
            f"{filename!r} is no wheel file name: {error}",
            expected="{project}-{version}(-{build})?-{python}-{abi}-{platform}.whl",
            found=filename,
        ) from error
    return WheelName(filename, project, version, frozenset(tag.platform for tag in tags))


def check_arch(name: WheelName, arch: Arch | None) -> None:
    """Check that the platform tags name `arch`, or no CPU at all. Raise WheelArchContradiction."""
    if arch is None or "any" in name.platforms:
        return
    if not any(platform.endswith(f"_{arch}") for platform in name.platforms):
        raise WheelArchContradiction(
            "the wheel's platform tag names another CPU",
            where=name.filename,
            expected=str(arch),
            found=sorted(name.platforms),
            remedy="correct the pin's arch or its file name",
        )


def find_dist_info(paths: Iterable[str], name: WheelName) -> str:
    """Return the one dist-info directory, without a slash.

    Raise RecordMissing when there is none or more than one, MetadataContradiction when it is named for
    another project or version.
    """
    tops = {path.partition("/")[0] for path in paths if ".dist-info/" in path}
    found = sorted(top for top in tops if top.endswith(".dist-info"))
    if len(found) != 1:
        raise RecordMissing(
            "the wheel must have exactly one dist-info directory", where=name.filename, found=found
        )
    project, _, version = found[0].removesuffix(".dist-info").rpartition("-")
    _check_same(name, project, version, where=f"{name.filename}: {found[0]!r}")
    return found[0]


def check_metadata(data: bytes, name: WheelName, *, where: str) -> None:
    """Check METADATA's Name and Version against the file name.

    Raise MetadataMissing when they cannot be read, MetadataContradiction when they differ.
    """
    from email.parser import HeaderParser

    try:
        headers = HeaderParser().parsestr(data.decode("utf-8"), headersonly=True)
    except UnicodeDecodeError as error:
        raise MetadataMissing("METADATA is not UTF-8", where=where) from error
    projects, versions = headers.get_all("Name", []), headers.get_all("Version", [])
    if len(projects) != 1 or len(versions) != 1:
        raise MetadataMissing(
            "METADATA must have one Name and one Version",
            where=where,
            found=f"{len(projects)} and {len(versions)}",
        )
    _check_same(name, str(projects[0]).strip(), str(versions[0]).strip(), where=where)


def _check_same(name: WheelName, project: str, version: str, *, where: str) -> None:
    try:
        same = canonicalize_name(project) == name.project and Version(version) == name.version
    except InvalidVersion:
        same = False
    if not same:
        raise MetadataContradiction(
            "the wheel names another project or version inside than in its file name",
            where=where,
            expected=f"{name.project} {name.version}",
            found=f"{project} {version}",
        )
