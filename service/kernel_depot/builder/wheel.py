"""The wheel of built modules, in the layout of flashinfer-jit-cache; the same modules give the same bytes."""

from __future__ import annotations

import base64
import hashlib
import stat
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_depot.builder.cache import BuiltModule, room
from kernel_depot.builder.plan import Plan
from kernel_depot.digest import sha256_bytes, sha256_file
from kernel_depot.liveness import process_name
from kernel_depot.platform import Arch

PROJECT = "flashinfer_jit_cache"
_TIME = (1980, 1, 1, 0, 0, 0)
_OLDEST_GLIBC = (2, 17)
# The glibc of the oldest manylinux whose libstdc++ has a GLIBCXX_3.4.N (auditwheel's policies).
_GLIBC_OF_GLIBCXX = ((19, (2, 17)), (22, (2, 24)), (24, (2, 28)), (28, (2, 31)), (29, (2, 34)), (30, (2, 35)))
_NEWEST_GLIBC = (2, 39)


@dataclass(frozen=True, slots=True)
class BuiltWheel:
    """A wheel that was written. `size` is bytes."""

    path: Path
    sha256: str
    size: int
    version: str


def wheel_version(plan: Plan, modules: Sequence[BuiltModule], *, complete: bool) -> str:
    """Return the version: the source's, then CUDA tag and plan name as local label (PEP 440).

    A part of a plan, or a plan whose SMs were chosen by hand, has a digest of what it holds besides.
    """
    label = f"{plan.source.version}+{plan.cuda}.{plan.name}"
    if complete:
        return label
    names = "\n".join(sorted(f"{module.uri} {' '.join(module.sms)}" for module in modules))
    return f"{label}.part{sha256_bytes(names.encode())[:8]}"


def write_wheel(
    plan: Plan,
    modules: Sequence[tuple[BuiltModule, Path]],
    *,
    arch: Arch,
    directory: Path,
    complete: bool = True,
) -> BuiltWheel:
    """Write the wheel of some modules into `directory`; it appears whole. Raise BuildDiskFull.

    Its bytes depend on the modules, the plan and the version of zlib, on nothing else.
    """
    ordered = sorted(modules, key=lambda pair: pair[0].uri)
    version = wheel_version(plan, [module for module, _ in ordered], complete=complete)
    tag = f"py3-none-{_platform_tag([module for module, _ in ordered], arch)}"
    info = f"{PROJECT}-{version}.dist-info"
    texts = {
        f"{PROJECT}/__init__.py": _init(version, [module for module, _ in ordered], plan),
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: flashinfer-jit-cache\nVersion: {version}\n"
            f"Summary: Kernel modules of {plan.source.project} {plan.source.version}, "
            f"built by kernel-depot from the plan {plan.name}\nRequires-Python: >=3.10\n"
        ),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: kernel-depot\nRoot-Is-Purelib: false\nTag: {tag}\n"
        ),
    }
    final = directory / f"{PROJECT}-{version}-{tag}.whl"
    private = directory / f".{final.name}.{process_name()}"
    with room(str(final)):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            _write(private, texts, ordered, info=info)
            private.replace(final)
        finally:
            private.unlink(missing_ok=True)
    return BuiltWheel(final, sha256_file(final), final.stat().st_size, version)


def _write(
    path: Path, texts: dict[str, str], modules: Sequence[tuple[BuiltModule, Path]], *, info: str
) -> None:
    files: dict[str, str | Path] = dict(texts)
    for module, library in modules:
        files[f"{PROJECT}/jit_cache/{module.uri}/{module.uri}.so"] = library
    # RECORD last and the other metadata before it, at the archive's end (PEP 427).
    names = sorted(files, key=lambda name: (name.startswith(info), name))
    rows: list[str] = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name in names:
            content = files[name]
            data = content.read_bytes() if isinstance(content, Path) else content.encode()
            archive.writestr(_member(name), data)
            coded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={coded},{len(data)}")
        rows.append(f"{info}/RECORD,,")
        archive.writestr(_member(f"{info}/RECORD"), "\n".join(rows) + "\n")


def _member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, _TIME)
    member.create_system = 3  # Unix, whatever system writes it
    member.compress_type = zipfile.ZIP_DEFLATED
    mode = 0o755 if name.endswith(".so") else 0o644
    member.external_attr = (stat.S_IFREG | mode) << 16
    return member


def _platform_tag(modules: Sequence[BuiltModule], arch: Arch) -> str:
    """Return the tag of the oldest system that has every symbol version the modules ask for (PEP 600)."""
    needed = [_OLDEST_GLIBC]
    for module in modules:
        if module.glibc:
            needed.append(_pair(module.glibc))
        if module.glibcxx:
            patch = int(module.glibcxx.split(".")[2]) if module.glibcxx.count(".") == 2 else 0
            needed.append(next((old for last, old in _GLIBC_OF_GLIBCXX if patch <= last), _NEWEST_GLIBC))
    major, minor = max(needed)
    return f"manylinux_{major}_{minor}_{arch}"


def _pair(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _init(version: str, modules: Sequence[BuiltModule], plan: Plan) -> str:
    groups: dict[tuple[str, ...], list[str]] = {}
    for module in modules:
        groups.setdefault(module.sms, []).append(module.uri)
    lines: list[str] = []
    for sms, uris in sorted(groups.items()):
        lines.append(f"    ({f'{plan.name}-' + '-'.join(sms)!r}, {list(sms)!r}, [\n")
        lines += [f"        {uri!r},\n" for uri in sorted(uris)]
        lines.append("    ]),\n")
    return _INIT.format(version=version, providers="".join(lines))


_INIT = '''"""Kernel modules that kernel-depot built from a pinned flashinfer-python."""

import os
import types

__version__ = {version!r}

_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jit_cache")

_PROVIDERS = [
{providers}]


def get_jit_cache_dir():
    """Return the directory that holds <uri>/<uri>.so (asked by flashinfer-python up to 0.6)."""
    return _DIRECTORY


def get_jit_cache_providers():
    """Return one provider for each set of GPU architectures (asked by flashinfer-python from 0.7 on)."""
    return [
        types.SimpleNamespace(
            provider_id=name,
            distribution="flashinfer-jit-cache",
            version=__version__,
            jit_cache_dir=_DIRECTORY,
            cuda_architectures=list(architectures),
            modules=list(modules),
        )
        for name, architectures, modules in _PROVIDERS
    ]
'''
