"""Pin sets as documents: TOML files, a Cargo.toml that carries pins, and JSON of the same shape."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from kernel_depot.digest import is_sha256
from kernel_depot.pins import groups
from kernel_depot.pins.consistency import Place, Placed, Slot, set_problems
from kernel_depot.pins.groups import ModuleGroup
from kernel_depot.pins.pin import IndexOrigin, Origin, Pin, PinSet, StoreOrigin, UrlOrigin, project_word
from kernel_depot.pins.positions import KeyPath, line_of, positions
from kernel_depot.pins.problem import PinProblem, PinSetInvalid, PinSetUnreadable, Severity
from kernel_depot.platform import Arch, CudaTag, PlatformError, Sm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PIN_KEYS = ("filename", "sha256", "url", "index", "store", "size", "sm", "record_sha256")
CARGO_PATH = ("package", "metadata", "flashinfer_rs", "pinned_wheels")
MAX_DOCUMENT_BYTES = 4 << 20
_INDEX_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_ARCH_TAG = re.compile(r"_(x86_64|aarch64)$")
_LOCAL_CUDA = re.compile(r"cu(\d{3})(?:\.|$)")

Document: TypeAlias = Mapping[str, Any]


def read_pin_set(path: Path, *, allow_file_urls: bool = False) -> PinSet:
    """Read a TOML pin set, or the pins that a Cargo.toml carries; the set is named after the file.

    Raise PinSetUnreadable for a file that cannot be opened, PinSetInvalid with every error found.
    """
    examined = examine_file(path, allow_file_urls=allow_file_urls)
    if examined.pin_set is None:
        raise PinSetInvalid(examined.problems, origin=str(path))
    return examined.pin_set


def parse_pin_set(text: str, *, name: str, origin: str, allow_file_urls: bool = False) -> PinSet:
    """Read a pin set's TOML text. Raise PinSetInvalid with every error found."""
    examined = examine_text(text, name=name, origin=origin, allow_file_urls=allow_file_urls)
    if examined.pin_set is None:
        raise PinSetInvalid(examined.problems, origin=origin)
    return examined.pin_set


def pin_set_from_json(document: object, *, name: str, origin: str, allow_file_urls: bool = False) -> PinSet:
    """Read a pin set given as JSON of the TOML's shape: `{project: {cuda_tag: {arch: pin}}}`.

    Raise PinSetInvalid with every error found.
    """
    reader = _Reader(origin=origin, lines={}, root=(), allow_file_urls=allow_file_urls)
    if isinstance(document, dict):
        placed = reader.read(document)
    else:
        reader.note((), "not-a-table", "a pin set is an object of projects")
        placed = []
    problems = [*reader.problems, *set_problems(placed, reader.slots)]
    if any(problem.severity is Severity.ERROR for problem in problems):
        raise PinSetInvalid(problems, origin=origin)
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    pins = tuple(item.pin for item in placed)
    return PinSet(name=name, pins=pins, text=text, origin=origin, groups=reader.groups)


@dataclass(frozen=True, slots=True)
class Examined:
    """What a document holds: the set, None when it has errors; the pins that can be read; all findings."""

    pin_set: PinSet | None
    placed: tuple[Placed, ...]
    problems: tuple[PinProblem, ...]


