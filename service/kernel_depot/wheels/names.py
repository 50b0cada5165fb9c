"""Which names a wheel's members may have: plain relative paths that mean one file everywhere."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from kernel_depot.wheels.errors import (
    MemberFileAndDirectory,
    MemberNameCaseCollision,
    MemberNameDuplicate,
    MemberNameUnicodeCollision,
    MemberPathAbsolute,
    MemberPathBackslash,
    MemberPathControlCharacter,
    MemberPathDriveLetter,
    MemberPathNotNormal,
    MemberPathNul,
    MemberPathTooLong,
    MemberPathTraversal,
    WheelError,
)

MAX_PATH = 1024
MAX_SEGMENT = 255

_PLAIN = bytes(byte for byte in range(0x20, 0x7F) if byte not in b":\\") + b"\n"
_DRIVE = re.compile(r"[A-Za-z]:")
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def check_names(names: Sequence[str], *, where: str) -> None:
    """Check each name, and that no two of them could mean one file.

    Raise the member path and member name errors of `wheels.errors`.
    """
    joined = "\n".join(names)
    plain = joined.count("\n") == len(names) - 1 and _is_plain(joined)
    for name in names:
        if not plain or (len(name) > MAX_SEGMENT and not _is_short(name)):
            check_name(name, where=where)
    bare = [name.removesuffix("/") for name in names]
    _check_distinct(names, bare, MemberNameDuplicate, "are the same", where=where)
    if plain:
        folded = [key.removesuffix("/") for key in joined.lower().split("\n")]
    else:
        composed = [_composed(name) for name in bare]
        _check_distinct(bare, composed, MemberNameUnicodeCollision, "differ in Unicode spelling", where=where)
        folded = [_folded(name) for name in bare]
    _check_distinct(bare, folded, MemberNameCaseCollision, "differ only in case", where=where)
    files = {name for name in names if not name.endswith("/")}
    for parent in _parents(names):
        if parent in files:
            raise MemberFileAndDirectory(
                "a member is a file and the directory of another member", where=f"{where}: {parent!r}"
            )


def check_name(name: str, *, where: str) -> None:
    """Check one name; a directory's ends with `/`. Raise a member path error of `wheels.errors`."""
    found = f"{where}: {name!r}"
    if "\0" in name:
        raise MemberPathNul("the member's name has a NUL", where=found)
    if not (name.isascii() and name.isprintable()) and any(
        unicodedata.category(character) in _INVISIBLE for character in name
    ):
        raise MemberPathControlCharacter("the member's name has a control character", where=found)
    if "\\" in name:
        raise MemberPathBackslash("the member's name has a backslash", where=found)
    if name.startswith("/"):
        raise MemberPathAbsolute("the member's name is an absolute path", where=found)
    segments = name.removesuffix("/").split("/")
    for segment in segments:
        if segment == "..":
            raise MemberPathTraversal("the member's name leaves its directory", where=found)
        if segment in ("", "."):
            raise MemberPathNotNormal("the member's name has an empty or `.` segment", where=found)
        if _DRIVE.match(segment):
            raise MemberPathDriveLetter("the member's name has a drive letter", where=found)
        if len(segment.encode()) > MAX_SEGMENT:
            raise MemberPathTooLong(
                "a segment of the member's name is too long", where=found, expected=f"{MAX_SEGMENT} bytes"
            )
    if len(name.encode()) > MAX_PATH:
        raise MemberPathTooLong("the member's name is too long", where=found, expected=f"{MAX_PATH} bytes")


def _is_short(name: str) -> bool:
    """Tell whether a plain name and its segments are no longer than they may be."""
    return len(name) <= MAX_PATH and max(map(len, name.split("/"))) <= MAX_SEGMENT


def _is_plain(lines: str) -> bool:
    """Tell whether no line has anything that `check_name` looks for, its length aside.

    A wheel has thousands of names and hardly ever one that needs a closer look: some searches through all
    of them at once cost a tenth of looking at each.
    """
    return (
        not lines.encode("utf-8", "surrogatepass").translate(None, _PLAIN)
        and not lines.startswith(("/", ".", "\n"))
        and not any(mark in lines for mark in ("//", "/.", "\n/", "\n.", "\n\n"))
    )


def _composed(name: str) -> str:
    return name if name.isascii() else unicodedata.normalize("NFKC", name)


def _folded(name: str) -> str:
    if name.isascii():
        return name.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def _check_distinct(
    names: Sequence[str], keys: Sequence[str], error: type[WheelError], how: str, *, where: str
) -> None:
    if len(set(keys)) == len(keys):
        return
    seen: dict[str, str] = {}
    for name, key in zip(names, keys, strict=True):
        if key in seen:
            raise error(f"two members' names {how}", where=where, found=[seen[key], name])
        seen[key] = name


def _parents(names: Sequence[str]) -> set[str]:
    parents: set[str] = set()
    for directory in {name.removesuffix("/").rpartition("/")[0] for name in names}:
        parent = directory
        while parent and parent not in parents:
            parents.add(parent)
            parent = parent.rpartition("/")[0]
    return parents
