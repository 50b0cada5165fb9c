"""Directories that lay a bundle out the way its consumers look for files; every file is a link to a blob.

`files` is the union of the wheels' paths. `flashinfer` goes on the import path of flashinfer-python: a
drop-in `flashinfer_jit_cache` (both the question of 0.6 and that of 0.7 are answered), and
`flashinfer_cubin` when there are cubins. `flashinfer-rs` is the cache directory of the crate of that name.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from kernel_depot.bundle import ArtifactKind, Bundle, BundleArtifact, BundleWheel
from kernel_depot.worker.cache import Cache, storage_error
from kernel_depot.worker.errors import ViewImpossible

JIT_CACHE: Final = "flashinfer-jit-cache"
CUBIN: Final = "flashinfer-cubin"
TVM_FFI: Final = "apache-tvm-ffi"
LIBTVM_FFI: Final = "libtvm_ffi.so"
RECORDER: Final = "flashinfer_jit_cache/recorder.py"
RECORD_VARIABLE: Final = "KERNEL_DEPOT_RECORD"
"""Names the file in which the drop-in writes down what FlashInfer asks for."""
RS_EAGER: Final = ("norm", "page", "gdn_prefill_sm90")
"""The modules that flashinfer-rs opens when it starts, which it keeps at the top of its directory."""


class View(str, Enum):
    """The name of a view, and of its directory."""

    FILES = "files"
    FLASHINFER = "flashinfer"
    FLASHINFER_RS = "flashinfer-rs"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, text: str) -> View:
        """Read a view's name. Raise ViewImpossible for another word."""
        try:
            return cls(text.strip())
        except ValueError:
            raise ViewImpossible(
                f"{text!r} is not a view", expected=", ".join(view.value for view in cls), found=text
            ) from None


DEFAULT_VIEWS: Final[tuple[View, ...]] = ()
"""No choice: every view that the bundle has something for."""


@dataclass(frozen=True, slots=True)
class ViewChoice:
    """Which views are wanted; none named means all that apply. Wheels go into `flashinfer-rs`."""

    named: tuple[View, ...] = DEFAULT_VIEWS
    with_wheels: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """A view as data: links to blobs, links to directories (relative), and small written files."""

    links: tuple[tuple[str, str], ...]
    directories: Mapping[str, str]
    texts: Mapping[str, str]


def views_present(cache: Cache, digest: str, bundle: Bundle, choice: ViewChoice) -> bool:
    """Tell whether every chosen view stands; looks at directories, opens nothing."""
    base = cache.view_dir(digest)
    if not all((base / view.value).is_dir() for view in _chosen(bundle, choice)):
        return False
    return all((base / path).exists() for path, _ in _wheel_links(bundle, choice))


def build_views(cache: Cache, digest: str, bundle: Bundle, choice: ViewChoice, *, private: Path) -> None:
    """Build the chosen views of a bundle whose blobs are all in the cache.

    A new view is built privately and renamed into place whole. One that stands already is kept, and any
    of its files that is not the blob of today (it was torn, and fetched again) is replaced by a rename.
    Raise ViewImpossible for a named view this bundle has nothing for.
    """
    base = cache.view_dir(digest)
    try:
        base.mkdir(exist_ok=True)
        for view in _chosen(bundle, choice):
            layout = _LAYOUTS[view](bundle)
            final = base / view.value
            if not final.is_dir():
                staged = private / view.value
                _build(cache, layout, staged, final=final)
                try:
                    staged.rename(final)
                    continue
                except OSError:
                    if not final.is_dir():
                        raise
            _heal(cache, layout, final, private=private)
        for path, sha256 in _wheel_links(bundle, choice):
            target = base / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                _replace(cache, sha256, target, private=private)
    except OSError as error:
        raise storage_error(error, where=base) from error


