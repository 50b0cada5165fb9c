"""Making room in a node's cache: whole bundles, least recently used first, never what is in use."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection as Words
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kernel_depot.bundle import Bundle
from kernel_depot.digest import is_sha256
from kernel_depot.worker.cache import Cache, storage_error
from kernel_depot.worker.errors import CacheEmpty
from kernel_depot.worker.usage import Usage, usage
from kernel_depot.worker.views import rs_wheels

UNNAMED_AGE: Final = 3600.0
"""Seconds after which a blob that no bundle here names is taken for left over by a sync that was given up."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A bundle that stays though room is wanted, and why."""

    digest: str
    why: str


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did. Sizes in bytes; `over` is by how much the cache is still above the limit."""

    limit: int | None
    before: int
    after: int
    removed: tuple[str, ...]
    removed_blobs: int
    kept: tuple[Kept, ...]

    @property
    def over(self) -> int:
        """How many bytes too many are left."""
        return max(0, self.after - self.limit) if self.limit is not None else 0


def collect(cache: Cache, *, limit: int | None, keep: Words[str] = (), dry_run: bool = False) -> Collected:
    """Remove bundles until the blobs take at most `limit` bytes; None removes only what no bundle names.

    What `current`, a pinned bundle, `keep` or a running process uses stays. Waits for syncs under way. A
    bundle goes in the order view, manifest, blobs: broken off, it is a bundle that must be fetched again.
    Raise CacheUnusable.
    """
    try:
        with cache.collecting():
            return _collect(cache, limit=limit, keep=keep, dry_run=dry_run)
    except OSError as error:
        raise storage_error(error, where=cache.root) from error


def pin(cache: Cache, digest: str) -> None:
    """Let no collection take a bundle. Raise CacheEmpty when it is not here."""
    if cache.bundle(digest) is None:
        raise CacheEmpty(
            f"the cache holds no bundle {digest}",
            where=str(cache.bundles),
            found=digest,
            remedy="see `kernel-depot cache ls`",
        )
    try:
        _marker(cache, digest).touch()
    except OSError as error:
        raise storage_error(error, where=cache.bundles) from error


def unpin(cache: Cache, digest: str) -> None:
    """Let collections take a bundle again; one that was not pinned is no error."""
    _marker(cache, digest).unlink(missing_ok=True)


def pinned(cache: Cache) -> frozenset[str]:
    """Return the pinned bundles."""
    return frozenset(path.stem for path in cache.bundles.glob("*.pinned") if is_sha256(path.stem))


def _marker(cache: Cache, digest: str) -> Path:
    return cache.bundles / f"{digest}.pinned"


def _collect(cache: Cache, *, limit: int | None, keep: Words[str], dry_run: bool) -> Collected:
    sizes = _sizes(cache)
    bundles = _bundles(cache)
    before = sum(sizes.values())
    seen = usage(cache)
    reasons = _reasons(cache, bundles, keep=keep, seen=seen)
    left = dict(bundles)
    removed: list[str] = []
    doomed: set[str] = set()
    if limit is not None:
        for digest in sorted(bundles, key=lambda digest: _last_use(cache, digest)):
            if before - sum(sizes[blob] for blob in doomed) <= limit:
                break
            if digest in reasons:
                continue
            del left[digest]
            removed.append(digest)
            doomed |= _own(bundles[digest], left, sizes, seen=seen)
    doomed |= _unnamed(cache, left, sizes, seen=seen)
    if not dry_run:
        for digest in removed:
            _remove_bundle(cache, digest)
        for blob in doomed:
            cache.blob_path(blob).unlink(missing_ok=True)
    return Collected(
        limit=limit,
        before=before,
        after=before - sum(sizes[blob] for blob in doomed),
        removed=tuple(removed),
        removed_blobs=len(doomed),
        kept=tuple(Kept(digest, why) for digest, why in sorted(reasons.items())),
    )


def _sizes(cache: Cache) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in cache.blobs.glob("*/*"):
        if is_sha256(path.name):
            with suppress(FileNotFoundError):
                found[path.name] = path.stat().st_size
    return found


def _bundles(cache: Cache) -> dict[str, Bundle]:
    found = {}
    for path in cache.bundles.glob("*.json"):
        bundle = cache.bundle(path.stem) if is_sha256(path.stem) else None
        if bundle is not None:
            found[path.stem] = bundle
    return found


def _reasons(cache: Cache, bundles: dict[str, Bundle], *, keep: Words[str], seen: Usage) -> dict[str, str]:
    """Say which bundles stay, and why."""
    reasons: dict[str, str] = {}
    stays = pinned(cache)
    for digest, bundle in bundles.items():
        if digest == cache.current_digest():
            reasons[digest] = "current"
        elif digest in stays:
            reasons[digest] = "pinned"
        elif digest in keep:
            reasons[digest] = "wanted"
        elif digest in seen.bundles:
            reasons[digest] = "a process uses its view"
        elif any(artifact.sha256 in seen.blobs for artifact in bundle.artifacts) and not _shared(
            digest, bundles, seen, cache
        ):
            reasons[digest] = "a process uses its files"
    return reasons


def _shared(digest: str, bundles: dict[str, Bundle], seen: Usage, cache: Cache) -> bool:
    """Tell whether all files in use of a bundle are the current bundle's too, which keeps them."""
    current = bundles.get(cache.current_digest() or "")
    if current is None:
        return False
    names = {artifact.sha256 for artifact in current.artifacts}
    return all(
        artifact.sha256 in names for artifact in bundles[digest].artifacts if artifact.sha256 in seen.blobs
    )


def _named(bundle: Bundle) -> set[str]:
    names = {artifact.sha256 for artifact in bundle.artifacts}
    return names | {wheel.sha256 for wheel in rs_wheels(bundle)}


def _own(bundle: Bundle, left: dict[str, Bundle], sizes: dict[str, int], *, seen: Usage) -> set[str]:
    """Return the blobs here that no other bundle names and no process uses."""
    others = set().union(*(_named(other) for other in left.values()))
    return {name for name in _named(bundle) if name in sizes and name not in others} - seen.blobs


def _unnamed(cache: Cache, left: dict[str, Bundle], sizes: dict[str, int], *, seen: Usage) -> set[str]:
    """Return old blobs that no bundle names: of a sync that was given up, or of a torn manifest."""
    named = set().union(*(_named(bundle) for bundle in left.values()))
    limit = time.time() - UNNAMED_AGE
    found = set()
    for name in sizes.keys() - named - seen.blobs:
        with suppress(FileNotFoundError):
            if cache.blob_path(name).stat().st_mtime < limit:
                found.add(name)
    return found


def _last_use(cache: Cache, digest: str) -> float:
    try:
        return cache.bundle_path(digest).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove_bundle(cache: Cache, digest: str) -> None:
    view = cache.view_dir(digest)
    with cache.private() as private:
        with suppress(FileNotFoundError):
            # Renamed first: nobody sees half a view.
            view.rename(private / digest)
        shutil.rmtree(private / digest, ignore_errors=True)
    cache.bundle_path(digest).unlink(missing_ok=True)
