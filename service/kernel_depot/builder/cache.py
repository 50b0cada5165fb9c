"""The builder's own directory: sources, toolchains, recipes and built modules, each named by what it is.

    wheels/<sha256>            verified source and toolchain wheels
    sources/<sha256>/          source trees, unpacked
    toolchains/<digest>/       parts of CUDA put together from wheels
    probes/<digest>.json       what a compiler said of itself
    recipes/<digest>/          how a module is compiled: recipe.json, gen/
    modules/<key>/             built modules: module.so, module.json
    work/<key>.<process>/      modules under way
    logs/<uri>.<key>.log       what the compiler said last

A directory appears under its name by a rename, whole or not at all.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernel_depot.builder.errors import BuildDiskFull
from kernel_depot.digest import sha256_file
from kernel_depot.liveness import is_dead, process_name

_LEFT = "left-"


@dataclass(frozen=True, slots=True)
class BuiltModule:
    """A module that was built: what it is (`sha256`, `size` bytes) and how it came about.

    `seconds` and `peak` (bytes) are those of the build that made it. `sms` are its code's targets.
    """

    uri: str
    key: str
    sha256: str
    size: int
    sms: tuple[str, ...]
    glibc: str | None
    glibcxx: str | None
    functions: tuple[str, ...]
    recipe: str
    toolchain: dict[str, Any]
    seconds: float
    peak: int
    isolated: bool

    def to_json(self) -> dict[str, Any]:
        """Return the members, as `module.json` holds them."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BuiltModule:
        """Read what `to_json` wrote."""
        return cls(**{**data, "sms": tuple(data["sms"]), "functions": tuple(data["functions"])})


class BuildCache:
    """The directory and the names in it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.wheels = self.root / "wheels"
        self.work = self.root / "work"
        self.logs = self.root / "logs"
        for directory in (self.wheels, self.work, self.logs):
            directory.mkdir(parents=True, exist_ok=True)

    def directory(self, kind: str, name: str) -> Path:
        """Return where the directory `name` of a kind lies, or will lie."""
        return self.root / kind / name

    def make(self, kind: str, name: str, fill: Callable[[Path], None]) -> Path:
        """Return the directory `name`, made by `fill` under a private name if it is not there."""
        final = self.directory(kind, name)
        if final.is_dir():
            return final
        private = self.work / f"{name[:64]}.{process_name()}"
        private.mkdir()
        try:
            with room(str(final)):
                fill(private)
                final.parent.mkdir(parents=True, exist_ok=True)
                _publish(private, final)
        finally:
            shutil.rmtree(private, ignore_errors=True)
        return final

    def drop(self, kind: str, name: str) -> None:
        """Remove a directory that turned out not to be what its name says; at once, by a rename."""
        gone = self.work / f"dropped.{process_name()}"
        try:
            self.directory(kind, name).rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def module(self, key: str) -> tuple[BuiltModule, Path] | None:
        """Return a built module and its file, its bytes checked; a damaged one is dropped and None."""
        directory = self.directory("modules", key)
        try:
            built = BuiltModule.from_json(json.loads((directory / "module.json").read_text(encoding="utf-8")))
            if built.key == key and sha256_file(directory / "module.so") == built.sha256:
                return built, directory / "module.so"
        except FileNotFoundError:
            if not directory.exists():
                return None
        except (ValueError, TypeError, KeyError):
            pass
        self.drop("modules", key)
        return None

    def keep(self, built: BuiltModule, library: Path) -> Path:
        """Take a built module in, and return its file. The first of two builders wins."""

        def fill(private: Path) -> None:
            shutil.copyfile(library, private / "module.so")
            (private / "module.so").chmod(0o444)
            (private / "module.json").write_text(json.dumps(built.to_json(), indent=1), encoding="utf-8")

        return self.make("modules", built.key, fill) / "module.so"

    def adopt(self, key: str) -> Path:
        """Return a private working directory for a module: one that a dead builder left, or a new one."""
        mine = self.work / f"{key}.{process_name()}"
        for left in sorted(self.work.glob(f"{key}.*")):
            if _is_left(left):
                try:
                    left.rename(mine)
                except OSError:
                    continue
                return mine
        mine.mkdir()
        return mine

    def release(self, work: Path) -> None:
        """Leave a working directory to whoever builds the module next."""
        work.rename(work.with_name(f"{work.name.partition('.')[0]}.{_LEFT}{secrets.token_hex(6)}"))

    def sweep(self) -> None:
        """Remove what dead builders left half-made, but modules under way, which can be resumed."""
        for left in self.work.iterdir():
            resumable = len(left.name.partition(".")[0]) == 64 and (left / "build.ninja").exists()
            if _is_left(left) and not resumable:
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)


@contextmanager
def room(where: str) -> Iterator[None]:
    """Turn a full disk into BuildDiskFull, which names what was written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BuildDiskFull(
            f"no room for {error.filename or where}",
            where=where,
            remedy="free space, or choose another --cache directory; finished modules are kept",
        ) from error


def _is_left(work: Path) -> bool:
    owner = work.name.partition(".")[2]
    return owner.startswith(_LEFT) or bool(is_dead(owner))


def _publish(private: Path, final: Path) -> None:
    for path in private.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.suffix in (".so", ".json"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
    try:
        private.rename(final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
