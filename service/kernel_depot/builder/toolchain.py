"""The toolchain of a build: the system's CUDA where it fits the plan, pinned wheels for the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform as host_platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import rfc8785

from kernel_depot.builder.cache import BuildCache
from kernel_depot.builder.errors import SmUnsupported, ToolchainMissing
from kernel_depot.builder.plan import PinnedWheel, Plan
from kernel_depot.builder.source import unpack_wheel
from kernel_depot.digest import sha256_bytes
from kernel_depot.pins.pin import IndexOrigin
from kernel_depot.platform import Arch, CudaTag
from kernel_depot.shipped import shipped_dir

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NINJA_MINIMUM = (1, 13)  # the first that shares job slots between several ninjas (GNU make's jobserver)
HEADERS = {"cublas": "cublas_v2.h", "curand": "curand_kernel.h", "nvrtc": "nvrtc.h"}
HOST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Bring = Callable[[PinnedWheel], Path]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor: what is looked for, whether it is there, and what was found."""

    name: str
    ok: bool
    detail: str

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"check": self.name, "ok": self.ok, "detail": self.detail}


@dataclass(frozen=True)
class Toolchain:
    """What compiles. `identity` holds versions and digests only: no path, so that keys agree anywhere."""

    root: Path
    extra: Path | None
    compiler: Path
    identity: dict[str, Any]
    targets: tuple[str, ...]
    arch: Arch

    @cached_property
    def digest(self) -> str:
        """The toolchain's name: SHA-256 of its identity's canonical JSON."""
        return sha256_bytes(rfc8785.dumps(self.identity))

    def check_sms(self, plan: Plan) -> None:
        """Raise SmUnsupported when the compiler has no code for an SM of the plan."""
        for sm in plan.sms:
            if sm.target not in self.targets:
                raise SmUnsupported(
                    f"this CUDA cannot compile for {sm}",
                    where=f"nvcc {self.identity['nvcc']}",
                    expected=", ".join(self.targets),
                    found=sm.target,
                    remedy="choose another SM, or a plan with another CUDA tag",
                )


def candidates(cuda: CudaTag, *, named: Sequence[Path], search_path: str) -> list[Path]:
    """Return where a CUDA of that version may lie, the named directories first."""
    found = list(named)
    found += [Path(f"/usr/local/cuda-{cuda.major}.{cuda.minor}"), Path("/usr/local/cuda"), Path("/opt/cuda")]
    if nvcc := shutil.which("nvcc", path=search_path):
        found.append(Path(nvcc).resolve().parent.parent)
    return list(dict.fromkeys(path.resolve() for path in found))


def buildable(arch: Arch, *, roots: Sequence[Path]) -> list[CudaTag]:
    """Return the CUDA versions that this machine can compile with: the roots', and those that are pinned."""
    found = {tag for root in roots if (tag := _version(root)) is not None and _lacks(root, tag) is None}
    for path in (shipped_dir("builds") / "toolchains").glob("*.toml"):
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["wheel"]
        if any(row["part"] == "compiler" and row["arch"] == str(arch) for row in rows):
            found.add(CudaTag.parse(path.stem))
    return sorted(found)


def open_toolchain(
    plan: Plan, *, cache: BuildCache, roots: Sequence[Path], bring: Bring, search_path: str = HOST_PATH
) -> Toolchain:
    """Return a complete toolchain; `roots` are tried in order, then the pinned wheels are put together.

    Raise ToolchainMissing, which names what is missing, or SmUnsupported.
    """
    arch = Arch.parse(host_platform.machine())
    parts: set[str] = set(plan.needs)
    root = next((root for root in roots if _lacks(root, plan.cuda) is None), None)
    wheels: list[PinnedWheel] = []
    if root is None:
        wheels += pinned(plan.cuda, arch, {"compiler"}, roots=roots)
        root = _assembled(wheels, cache=cache, bring=bring, whole=True)
    parts = {part for part in parts if not _has(root, part)}
    extra: Path | None = None
    if parts:
        more = pinned(plan.cuda, arch, parts, roots=roots)
        extra = _assembled(more, cache=cache, bring=bring, whole=False)
        wheels += more
    compiler = _host_compiler(search_path)
    probe = _probed(cache, root / "bin/nvcc", compiler, search_path)
    toolchain = Toolchain(
        root=root,
        extra=extra,
        compiler=compiler,
        identity={
            "arch": str(arch),
            "nvcc": probe["nvcc"],
            "headers": _headers_digest(root),
            "host": probe["host"],
            "linker": probe["linker"],
            "tvm_ffi": tvm_ffi_version(),
            "wheels": {wheel.project: wheel.sha256 for wheel in sorted(wheels, key=lambda one: one.project)},
        },
        targets=tuple(probe["targets"]),
        arch=arch,
    )
    toolchain.check_sms(plan)
    return toolchain


