"""What package indexes offer: the wheels of a project that a pin could name, and what they ask for."""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from kernel_depot.digest import is_sha256
from kernel_depot.pins.index import READ_TIMEOUT, IndexUnreachable, cause
from kernel_depot.pins.pin import project_word
from kernel_depot.platform import Arch, CudaTag

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage, PyPISimple

MOST_WHEEL: Final = 64 << 20
"""Bytes of a wheel that is fetched for its METADATA alone, where the index serves none (PEP 658)."""

CUDA_FIELD: Final = "{cuda}"
"""Stands for a CUDA tag in the address of indexes that there are one of each."""

_LOCAL_CUDA: Final = re.compile(r"cu\d{3}")
_LOCAL_SM: Final = re.compile(r"sm\d{2,3}[af]?")
_LINUX: Final = re.compile(r"(manylinux\w*|linux)_(x86_64|aarch64)")


@dataclass(frozen=True, slots=True)
class IndexPlace:
    """An index: its simple-API address, which may hold `{cuda}`, and the name that pins give it, if any."""

    address: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A wheel that an index lists with its SHA-256. `cuda` and `sm` are what its local version names."""

    project: str
    version: Version
    filename: str
    url: str
    sha256: str
    size: int | None
    index: str | None
    tags: frozenset[Tag]
    cuda: CudaTag | None
    sm: str | None

    @property
    def public(self) -> Version:
        """The version without its local part."""
        return Version(self.version.public)

    def runs_on(self, arch: Arch) -> bool:
        """Tell whether the wheel is for Linux on a CPU."""
        for tag in self.tags:
            match = _LINUX.fullmatch(tag.platform)
            if tag.platform == "any" or (match is not None and match[2] == arch.value):
                return True
        return False

    def interpreters(self) -> frozenset[tuple[str, str]]:
        """Return the pairs of Python and ABI tag."""
        return frozenset((tag.interpreter, tag.abi) for tag in self.tags)


@dataclass
class Indexes:
    """Reads project pages, each once; closes its connections with `close`."""

    places: Sequence[IndexPlace]
    tags: Sequence[CudaTag]
    without_hash: set[str] = field(default_factory=set)
    _wheels: dict[str, list[Candidate]] = field(default_factory=dict)
    _packages: dict[str, tuple[PyPISimple, DistributionPackage]] = field(default_factory=dict)
    _demands: dict[str, SpecifierSet | None] = field(default_factory=dict)

    @cached_property
    def _clients(self) -> list[tuple[PyPISimple, IndexPlace]]:
        from pypi_simple import PyPISimple

        addresses: dict[str, IndexPlace] = {}
        for place in self.places:
            for address in _addresses(place.address, self.tags):
                addresses.setdefault(address, IndexPlace(address, place.name))
        return [(PyPISimple(address), place) for address, place in addresses.items()]

    def close(self) -> None:
        """Close the connections."""
        for client, _ in self._clients:
            client.s.close()

    def wheels(self, project: str) -> list[Candidate]:
        """Return what all indexes list of a project; yanked files and those without a SHA-256 are left out.

        Raise IndexUnreachable. An index that does not have the project lists nothing.
        """
        word = project_word(project)
        if word not in self._wheels:
            found: dict[str, Candidate] = {}
            for client, place in self._clients:
                for package in _page(client, place, word):
                    candidate = self._candidate(word, package, place)
                    if candidate is not None and candidate.filename not in found:
                        found[candidate.filename] = candidate
                        self._packages[candidate.filename] = client, package
            self._wheels[word] = list(found.values())
        return self._wheels[word]

    def demand(self, candidate: Candidate, project: str) -> SpecifierSet | None:
        """Return which versions of another project a wheel asks for; None: any.

        Read from the metadata that the index serves (PEP 658), else from the wheel. Raise IndexUnreachable.
        """
        key = f"{candidate.filename} {project}"
        if key not in self._demands:
            client, package = self._packages[candidate.filename]
            self._demands[key] = _asks(_metadata(client, package), project)
        return self._demands[key]

    def _candidate(self, project: str, package: DistributionPackage, place: IndexPlace) -> Candidate | None:
        if package.package_type != "wheel" or package.is_yanked:
            return None
        try:
            _, version, _, tags = parse_wheel_filename(package.filename)
        except InvalidWheelFilename:
            return None
        sha256 = package.digests.get("sha256", "")
        if not is_sha256(sha256):
            self.without_hash.add(package.filename)
            return None
        words = (version.local or "").split(".")
        return Candidate(
            project=project,
            version=version,
            filename=package.filename,
            url=package.url.partition("#")[0],
            sha256=sha256,
            size=package.size,
            index=place.name,
            tags=tags,
            cuda=next((CudaTag.parse(word) for word in words if _LOCAL_CUDA.fullmatch(word)), None),
            sm=next((word for word in words if _LOCAL_SM.fullmatch(word)), None),
        )


def _addresses(template: str, tags: Sequence[CudaTag]) -> Iterator[str]:
    if CUDA_FIELD not in template:
        yield template
    else:
        for tag in tags:
            yield template.replace(CUDA_FIELD, str(tag))


def _page(client: PyPISimple, place: IndexPlace, project: str) -> list[DistributionPackage]:
    from pypi_simple import NoSuchProjectError, UnsupportedContentTypeError, UnsupportedRepoVersionError
    from requests import RequestException

    try:
        return client.get_project_page(canonicalize_name(project), timeout=READ_TIMEOUT).packages
    except NoSuchProjectError:
        return []
    except (RequestException, UnsupportedContentTypeError, UnsupportedRepoVersionError, ValueError) as error:
        raise IndexUnreachable(
            f"the project page of {project} cannot be read: {cause(error)}",
            where=place.address,
            remedy="check the index's address, the network and the proxy settings",
        ) from error


def _metadata(client: PyPISimple, package: DistributionPackage) -> str:
    from pypi_simple import DigestMismatchError, NoDigestsError, NoMetadataError
    from requests import RequestException

    try:
        if package.has_metadata is not False:
            with suppress(NoMetadataError):
                return client.get_package_metadata(
                    package, verify=bool(package.metadata_digests), timeout=READ_TIMEOUT
                )
        return _metadata_of_wheel(client, package)
    except (RequestException, DigestMismatchError, NoDigestsError, zipfile.BadZipFile, KeyError) as error:
        raise IndexUnreachable(
            f"the metadata of {package.filename} cannot be read: {cause(error)}",
            where=package.url.partition("#")[0],
            remedy="check the network, or name an index that serves it",
        ) from error


def _metadata_of_wheel(client: PyPISimple, package: DistributionPackage) -> str:
    if package.size is not None and package.size > MOST_WHEEL:
        raise IndexUnreachable(
            f"the index serves no metadata of {package.filename}, and the wheel is too large to look into",
            where=package.filename,
            expected=f"at most {MOST_WHEEL} bytes",
            found=package.size,
            remedy="name an index that serves metadata (PEP 658)",
        )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "wheel")
        client.download_package(package, path, timeout=READ_TIMEOUT)
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return archive.read(name).decode("utf-8", "replace")


def _asks(metadata: str, project: str) -> SpecifierSet | None:
    raw, _ = parse_email(metadata)
    wanted: SpecifierSet | None = None
    for line in raw.get("requires_dist", []):
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) != canonicalize_name(project):
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            wanted = requirement.specifier & (wanted or SpecifierSet())
    return wanted
