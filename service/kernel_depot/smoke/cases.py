"""Which checks a bundle allows on this host, and running them: each that loads code in a child of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kernel_depot.bundle import ArtifactKind, Bundle, BundleArtifact
from kernel_depot.platform import Arch, Sm, has_code_for
from kernel_depot.smoke.elf import EM_CUDA, Elf, read_header, read_library
from kernel_depot.smoke.errors import ElfRefused, SmokeError
from kernel_depot.smoke.report import Outcome, SmokeReport, Status
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.errors import CacheEmpty

PREFIX: Final = "__tvm_ffi_"
DRIVER: Final = "libcuda.so.1"
NO_GPU: Final = "no GPU"
PROBED: Final = (
    "rmsnorm",
    "append_paged_kv_cache",
    "gdn_prefill",
    "run",
    "plan",
    "ragged_run",
    "paged_run",
    "init",
)
"""Functions known to take arguments, so that a call without any tells the signature and does nothing."""
_NVIDIA: Final = re.compile(r"lib(?P<name>cudart|nvrtc|cublasLt|cublas|nvJitLink|cufft|curand|cusparse)\.so")
_RUNTIME: Final = "libtvm_ffi.so"


class ModuleAbsent(SmokeError):
    """A module was named that the bundle does not hold."""

    slug = "module-absent"
    title = "No such module in the bundle"
    status = 404


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds a child may take, how many run at once, how many cubins are loaded through the driver."""

    timeout: float = 60.0
    jobs: int = 2
    cubins: int = 32


@dataclass(frozen=True, slots=True)
class Host:
    """What the checks need to know of this host; `sm` None means that no GPU can be used."""

    arch: Arch
    sm: Sm | None = None
    gpu: str | None = None
    device: int = 0


def this_host() -> Host:
    """Look at this host's CPU and its first GPU."""
    from kernel_depot.worker.facts import gather_facts

    facts = gather_facts()
    if facts.arch is None:
        raise SmokeError(f"kernels are not built for {facts.machine}", found=facts.machine)
    first = facts.gpus[0] if facts.gpus else None
    return Host(facts.arch, first.sm if first else None, first.name if first else None)


def smoke(
    cache: Cache,
    *,
    host: Host,
    modules: Sequence[str] | None = None,
    limits: Limits | None = None,
    digest: str | None = None,
) -> SmokeReport:
    """Check the current bundle, or that named by `digest`, on this host. Raise CacheEmpty, ModuleAbsent."""
    limits = limits or Limits()
    digest = digest or cache.current_digest()
    bundle = cache.bundle(digest) if digest is not None else None
    if digest is None or bundle is None:
        raise CacheEmpty(
            "there is no synced bundle to smoke", where=str(cache.root), remedy="run kernel-depot sync first"
        )
    chosen = _modules(bundle, modules)
    outcomes: list[Outcome] = []
    runtime = _runtime(bundle)
    if runtime is not None:
        outcomes.append(_check_runtime(cache, runtime, host=host, limits=limits))
    outcomes += _check_modules(cache, chosen, host=host, runtime=runtime, limits=limits)
    if modules is None:
        outcomes += _check_cubins(cache, bundle, host=host, limits=limits)
    return SmokeReport(digest, str(bundle.platform), host.gpu, tuple(outcomes))


