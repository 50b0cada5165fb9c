"""Which checks a bundle allows on this host, and running them: what loads code does so in child processes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kernel_depot.bundle import ArtifactKind, Bundle, BundleArtifact
from kernel_depot.kernels.memory import CPU, CUDA, Device
from kernel_depot.kernels.runtime import flashinfer_release
from kernel_depot.platform import Arch, Sm, has_code_for
from kernel_depot.smoke.elf import EM_CUDA, Elf, read_header, read_library
from kernel_depot.smoke.errors import ElfRefused, SmokeError
from kernel_depot.smoke.numerics import session
from kernel_depot.smoke.numerics.case import Skipped
from kernel_depot.smoke.numerics.families import parameters_of
from kernel_depot.smoke.process import run_child
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
    """Seconds a check may take, how many run at once, how many cubins are loaded through the driver.

    Numeric cases run one at a time, so that none waits for the GPU.
    """

    timeout: float = 60.0
    jobs: int = 2
    cubins: int = 32


@dataclass(frozen=True, slots=True)
class Host:
    """What the checks need to know of this host; `sm` None means that no GPU can be used.

    `on_cpu` also gives modules that were compiled for the CPU their numeric cases, on the CPU's tensors.
    """

    arch: Arch
    sm: Sm | None = None
    gpu: str | None = None
    device: int = 0
    driver: str | None = None
    on_cpu: bool = False


def this_host(*, on_cpu: bool = False) -> Host:
    """Look at this host's CPU and its first GPU."""
    from kernel_depot.worker.facts import gather_facts

    facts = gather_facts()
    if facts.arch is None:
        raise SmokeError(f"kernels are not built for {facts.machine}", found=facts.machine)
    first = facts.gpus[0] if facts.gpus else None
    return Host(
        facts.arch,
        first.sm if first else None,
        first.name if first else None,
        driver=facts.driver,
        on_cpu=on_cpu,
    )


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
    checked = _check_modules(cache, chosen, host=host, runtime=runtime, limits=limits)
    outcomes += checked
    outcomes += _check_numbers(cache, digest, bundle, _usable(chosen, checked), host=host, limits=limits)
    if modules is None:
        outcomes += _check_cubins(cache, bundle, host=host, limits=limits)
    return SmokeReport(
        digest,
        str(bundle.platform),
        host.gpu,
        tuple(outcomes),
        driver=host.driver,
        modules={str(module.module): module.sha256 for module in chosen},
    )


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


def _usable(modules: Sequence[BundleArtifact], checked: Sequence[Outcome]) -> list[BundleArtifact]:
    """Return the modules whose file is fit and that nothing has spoken against."""
    bad = {one.subject for one in checked if one.status not in (Status.PASS, Status.SKIPPED)}
    return [module for module in modules if str(module.module) not in bad]


def _check_numbers(
    cache: Cache,
    digest: str,
    bundle: Bundle,
    modules: Sequence[BundleArtifact],
    *,
    host: Host,
    limits: Limits,
) -> list[Outcome]:
    """Run numeric cases: of modules with code for GPUs on this host's, of others on the CPU where wanted."""
    release = flashinfer_release(bundle)
    skipped: list[Outcome] = []
    places: dict[Device, list[str]] = {}
    lacks = session.lacking()
    for module in modules:
        name = str(module.module)
        of_gpu = bool(module.sms or module.ptx)
        try:
            parameters_of(name, release)
            if of_gpu and host.sm is None:
                raise Skipped(NO_GPU)
            if not of_gpu and not host.on_cpu:
                raise Skipped("it has no code for a GPU")
            if lacks is not None:
                raise Skipped(lacks)
        except Skipped as reason:
            skipped.append(Outcome(session.CHECK, name, Status.SKIPPED, str(reason)))
            continue
        places.setdefault(Device(CUDA, host.device) if of_gpu else Device(CPU), []).append(name)
    judged = [
        outcome
        for device, names in places.items()
        for outcome in session.judge(cache.root, digest, names, device=device, timeout=limits.timeout)
    ]
    return [*skipped, *judged]


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