def rs_directory(bundle: Bundle) -> str | None:
    """The name flashinfer-rs gives the directory of a pair of wheels, when the bundle has one such pair."""
    pair = rs_wheels(bundle)
    if not pair:
        return None
    return hashlib.sha256("".join(wheel.sha256 for wheel in pair).encode()).hexdigest()


def rs_complete(bundle: Bundle, directory: Path) -> bool:
    """Tell whether flashinfer-rs starts from this view without a download: both wheels lie in it."""
    pair = rs_wheels(bundle)
    return bool(pair) and all(
        (directory / "wheels" / f"{wheel.sha256}-{wheel.filename}").exists() for wheel in pair
    )


def _chosen(bundle: Bundle, choice: ViewChoice) -> tuple[View, ...]:
    possible = {
        View.FILES: bool(bundle.artifacts),
        View.FLASHINFER: bool(_jit_cache_wheels(bundle))
        or any(_project(wheel) == CUBIN for wheel in bundle.wheels),
        View.FLASHINFER_RS: bool(rs_wheels(bundle)),
    }
    if choice.with_wheels and not possible[View.FLASHINFER_RS]:
        raise _no_pair(bundle)
    for view in choice.named:
        if not possible[view]:
            if view is View.FLASHINFER_RS:
                raise _no_pair(bundle)
            raise ViewImpossible(
                f"the bundle has nothing for the view {view}",
                where=str(bundle.platform),
                expected=f"a wheel of {JIT_CACHE} or {CUBIN}" if view is View.FLASHINFER else "artifacts",
                found=", ".join(wheel.filename for wheel in bundle.wheels) or "no wheels",
                remedy="leave the view out, or pin what it needs",
            )
    wanted = set(choice.named) or {view for view, is_possible in possible.items() if is_possible}
    if choice.with_wheels:
        wanted.add(View.FLASHINFER_RS)
    if View.FLASHINFER in wanted and any(_project(wheel) == CUBIN for wheel in bundle.wheels):
        wanted.add(View.FILES)
    return tuple(view for view in View if view in wanted)


def _no_pair(bundle: Bundle) -> ViewImpossible:
    return ViewImpossible(
        "the view flashinfer-rs needs one wheel of each of two projects",
        where=str(bundle.platform),
        expected=f"one wheel of {JIT_CACHE} and one of {TVM_FFI}",
        found=", ".join(wheel.filename for wheel in bundle.wheels) or "no wheels",
        remedy="choose other --views, leave --with-wheels out, or pin both projects",
    )


def _build(cache: Cache, layout: Layout, staged: Path, *, final: Path) -> None:
    staged.mkdir()
    names = [path for path, _ in layout.links] + list(layout.texts) + list(layout.directories)
    for parent in sorted({name.rpartition("/")[0] for name in names}):
        (staged / parent).mkdir(parents=True, exist_ok=True)
    root, blobs = f"{staged}/", f"{cache.blobs}/"
    for path, sha256 in layout.links:
        _link(f"{blobs}{sha256[:2]}/{sha256}", root + path, final=final / path)
    for path, target in layout.directories.items():
        (staged / path).symlink_to(target, target_is_directory=True)
    for path, text in layout.texts.items():
        (staged / path).write_text(text, encoding="utf-8")


def _heal(cache: Cache, layout: Layout, final: Path, *, private: Path) -> None:
    root, blobs = f"{final}/", f"{cache.blobs}/"
    stat = os.stat
    for path, sha256 in layout.links:
        try:
            if stat(root + path).st_ino == stat(f"{blobs}{sha256[:2]}/{sha256}").st_ino:
                continue
        except FileNotFoundError:
            (final / path).parent.mkdir(parents=True, exist_ok=True)
        _replace(cache, sha256, final / path, private=private)


def _replace(cache: Cache, sha256: str, target: Path, *, private: Path) -> None:
    staged = private / f"{sha256}.link"
    staged.unlink(missing_ok=True)
    _link(str(cache.blob_path(sha256)), str(staged), final=target)
    staged.replace(target)
    # Renaming one hard link of a file over another of the same file does nothing (rename(2)).
    staged.unlink(missing_ok=True)