def run_child(case: dict[str, Any], *, check: str, subject: str, timeout: float) -> Outcome:
    """Run one case in a child process: whatever it does to that process, here it is an outcome."""
    started = time.monotonic()
    command = [sys.executable, "-m", "kernel_depot.smoke.child"]
    try:
        child = subprocess.run(
            command, input=json.dumps(case).encode(), capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(check, subject, Status.FAIL, f"no answer in {timeout:g} s", time.monotonic() - started)
    seconds = time.monotonic() - started
    try:
        answer = json.loads(child.stdout)
        return Outcome(check, subject, Status(answer["status"]), str(answer["detail"]), seconds)
    except (ValueError, KeyError, TypeError):
        last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return Outcome(check, subject, Status.CRASHED, ": ".join([_death(child.returncode), *last]), seconds)


def _death(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _modules(bundle: Bundle, names: Sequence[str] | None) -> list[BundleArtifact]:
    found = [artifact for artifact in bundle.artifacts if artifact.kind is ArtifactKind.MODULE]
    if names is None:
        return found
    absent = set(names) - {artifact.module for artifact in found}
    if absent:
        import difflib

        known = sorted(str(artifact.module) for artifact in found)
        near = [match for name in sorted(absent) for match in difflib.get_close_matches(name, known, n=3)]
        raise ModuleAbsent(
            f"the bundle has no module {', '.join(sorted(absent))}",
            where=str(bundle.platform),
            expected=", ".join(near or known[:5]) or "no modules at all",
            remedy="name others, or sync them",
        )
    return [artifact for artifact in found if artifact.module in names]


def _runtime(bundle: Bundle) -> BundleArtifact | None:
    return next(
        (
            artifact
            for artifact in bundle.artifacts
            if artifact.kind is ArtifactKind.TVM_FFI and artifact.path.endswith("/" + _RUNTIME)
        ),
        None,
    )


def _check_runtime(cache: Cache, runtime: BundleArtifact, *, host: Host, limits: Limits) -> Outcome:
    path = cache.blob_path(runtime.sha256)
    refusal = _read(path, host=host)
    if isinstance(refusal, str):
        return Outcome("tvm-ffi", runtime.path, Status.REFUSED, refusal)
    return run_child(
        {"check": "tvm_ffi", "path": str(path)}, check="tvm-ffi", subject=runtime.path, timeout=limits.timeout
    )


def _read(path: Path, *, host: Host) -> Elf | str:
    """Read a library, or say why it is refused."""
    try:
        return read_library(path, arch=host.arch)
    except ElfRefused as error:
        facts = [f"expected {error.expected}" if error.expected else "", f"found {error.found}"]
        return error.what + ": " + ", ".join(fact for fact in facts if fact)
    except OSError as error:
        return f"{error.strerror}: {path}"


def _check_modules(
    cache: Cache,
    modules: Sequence[BundleArtifact],
    *,
    host: Host,
    runtime: BundleArtifact | None,
    limits: Limits,
) -> list[Outcome]:
    elves = [_read(cache.blob_path(module.sha256), host=host) for module in modules]
    needed = sorted(
        {name for elf in elves if isinstance(elf, Elf) for name in elf.needed} - {DRIVER, _RUNTIME}
    )
    with ThreadPoolExecutor(limits.jobs) as pool:
        libraries = dict(zip(needed, pool.map(lambda name: _find(name, limits=limits), needed), strict=True))
        files = [
            _judge_file(module, elf, host=host, libraries=libraries)
            for module, elf in zip(modules, elves, strict=True)
        ]
        fit = [
            (module, elf)
            for module, elf, file in zip(modules, elves, files, strict=True)
            if file.status is Status.PASS and isinstance(elf, Elf)
        ]
        loads = pool.map(
            lambda pair: _load(cache, *pair, host=host, runtime=runtime, libraries=libraries, limits=limits),
            fit,
        )
        return [*libraries.values(), *files, *loads]


def _find(soname: str, *, limits: Limits) -> Outcome:
    match = _NVIDIA.match(soname)
    case = {"check": "library", "soname": soname, "pathfinder": match["name"] if match else None}
    return run_child(case, check="library", subject=soname, timeout=limits.timeout)


def _judge_file(
    module: BundleArtifact, elf: Elf | str, *, host: Host, libraries: dict[str, Outcome]
) -> Outcome:
    subject = str(module.module)
    if isinstance(elf, str):
        return Outcome("module file", subject, Status.REFUSED, elf)
    offered = sorted(name.removeprefix(PREFIX) for name in elf.defined if name.startswith(PREFIX))
    if not offered:
        return Outcome("module file", subject, Status.REFUSED, f"it exports no {PREFIX}* function")
    lost = [name for name in elf.needed if name in libraries and libraries[name].status is not Status.PASS]
    if lost:
        return Outcome("module file", subject, Status.FAIL, f"needs {', '.join(lost)}; see doctor")
    holds = module.sms + module.ptx
    if host.sm is not None and holds and not has_code_for(host.sm, sms=module.sms, ptx=module.ptx):
        detail = f"no code for {host.sm.target}; it holds {', '.join(holds)}"
        return Outcome("module file", subject, Status.REFUSED, detail)
    return Outcome("module file", subject, Status.PASS, f"{len(offered)} functions")


def _load(
    cache: Cache,
    module: BundleArtifact,
    elf: Elf,
    *,
    host: Host,
    runtime: BundleArtifact | None,
    libraries: dict[str, Outcome],
    limits: Limits,
) -> Outcome:
    subject = str(module.module)
    if host.sm is None and DRIVER in elf.needed:
        return Outcome("module load", subject, Status.SKIPPED, NO_GPU)
    if runtime is None:
        return Outcome("module load", subject, Status.SKIPPED, f"no {_RUNTIME} in the bundle")
    offered = {name.removeprefix(PREFIX) for name in elf.defined if name.startswith(PREFIX)}
    case = {
        "check": "module",
        "path": str(cache.blob_path(module.sha256)),
        "libtvm_ffi": str(cache.blob_path(runtime.sha256)),
        "preload": [libraries[name].detail for name in elf.needed if _NVIDIA.match(name)],
        "probe": next((name for name in PROBED if name in offered), None),
    }
    return run_child(case, check="module load", subject=subject, timeout=limits.timeout)


def _check_cubins(cache: Cache, bundle: Bundle, *, host: Host, limits: Limits) -> list[Outcome]:
    cubins = [artifact for artifact in bundle.artifacts if artifact.kind is ArtifactKind.CUBIN]
    if not cubins:
        return []
    started = time.monotonic()
    refused = [outcome for cubin in cubins if (outcome := _cubin_file(cache, cubin)) is not None]
    outcomes = list(refused)
    if len(refused) < len(cubins):
        detail = "whole ELF files for CUDA"
        outcomes.append(
            Outcome(
                "cubin file",
                f"{len(cubins) - len(refused)} cubins",
                Status.PASS,
                detail,
                time.monotonic() - started,
            )
        )
    bad = {outcome.subject for outcome in refused}
    outcomes += _load_cubins(cache, [c for c in cubins if c.path not in bad], host=host, limits=limits)
    return outcomes


def _cubin_file(cache: Cache, cubin: BundleArtifact) -> Outcome | None:
    path = cache.blob_path(cubin.sha256)
    try:
        with path.open("rb", buffering=0) as file:
            head = file.read(64)
        read_header(head, size=path.stat().st_size, machine=EM_CUDA, where=str(path))
    except ElfRefused as error:
        return Outcome("cubin file", cubin.path, Status.REFUSED, f"{error.what}: found {error.found}")
    except OSError as error:
        return Outcome("cubin file", cubin.path, Status.REFUSED, str(error))
    return None


def _load_cubins(
    cache: Cache, cubins: Iterable[BundleArtifact], *, host: Host, limits: Limits
) -> list[Outcome]:
    if host.sm is None:
        return [Outcome("cubin load", "cubins", Status.SKIPPED, NO_GPU)]
    node = host.sm
    fit = [cubin for cubin in cubins if any(node.runs(Sm.parse(text)) for text in cubin.sms)]
    if not fit:
        return [Outcome("cubin load", "cubins", Status.SKIPPED, f"none is for {node.target}")]
    step = max(1, len(fit) // limits.cubins)
    sample = fit[::step][: limits.cubins]
    case = {
        "check": "cubins",
        "device": host.device,
        "paths": [str(cache.blob_path(cubin.sha256)) for cubin in sample],
    }
    subject = f"{len(sample)} of {len(fit)} for {node.target}"
    return [run_child(case, check="cubin load", subject=subject, timeout=limits.timeout)]