def examine(
    plan: Plan, *, cache: BuildCache, roots: Sequence[Path], search_path: str = HOST_PATH
) -> list[Check]:
    """Return what a build of the plan would use and what is missing; nothing is fetched."""
    arch = Arch.parse(host_platform.machine())
    checks: list[Check] = []
    root = next((candidate for candidate in roots if _lacks(candidate, plan.cuda) is None), None)
    if root is not None:
        checks.append(Check("CUDA", True, f"the system's, {root}"))
    else:
        seen = [f"{one} {_lacks(one, plan.cuda)}" for one in roots if one.is_dir()]
        checks.append(Check("CUDA", True, "not the system's: " + ("; ".join(seen) or "there is none")))
    parts = {"compiler"} if root is None else set()
    parts |= {part for part in plan.needs if root is None or not _has(root, part)}
    for part in sorted(parts):
        try:
            wheels = pinned(plan.cuda, arch, {part}, roots=roots)
        except ToolchainMissing as error:
            checks.append(Check(part, False, error.what))
            continue
        names = ", ".join(f"{wheel.project} {wheel.version}" for wheel in wheels)
        here = all((cache.wheels / wheel.sha256).exists() for wheel in wheels)
        size = sum(wheel.size or 0 for wheel in wheels) >> 20
        how = "pinned, in the cache" if here else f"pinned, to be fetched ({size} MiB)"
        checks.append(Check(part, True, f"{how}: {names}"))
    finders: tuple[tuple[str, Callable[[], object]], ...] = (
        ("C++ compiler", lambda: _host_compiler(search_path)),
        ("ninja", find_ninja),
        ("apache-tvm-ffi", tvm_ffi_version),
    )
    for name, find in finders:
        try:
            checks.append(Check(name, True, str(find())))
        except ToolchainMissing as error:
            checks.append(Check(name, False, f"{error.what}; {error.remedy}"))
    for module in ("jinja2", "filelock", "requests"):
        there = importlib.util.find_spec(module) is not None
        checks.append(Check(module, there, "installed" if there else "pip install 'kernel-depot[build]'"))
    return checks


def pinned(cuda: CudaTag, arch: Arch, parts: set[str], *, roots: Sequence[Path]) -> list[PinnedWheel]:
    """Return the wheels that make these parts of CUDA. Raise ToolchainMissing when they are not pinned."""
    path = shipped_dir("builds") / "toolchains" / f"{cuda}.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"wheel": []}
    wheels = [
        PinnedWheel(
            row["project"],
            row["version"],
            row["filename"],
            row["sha256"],
            IndexOrigin(row["index"]),
            row["size"],
        )
        for row in table["wheel"]
        if row["arch"] == str(arch) and row["part"] in parts
    ]
    present = {row["part"] for row in table["wheel"] if row["arch"] == str(arch)}
    if missing := parts - present:
        raise ToolchainMissing(
            f"{', '.join(sorted(missing))} of {cuda} is neither on this machine nor pinned",
            where=", ".join(str(root) for root in roots if root.is_dir()) or "no CUDA on this machine",
            expected=f"CUDA {cuda.major}.{cuda.minor}",
            remedy="install that CUDA and name it with --cuda-home, or build on a machine that has it",
        )
    return wheels


def tvm_ffi_version() -> str:
    """Return the version of apache-tvm-ffi whose headers are compiled against. Raise ToolchainMissing."""
    try:
        return importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError:
        raise ToolchainMissing(
            "apache-tvm-ffi, whose headers the modules include, is not installed",
            remedy="pip install 'kernel-depot[build]'",
        ) from None


def check_tvm_ffi(metadata: str, *, where: str) -> None:
    """Check the installed apache-tvm-ffi against what the source's METADATA asks for.

    Raise ToolchainMissing for a version outside that range.
    """
    from email.parser import HeaderParser

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = tvm_ffi_version()
    for text in HeaderParser().parsestr(metadata, headersonly=True).get_all("Requires-Dist", []):
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) != "apache-tvm-ffi" or requirement.marker is not None:
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            raise ToolchainMissing(
                "the installed apache-tvm-ffi is not one that the source is made for",
                where=where,
                expected=str(requirement),
                found=found,
                remedy=f"pip install '{requirement}'",
            )


