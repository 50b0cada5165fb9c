"""Pinned wheels of a build: fetched, verified, and unpacked whole into a private tree."""

from __future__ import annotations

import base64
import hashlib
import mmap
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from kernel_depot.builder.cache import BuildCache, room
from kernel_depot.builder.errors import SourceMismatch
from kernel_depot.builder.plan import PinnedWheel
from kernel_depot.digest import sha256_file
from kernel_depot.pins.pin import IndexOrigin
from kernel_depot.settings import Settings
from kernel_depot.wheels.archive import ArchiveLimits, read_members
from kernel_depot.wheels.errors import WheelError
from kernel_depot.wheels.metadata import check_metadata, find_dist_info, read_filename
from kernel_depot.wheels.record import check_digest, check_listing, read_record
from kernel_depot.wheels.unpack import read_whole, unpack

Progress = Callable[[str, int, int | None], None]
"""Told the file's name, the bytes so far and the total if known."""

Keep = Callable[[str], str | None]
"""From a member's path to where it is written; None for what is left out."""


def bring(
    wheel: PinnedWheel, *, cache: BuildCache, settings: Settings, given: Path | None, progress: Progress
) -> Path:
    """Return the verified file of a pinned wheel: the cache's, the one given, or a download.

    Raise SourceMismatch for a given file with other bytes, PackageIndexError or FetchError.
    """
    dest = cache.wheels / wheel.sha256
    hosts: tuple[str, ...] = ()
    if given is not None:
        found = sha256_file(given)
        if found != wheel.sha256:
            raise SourceMismatch(
                "the file given is not the wheel that the plan pins",
                where=str(given),
                expected=wheel.sha256,
                found=found,
                remedy=f"give {wheel.filename} as its publisher has it, or correct the plan's pin",
            )
        return given
    from kernel_depot.wheels.fetch import fetch

    if dest.exists():
        url = wheel.filename
    elif isinstance(wheel.origin, IndexOrigin):
        from kernel_depot.pins.index import locate

        url = locate(
            index=wheel.origin.name,
            project=wheel.project,
            version=wheel.version,
            filename=wheel.filename,
            sha256=wheel.sha256,
            indexes=settings.index,
        )
        hosts = (urlsplit(url).hostname or "",)
    else:
        url = wheel.origin.url
    with room(wheel.filename):
        return fetch(
            url,
            sha256=wheel.sha256,
            dest=dest,
            policy=settings.fetch_policy(*hosts),
            size=wheel.size,
            on_progress=lambda done, total: progress(wheel.filename, done, total),
        ).path


def unpack_wheel(file: Path, wheel: PinnedWheel, target: Path, *, keep: Keep) -> None:
    """Write a wheel's members below `target`, each checked against RECORD. Raise a WheelError."""
    where = wheel.filename
    with file.open("rb") as handle:
        data = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
    members = [m for m in read_members(data, where=where, limits=ArchiveLimits()) if not m.is_directory]
    name = read_filename(wheel.filename)
    info = find_dist_info([member.name for member in members], name)
    listing = {member.name: member for member in members}
    if not {f"{info}/RECORD", f"{info}/METADATA"} <= set(listing):
        raise WheelError("the wheel has no RECORD or no METADATA", where=where)
    rows = read_record(read_whole(data, listing[f"{info}/RECORD"], where=where), where=where)
    check_listing(
        rows, [(member.name, member.size) for member in members], record=f"{info}/RECORD", where=where
    )
    check_metadata(read_whole(data, listing[f"{info}/METADATA"], where=where), name, where=where)
    for member in members:
        path = keep(member.name)
        if path is None:
            continue
        destination = target / path
        destination.parent.mkdir(parents=True, exist_ok=True)
        row = rows.get(member.name)
        digest = hashlib.new(row.algorithm) if row is not None and row.digest else None
        with destination.open("wb") as out:
            for piece in unpack(data, member, where=where):
                out.write(piece)
                if digest is not None:
                    digest.update(piece)
        if row is not None and digest is not None:
            check_digest(row, digest.digest(), where=where, path=member.name)
        destination.chmod(0o444)


def source_tree(file: Path, wheel: PinnedWheel, *, cache: BuildCache) -> Path:
    """Return the unpacked tree of a verified source wheel; one that was tampered with is made anew."""
    tree = cache.directory("sources", wheel.sha256)
    if tree.is_dir() and not _is_intact(tree):
        cache.drop("sources", wheel.sha256)
    return cache.make(
        "sources", wheel.sha256, lambda target: unpack_wheel(file, wheel, target, keep=lambda path: path)
    )


def _is_intact(tree: Path) -> bool:
    """Tell whether the tree's files are those of its own RECORD, no more and no less."""
    records = list(tree.glob("*.dist-info/RECORD"))
    if len(records) != 1:
        return False
    record = records[0]
    rows = read_record(record.read_bytes(), where=str(record))
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if not path.is_dir()}
    if files != set(rows) | {str(record.relative_to(tree))}:
        return False
    for path, row in rows.items():
        if row.digest and _digest(tree / path, row.algorithm) != row.digest:
            return False
    return True


def _digest(path: Path, algorithm: str) -> str:
    digest = hashlib.new(algorithm, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