def _link(blob: str, name: str, *, final: Path) -> None:
    """Link a blob: hard, or by a relative symbolic link where the filesystem or its limits refuse that."""
    try:
        os.link(blob, name)
    except FileExistsError:
        raise
    except OSError:
        Path(name).symlink_to(os.path.relpath(blob, final.parent))


def _wheel_links(bundle: Bundle, choice: ViewChoice) -> list[tuple[str, str]]:
    return [
        (f"{View.FLASHINFER_RS.value}/wheels/{wheel.sha256}-{wheel.filename}", wheel.sha256)
        for wheel in (rs_wheels(bundle) if choice.with_wheels else ())
    ]


def _files(bundle: Bundle) -> Layout:
    links: dict[str, BundleArtifact] = {}
    for artifact in bundle.artifacts:
        other = links.setdefault(artifact.path, artifact)
        if other.sha256 != artifact.sha256:
            names = {wheel.sha256: wheel.filename for wheel in bundle.wheels}
            raise ViewImpossible(
                f"two wheels hold different files at {artifact.path}",
                where=str(bundle.platform),
                found=" and ".join(names.get(wheel, wheel) for wheel in (other.wheel, artifact.wheel)),
                remedy="choose the pin sets with --pins so that one of the wheels is taken",
            )
    return Layout(tuple((path, artifact.sha256) for path, artifact in links.items()), {}, {})


