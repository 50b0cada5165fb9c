"""A package index by its name: from project, version and file name to the file's URL."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kernel_depot.errors import DepotError

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage, ProjectPage

DEFAULT_INDEX = "pypi"
READ_TIMEOUT = (10.0, 30.0)  # seconds to connect, and between bytes


class PackageIndexError(DepotError):
    """A package index that does not lead to the pinned file."""


class IndexUnknown(PackageIndexError):
    """An index name nobody has given an address."""

    slug = "index-unknown"
    title = "No address is known for this package index"
    status = 400


class IndexUnreachable(PackageIndexError):
    """An index that does not answer, or not with a project page."""

    slug = "index-unreachable"
    title = "The package index cannot be read"
    status = 502


class FileNotInIndex(PackageIndexError):
    """A pinned file that the index does not list."""

    slug = "file-not-in-index"
    title = "The package index does not have the pinned file"
    status = 404


class IndexHashMismatch(PackageIndexError):
    """An index that announces another hash than the pin's for the same file."""

    slug = "index-hash-mismatch"
    title = "The package index announces another hash than the pin"
    status = 502


def locate(
    *, index: str, project: str, version: str, filename: str, sha256: str, indexes: Mapping[str, str]
) -> str:
    """Return the URL of a pinned file in the index called `index` (PEP 503, PEP 691).

    `indexes` maps names to addresses; `pypi` without an entry is pypi-simple's default endpoint.

    Raise IndexUnknown, IndexUnreachable, FileNotInIndex (with the nearest names) or IndexHashMismatch.
    """
    from pypi_simple import PYPI_SIMPLE_ENDPOINT, NoSuchProjectError, PyPISimple, UnsupportedContentTypeError
    from requests import RequestException

    endpoint = indexes.get(index) or (PYPI_SIMPLE_ENDPOINT if index == DEFAULT_INDEX else None)
    if endpoint is None:
        raise IndexUnknown(
            f"the package index {index!r} has no address",
            where=filename,
            expected=", ".join(sorted({DEFAULT_INDEX, *indexes})),
            found=index,
            remedy=f"set KERNEL_DEPOT_INDEX_{index.upper()} to its simple-API address",
        )
    try:
        with PyPISimple(endpoint) as client:
            page = client.get_project_page(project, timeout=READ_TIMEOUT)
    except NoSuchProjectError as error:
        raise FileNotInIndex(
            f"the package index {index!r} has no project {project}",
            where=f"index {index}",
            expected=filename,
            remedy="check the project's name and the index the pin names",
        ) from error
    except (RequestException, UnsupportedContentTypeError, ValueError) as error:
        raise IndexUnreachable(
            f"the project page of {project} cannot be read: {cause(error)}",
            where=f"index {index}",
            remedy="check the network and proxy settings, or point the index name at a mirror with "
            f"KERNEL_DEPOT_INDEX_{index.upper()}",
        ) from error
    package = _find(page, filename)
    if package is None:
        raise FileNotInIndex(
            f"{filename} is not in the package index",
            where=f"index {index}, project {project}",
            expected=filename,
            found=_near(page, version, filename) or "no file of this version",
            remedy="correct the pin's filename, or choose a version that the index has",
        )
    announced = package.digests.get("sha256")
    if announced is not None and announced != sha256:
        raise IndexHashMismatch(
            f"the package index announces another hash for {filename}",
            where=f"index {index}, project {project}",
            expected=sha256,
            found=announced,
            remedy="do not use this file; find out which of the two is right and correct the pin",
        )
    return package.url


def _find(page: ProjectPage, filename: str) -> DistributionPackage | None:
    return next((package for package in page.packages if package.filename == filename), None)


def _near(page: ProjectPage, version: str, filename: str) -> list[str]:
    names = [package.filename for package in page.packages]
    same_version = [package.filename for package in page.packages if package.version == version]
    return difflib.get_close_matches(filename, same_version or names, n=5, cutoff=0.0)


def cause(error: BaseException) -> str:
    """Name the failure at the bottom of requests' chain, without the addresses in its text."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    return type(reason or error).__name__