def examine_file(path: Path, *, allow_file_urls: bool) -> Examined:
    """Read a pin-set file and find everything that is wrong in it.

    Raise PinSetUnreadable when the file cannot be opened or is no UTF-8 text.
    """
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise PinSetUnreadable(
                f"{path.name} is too large for a pin set",
                where=str(path),
                expected=f"at most {MAX_DOCUMENT_BYTES} bytes",
                found=path.stat().st_size,
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PinSetUnreadable(
            f"{path.name} cannot be read: {error.strerror}",
            where=str(path),
            remedy="check the path and its permissions",
        ) from error
    except UnicodeDecodeError as error:
        raise PinSetUnreadable(
            f"{path.name} is not UTF-8 text", where=str(path), found=str(error), remedy="TOML is UTF-8"
        ) from error
    cargo = path.name == "Cargo.toml"
    name = _cargo_name(path) if cargo else path.stem
    return examine_text(text, name=name, origin=str(path), allow_file_urls=allow_file_urls, cargo=cargo)


def examine_text(
    text: str, *, name: str, origin: str, allow_file_urls: bool, cargo: bool = False
) -> Examined:
    """Read TOML text and find everything that is wrong in it."""
    try:
        document: Document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:  # too many brackets within each other
        match = re.search(r"at line (\d+)", str(error))
        line = int(match[1]) if match else None
        return Examined(None, (), (PinProblem(origin, None, line, "toml-syntax", str(error)),))
    root: KeyPath = CARGO_PATH if cargo else ()
    reader = _Reader(origin=origin, lines=positions(text), root=root, allow_file_urls=allow_file_urls)
    pinned: Any = document
    for key in root:
        pinned = pinned.get(key) if isinstance(pinned, dict) else None
    if cargo and not isinstance(pinned, dict):
        absent = PinProblem(origin, ".".join(CARGO_PATH), None, "no-pins", "this Cargo.toml carries no pins")
        return Examined(None, (), (absent,))
    placed = reader.read(_spread_flat(pinned) if cargo else pinned)
    problems = [*reader.problems, *set_problems(placed, reader.slots)]
    pin_set = None
    if not any(problem.severity is Severity.ERROR for problem in problems):
        pins = tuple(item.pin for item in placed)
        pin_set = PinSet(name=name, pins=pins, text=text, origin=origin, groups=reader.groups)
    return Examined(pin_set, tuple(placed), tuple(problems))


@dataclass
class _Reader:
    """Walks a document's tables, collecting pins and every problem on the way."""

    origin: str
    lines: Mapping[KeyPath, int]
    root: KeyPath
    allow_file_urls: bool
    problems: list[PinProblem] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    groups: tuple[ModuleGroup, ...] = ()

    def note(self, path: KeyPath, code: str, message: str) -> None:
        depth = 4 if len(path) > 3 and isinstance(path[3], int) else 3
        table = ".".join(str(part) for part in path[:depth]) or None
        line = line_of(self.lines, self.root + path)
        self.problems.append(PinProblem(self.origin, table, line, code, message))

    def read(self, document: Document) -> list[Placed]:
        if groups.TABLE in document:
            self.groups, faults = groups.read_groups(document[groups.TABLE])
            for fault in faults:
                self.note((groups.TABLE, *fault.path), fault.code, fault.message)
            document = {key: value for key, value in document.items() if key != groups.TABLE}
        if not document:
            self.note((), "empty", "the pin set has no pins")
        placed: list[Placed] = []
        for path, table in self._tables(document):
            item = self._pin(path, table)
            if item is not None:
                placed.append(item)
        return placed

    def _tables(self, document: Document) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
        """Yield the pin tables three levels down; `[[…]]` gives several with their number."""
        for project, tags in document.items():
            if not isinstance(tags, dict) or not tags:
                self.note((project,), "not-a-table", f"expected tables [{project}.CUDA_TAG.ARCH]")
                continue
            for tag, archs in tags.items():
                if not isinstance(archs, dict) or not archs:
                    self.note((project, tag), "not-a-table", f"expected tables [{project}.{tag}.ARCH]")
                    continue
                for arch, pins in archs.items():
                    path: KeyPath = (project, tag, arch)
                    if isinstance(pins, dict):
                        yield path, pins
                    elif isinstance(pins, list) and pins and all(isinstance(pin, dict) for pin in pins):
                        for index, pin in enumerate(pins):
                            yield (*path, index), pin
                    else:
                        self.note(path, "not-a-table", "expected one table, or an array of tables, of a pin")

    def _pin(self, path: KeyPath, table: dict[str, Any]) -> Placed | None:
        project, tag, arch_word = str(path[0]), str(path[1]), str(path[2])
        cuda = self._word(path[:2], "bad-cuda", CudaTag.parse, tag)
        arch = self._word(path[:3], "bad-arch", Arch.parse, arch_word)
        for key in table:
            if key not in PIN_KEYS:
                self.note((*path, key), "unknown-key", f"{key!r} is not one of {', '.join(PIN_KEYS)}")
        filename = self._text(path, table, "filename", required=True)
        sha256 = self._hex(path, table, "sha256", required=True)
        record_sha256 = self._hex(path, table, "record_sha256", required=False)
        sm_word = self._text(path, table, "sm", required=False)
        sm = self._word((*path, "sm"), "bad-sm", Sm.parse, sm_word) if sm_word is not None else None
        size = self._size(path, table)
        origin = self._origin(path, table, filename)
        version = self._filename(path, filename, project=project, cuda=cuda, arch=arch)
        if cuda is not None and arch is not None:
            self.slots.append(Slot(project_word(project), str(cuda), str(arch), self._place(path)))
        if cuda is None or arch is None or filename is None or sha256 is None:
            return None
        if origin is None or version is None:
            return None
        pin = Pin(
            project=project_word(project),
            version=version,
            filename=filename,
            sha256=sha256,
            cuda=cuda,
            arch=arch,
            sm=sm,
            origin=origin,
            size=size,
            record_sha256=record_sha256,
        )
        return Placed(pin, self._place(path))

    def _place(self, path: KeyPath) -> Place:
        table = ".".join(str(part) for part in path)
        return Place(self.origin, table, line_of(self.lines, self.root + path))

    def _word(self, path: KeyPath, code: str, parse: Any, word: str) -> Any:
        try:
            return parse(word)
        except PlatformError as error:
            self.note(path, code, f"{error.what}, expected {error.expected}")
            return None

    def _text(self, path: KeyPath, table: dict[str, Any], key: str, *, required: bool) -> str | None:
        if key not in table:
            if required:
                self.note(path, "missing-key", f"{key!r} is missing")
            return None
        value = table[key]
        if not isinstance(value, str) or not value:
            self.note((*path, key), "wrong-type", f"{key!r} must be a text, found {value!r}")
            return None
        return value

    def _hex(self, path: KeyPath, table: dict[str, Any], key: str, *, required: bool) -> str | None:
        value = self._text(path, table, key, required=required)
        if value is not None and not is_sha256(value):
            self.note((*path, key), "bad-hex", f"{key!r} must be 64 lower-case hex digits, found {value!r}")
            return None
        return value

    def _size(self, path: KeyPath, table: dict[str, Any]) -> int | None:
        value = table.get("size")
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 53:
            self.note((*path, "size"), "bad-size", f"'size' must be a positive byte count, found {value!r}")
            return None
        return value

    def _origin(self, path: KeyPath, table: dict[str, Any], filename: str | None) -> Origin | None:
        given = [key for key in ("url", "index", "store") if key in table]
        if len(given) > 1:
            words = " and ".join(map(repr, given))
            self.note(
                (*path, given[-1]), "origin-both", f"give one of 'url', 'index' and 'store', not {words}"
            )
            return None
        if "store" in table:
            if table["store"] is not True:
                self.note(
                    (*path, "store"), "bad-store", f"'store' can only be true, found {table['store']!r}"
                )
                return None
            return StoreOrigin()
        if "index" in table:
            index = self._text(path, table, "index", required=True)
            if index is not None and _INDEX_NAME.fullmatch(index) is None:
                self.note((*path, "index"), "bad-index", f"'index' is a name like \"pypi\", found {index!r}")
                return None
            return IndexOrigin(index) if index is not None else None
        if "url" not in table:
            self.note(path, "origin-none", "no 'url', 'index' or 'store' says where the wheel comes from")
            return None
        url = self._text(path, table, "url", required=True)
        return self._url(path, url, filename) if url is not None else None

    def _url(self, path: KeyPath, url: str, filename: str | None) -> Origin | None:
        at = (*path, "url")
        try:
            parts = urlsplit(url)
            host = parts.hostname
            _ = parts.port
        except ValueError as error:
            self.note(at, "bad-url", f"not a URL: {error}")
            return None
        if parts.scheme == "file" and self.allow_file_urls:
            if not parts.path.startswith("/") or parts.netloc not in ("", "localhost"):
                self.note(at, "bad-url", f"a file URL needs an absolute path on this machine, found {url!r}")
                return None
        elif parts.scheme != "https":
            hint = " (file URLs need --allow-file-urls)" if parts.scheme == "file" else ""
            self.note(at, "url-not-https", f"expected an https URL, found {url!r}{hint}")
            return None
        elif not host:
            self.note(at, "bad-url", f"the URL names no host: {url!r}")
            return None
        elif parts.username is not None or parts.password is not None:
            self.note(at, "url-credentials", "a URL in a pin set must not carry credentials")
            return None
        last = unquote(parts.path.rsplit("/", 1)[-1])
        if filename is not None and last != filename and parts.scheme != "file":
            self.note(at, "url-filename-mismatch", f"the URL ends in {last!r}, the pin names {filename!r}")
            return None
        return UrlOrigin(url)

    def _filename(
        self, path: KeyPath, filename: str | None, *, project: str, cuda: CudaTag | None, arch: Arch | None
    ) -> str | None:
        """Check the PEP 427 name against the table; return the version it states."""
        if filename is None:
            return None
        at = (*path, "filename")
        try:
            name, version, _, tags = parse_wheel_filename(filename)
        except InvalidWheelFilename as error:
            self.note(at, "not-a-wheel-name", str(error))
            return None
        if name != canonicalize_name(project):
            self.note(at, "project-mismatch", f"the file is of project {name!r}, the table of {project!r}")
        archs = set()
        for tag in tags:
            match = _ARCH_TAG.search(tag.platform)
            if match is not None:
                archs.add(Arch(match[1]))
            elif tag.platform != "any":
                self.note(at, "arch-mismatch", f"platform tag {tag.platform!r} is for no supported platform")
        if arch is not None and archs and archs != {arch}:
            found = ", ".join(sorted(str(item) for item in archs))
            self.note(at, "arch-mismatch", f"the file is for {found}, the table for {arch}")
        local = _LOCAL_CUDA.match(version.local or "")
        if local is not None and cuda is not None:
            built = CudaTag.parse(local[1])
            if built.major != cuda.major or built > cuda:
                self.note(
                    at,
                    "version-mismatch",
                    f"version {version} is built for {built}, which the table's {cuda} cannot run",
                )
        return str(version)


def _spread_flat(pinned: dict[str, Any]) -> dict[str, Any]:
    """Give a Cargo.toml's tables without CUDA tag and arch the ones that their file names state."""
    tags = {
        f"cu{match[1]}"
        for table in pinned.values()
        if isinstance(table, dict) and (match := re.search(r"\+cu(\d{3})", str(table.get("filename", ""))))
    }
    spread: dict[str, Any] = {}
    for project, table in pinned.items():
        flat = isinstance(table, dict) and isinstance(table.get("filename"), str)
        arch = re.search(r"_(x86_64|aarch64)\.whl$", table["filename"]) if flat else None
        spread[project] = {tag: {arch[1]: table} for tag in sorted(tags)} if arch and tags else table
    return spread


def _cargo_name(path: Path) -> str:
    """Name a Cargo.toml's set after the crate's directory."""
    return path.resolve().parent.name or "cargo"