def find_ninja() -> Path:
    """Return a ninja that shares job slots. Raise ToolchainMissing."""
    beside = shutil.which("ninja", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("ninja", path=HOST_PATH)
    version = ""
    if found is not None:
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
        if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= NINJA_MINIMUM:
            return Path(found)
    raise ToolchainMissing(
        "there is no ninja that shares job slots",
        where=found,
        expected=f"ninja {'.'.join(map(str, NINJA_MINIMUM))} or later",
        found=version.strip() or "none",
        remedy="pip install 'kernel-depot[build]'",
    )


def _lacks(root: Path, cuda: CudaTag) -> str | None:
    """Tell what keeps a directory from being the plan's CUDA, None when nothing does."""
    for name in ("bin/nvcc", "include/cuda.h", "include/cuda_runtime_api.h", "include/crt/host_defines.h"):
        if not (root / name).is_file():
            return f"has no {name}"
    if not any((root / name).exists() for name in ("lib64/libcudart.so", "lib/libcudart.so")):
        return "has no libcudart.so"
    found = _version(root)
    if found != cuda:
        there = f"CUDA {found.major}.{found.minor}" if found is not None else "no CUDA that tells its version"
        return f"is {there}, the plan wants {cuda.major}.{cuda.minor}"
    return None


def _version(root: Path) -> CudaTag | None:
    """Return the version that a CUDA directory's header tells."""
    try:
        text = (root / "include/cuda.h").read_text("latin-1")
    except OSError:
        return None
    match = re.search(r"^#define CUDA_VERSION (\d+)", text, re.M)
    return CudaTag(int(match[1]) // 1000, int(match[1]) % 1000 // 10) if match else None


def _has(root: Path, part: str) -> bool:
    if not (root / "include" / HEADERS[part]).is_file():
        return False
    return part != "nvrtc" or any((root / name).exists() for name in ("lib64/libnvrtc.so", "lib/libnvrtc.so"))


def _assembled(wheels: Sequence[PinnedWheel], *, cache: BuildCache, bring: Bring, whole: bool) -> Path:
    """Put wheels together as one CUDA directory; all of each, or the headers and nvrtc's library only."""
    name = sha256_bytes("\n".join([str(whole), *sorted(wheel.sha256 for wheel in wheels)]).encode())

    def keep(path: str) -> str | None:
        match = re.match(r"nvidia/[^/]+/(?P<rest>(?P<top>[^/]+)/.+)", path)
        if match is None or not (whole or match["top"] == "include" or "/libnvrtc.so" in path):
            return None
        return match["rest"]

    def fill(target: Path) -> None:
        for wheel in wheels:
            unpack_wheel(bring(wheel), wheel, target, keep=keep)
        for program in [*target.glob("bin/*"), *target.glob("nvvm/bin/*")]:
            if program.is_file() and program.name != "nvcc.profile":
                program.chmod(0o555)
        (target / "lib").mkdir(exist_ok=True)
        for library in sorted((target / "lib").glob("lib*.so.*")):
            link = target / "lib" / (library.name.partition(".so")[0] + ".so")
            if not link.exists():
                link.symlink_to(library.name)
        (target / "lib64").symlink_to("lib")

    return cache.make("toolchains", name, fill)


def _host_compiler(search_path: str) -> Path:
    found = shutil.which("c++", path=search_path)
    if found is None or shutil.which("ld", path=search_path) is None:
        raise ToolchainMissing(
            "there is no C++ compiler",
            where=search_path,
            expected="c++ and ld, such as g++ brings",
            remedy="install g++ from the system's packages",
        )
    return Path(found)


def _probed(cache: BuildCache, nvcc: Path, compiler: Path, search_path: str) -> dict[str, Any]:
    """Ask the compilers for their versions, once for each pair of files."""
    linker = Path(shutil.which("ld", path=search_path) or "ld")
    files = [path.resolve() for path in (nvcc, compiler, linker)]
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    name = sha256_bytes(json.dumps(facts).encode())
    path = cache.root / "probes" / f"{name}.json"
    try:
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return known
    except (FileNotFoundError, ValueError):
        pass
    version = re.search(r"V(\d+\.\d+\.\d+)", _said(nvcc, "--version"))
    if version is None:
        raise ToolchainMissing("nvcc does not tell its version", where=str(nvcc))
    probe = {
        "nvcc": version[1],
        "targets": re.findall(r"sm_\d+[af]?", _said(nvcc, "--list-gpu-code")),
        "host": _said(compiler, "--version").splitlines()[0] + " " + _said(compiler, "-dumpmachine").strip(),
        "linker": _said(linker, "--version").splitlines()[0],
    }
    # CUDA lists plain targets; the arch-specific and family ones exist for every target from Hopper on.
    plain = [target for target in probe["targets"] if target[-1].isdigit()]
    more = [f"{one}a" for one in plain if int(one[3:]) >= 90]
    more += [f"{one}f" for one in plain if int(one[3:]) >= 100]
    probe["targets"] = sorted({*probe["targets"], *more})
    path.parent.mkdir(parents=True, exist_ok=True)
    private = path.with_name(f"{name}.{os.getpid()}")
    private.write_text(json.dumps(probe), encoding="utf-8")
    private.replace(path)
    return probe


def _said(program: Path, argument: str) -> str:
    try:
        done = subprocess.run(
            [program, argument],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={"PATH": HOST_PATH, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainMissing(
            f"{program.name} cannot be run: {error}", where=str(program), remedy="repair this installation"
        ) from error
    return done.stdout


def _headers_digest(root: Path) -> str:
    """Return a digest over the names and sizes of CUDA's headers, which tells one release from another."""
    names: list[str] = []
    for directory, folders, files in os.walk(root / "include"):
        folders.sort()
        for file in sorted(files):
            path = os.path.join(directory, file)  # noqa: PTH118
            names.append(f"{os.path.relpath(path, root)} {os.stat(path).st_size}")  # noqa: PTH116
    return sha256_bytes("\n".join(names).encode())