def _flashinfer(bundle: Bundle) -> Layout:
    links: dict[str, str] = {}
    directories: dict[str, str] = {}
    texts: dict[str, str] = {}
    if wheels := _jit_cache_wheels(bundle):
        version = wheels[0].version
        providers: list[dict[str, object]] = []
        for number, wheel in enumerate(wheels):
            directory = f"jit_cache_{number}" if number else "jit_cache"
            modules = [
                artifact
                for artifact in bundle.artifacts
                if artifact.kind is ArtifactKind.MODULE and artifact.wheel == wheel.sha256
            ]
            for artifact in modules:
                name = f"{artifact.module}/{artifact.module}.so"
                links[f"flashinfer_jit_cache/{directory}/{name}"] = artifact.sha256
            providers += _providers(modules, directory=directory, bundle=bundle)
        info = f"flashinfer_jit_cache-{version}.dist-info"
        lines = "".join(f"    {provider!r},\n" for provider in providers)
        texts["flashinfer_jit_cache/__init__.py"] = _DROP_IN.format(
            version=version, providers=f"[\n{lines}]" if lines else "[]"
        )
        texts[RECORDER] = Path(__file__).with_name("drop_in_recorder.py").read_text(encoding="utf-8")
        texts[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {JIT_CACHE}\nVersion: {version}\n"
        texts[f"{info}/INSTALLER"] = "kernel-depot\n"
    if any(_project(wheel) == CUBIN for wheel in bundle.wheels):
        tops = {artifact.path.split("/", 1)[0] for artifact in bundle.artifacts}
        for top in sorted(tops):
            if top.startswith("flashinfer_cubin"):
                directories[top] = f"../{View.FILES.value}/{top}"
    return Layout(tuple(links.items()), directories, texts)


def _jit_cache_wheels(bundle: Bundle) -> list[BundleWheel]:
    """The wheels of modules: the one for all GPUs (or the shim of 0.7) first, then its providers by name."""
    found = [wheel for wheel in bundle.wheels if _project(wheel).startswith(JIT_CACHE)]
    return sorted(found, key=lambda wheel: (_project(wheel), wheel.filename))


def _providers(
    modules: Iterable[BundleArtifact], *, directory: str, bundle: Bundle
) -> list[dict[str, object]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for artifact in modules:
        architectures = tuple(sorted(target.replace("_", "") for target in artifact.sms))
        if not architectures and bundle.platform.sm is not None:
            architectures = (str(bundle.platform.sm),)
        groups.setdefault(architectures, []).append(str(artifact.module))
    return [
        {
            "provider_id": f"kernel-depot-{directory}-" + ("-".join(architectures) or "any"),
            "distribution": JIT_CACHE,
            "directory": directory,
            "cuda_architectures": list(architectures),
            "modules": sorted(names),
        }
        for architectures, names in sorted(groups.items())
    ]


def _flashinfer_rs(bundle: Bundle) -> Layout:
    top = rs_directory(bundle)
    jit_cache = rs_wheels(bundle)[0]
    links: dict[str, str] = {}
    for artifact in bundle.artifacts:
        if artifact.kind is ArtifactKind.MODULE and artifact.wheel == jit_cache.sha256:
            links[f"{top}/jit_cache/{artifact.module}/{artifact.module}.so"] = artifact.sha256
            if artifact.module in RS_EAGER:
                links[f"{top}/{artifact.module}.so"] = artifact.sha256
        elif artifact.kind is ArtifactKind.TVM_FFI and artifact.path.endswith("/" + LIBTVM_FFI):
            links[f"{top}/{LIBTVM_FFI}"] = artifact.sha256
    return Layout(tuple(links.items()), {}, {})


_LAYOUTS: Final = {View.FILES: _files, View.FLASHINFER: _flashinfer, View.FLASHINFER_RS: _flashinfer_rs}

_DROP_IN: Final = '''"""Kernel modules that kernel-depot synced, offered as flashinfer-jit-cache."""

import os
import sys
import types

__version__ = {version!r}

# A process stays with the bundle it started with: links such as `current` are resolved once.
_HERE = os.path.dirname(os.path.realpath(__file__))

# Held open, it tells collections that a process uses the bundle, though it has not loaded a module yet.
_HELD = os.open(_HERE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

_PROVIDERS = {providers}

if os.environ.get("KERNEL_DEPOT_RECORD"):
    from flashinfer_jit_cache.recorder import watch

    watch(os.environ["KERNEL_DEPOT_RECORD"])


def _refuse_another_version():
    """Raise when the FlashInfer that asks is another version: its own look takes 0.6.10 for 0.6.1."""
    asking = sys.modules.get("flashinfer.version")
    if asking is None:
        return
    from packaging.version import Version

    if Version(asking.__version__).public != Version(__version__).public:
        raise RuntimeError(
            "kernel-depot synced modules of FlashInfer " + __version__ + ", but flashinfer-python is "
            + asking.__version__ + ": install that version, or pin and sync the modules of this one"
        )


def get_jit_cache_dir():
    """Return the directory that holds <uri>/<uri>.so (asked by flashinfer-python up to 0.6)."""
    _refuse_another_version()
    return os.path.join(_HERE, "jit_cache")


def get_jit_cache_providers():
    """Return one provider for each set of GPU architectures (asked by flashinfer-python from 0.7 on)."""
    _refuse_another_version()
    return [
        types.SimpleNamespace(
            version=__version__, jit_cache_dir=os.path.join(_HERE, provider["directory"]), **provider
        )
        for provider in _PROVIDERS
    ]
'''


def rs_wheels(bundle: Bundle) -> tuple[BundleWheel, ...]:
    """The jit-cache wheel and the tvm-ffi wheel of a bundle that has exactly one of each, else none."""
    jit_cache = [wheel for wheel in bundle.wheels if _project(wheel) == JIT_CACHE]
    tvm_ffi = [wheel for wheel in bundle.wheels if _project(wheel) == TVM_FFI]
    if len(jit_cache) != 1 or len(tvm_ffi) != 1:
        return ()
    return jit_cache[0], tvm_ffi[0]


def _project(wheel: BundleWheel) -> str:
    """The normalized name of a wheel's project (PEP 503)."""
    return re.sub(r"[-_.]+", "-", wheel.project).lower()
