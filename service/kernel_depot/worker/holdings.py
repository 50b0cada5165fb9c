"""What a node's cache holds: its bundles with their sizes, and whether its blobs are what they are named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernel_depot.bundle import Bundle
from kernel_depot.digest import is_sha256, sha256_file
from kernel_depot.worker.cache import Cache, storage_error


@dataclass(frozen=True, slots=True)
class Holding:
    """A bundle whose manifest is here; `missing` counts its artifacts' blobs that are absent or cut short.

    `own_bytes` are the blobs that no other bundle here names. `views` are the directories built for it.
    """

    digest: str
    platform: str
    current: bool
    blobs: int
    bytes: int
    own_bytes: int
    missing: int
    views: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Holdings:
    """All bundles of a cache, and all its blobs; `unreadable` names manifests that are torn."""

    bundles: tuple[Holding, ...]
    unreadable: tuple[str, ...]
    blobs: int
    bytes: int
    unnamed_bytes: int


@dataclass(frozen=True, slots=True)
class WrongBlob:
    """A file whose bytes have another digest than its name; `found` is theirs."""

    path: Path
    found: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What hashing every blob showed; nothing was changed."""

    blobs: int
    bytes: int
    wrong: tuple[WrongBlob, ...]


def holdings(cache: Cache) -> Holdings:
    """List a cache from its manifests and its files' sizes; no blob is opened.

    Blobs no manifest here names count as `unnamed_bytes`: wheels that a view keeps, or a sync's under way.
    Raise CacheUnusable.
    """
    blobs = {path.name: size for path, size in _blobs(cache)}
    bundles: dict[str, Bundle] = {}
    unreadable: list[str] = []
    for digest in _manifests(cache):
        bundle = cache.bundle(digest)
        if bundle is None:
            unreadable.append(digest)
        else:
            bundles[digest] = bundle
    sizes = {digest: {a.sha256: a.size for a in bundle.artifacts} for digest, bundle in bundles.items()}
    named: dict[str, int] = {}
    for wanted in sizes.values():
        for sha256 in wanted:
            named[sha256] = named.get(sha256, 0) + 1
    current = cache.current_digest()
    return Holdings(
        bundles=tuple(
            Holding(
                digest=digest,
                platform=str(bundle.platform),
                current=digest == current,
                blobs=len(sizes[digest]),
                bytes=sum(sizes[digest].values()),
                own_bytes=sum(size for sha256, size in sizes[digest].items() if named[sha256] == 1),
                missing=sum(blobs.get(sha256) != size for sha256, size in sizes[digest].items()),
                views=_views(cache, digest),
            )
            for digest, bundle in bundles.items()
        ),
        unreadable=tuple(unreadable),
        blobs=len(blobs),
        bytes=sum(blobs.values()),
        unnamed_bytes=sum(size for sha256, size in blobs.items() if sha256 not in named),
    )


def verify(cache: Cache) -> Verification:
    """Hash every blob of a cache and compare with its name. Raise CacheUnusable."""
    wrong: list[WrongBlob] = []
    count = total = 0
    for path, size in _blobs(cache):
        try:
            found = sha256_file(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise storage_error(error, where=path) from error
        count += 1
        total += size
        if found != path.name:
            wrong.append(WrongBlob(path, found))
    return Verification(count, total, tuple(wrong))


def _blobs(cache: Cache) -> list[tuple[Path, int]]:
    try:
        return [
            (path, path.stat().st_size) for path in sorted(cache.blobs.glob("*/*")) if is_sha256(path.name)
        ]
    except OSError as error:
        raise storage_error(error, where=cache.blobs) from error


def _manifests(cache: Cache) -> list[str]:
    return [path.stem for path in sorted(cache.bundles.glob("*.json")) if is_sha256(path.stem)]


def _views(cache: Cache, digest: str) -> tuple[str, ...]:
    directory = cache.view_dir(digest)
    return tuple(sorted(path.name for path in directory.iterdir())) if directory.is_dir() else ()
