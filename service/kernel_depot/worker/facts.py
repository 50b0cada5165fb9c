"""What this host is: GPUs, driver, CUDA, libc, and the libraries that kernel modules need."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kernel_depot.platform import Arch, CudaTag, Platform, PlatformError, Sm
from kernel_depot.worker.errors import PlatformUnknown

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; memory in bytes."""

    index: int
    name: str
    sm: Sm
    memory: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON members."""
        return {"index": self.index, "name": self.name, "sm": str(self.sm), "memory": self.memory}


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library and how it was found; `version` as the library itself tells it."""

    name: str
    path: str
    found_via: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that is not here, what it is needed for, and how to get it."""

    what: str
    needed_for: str
    remedy: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The host. `cuda` is the newest CUDA the driver runs, None without a driver."""

    machine: str
    arch: Arch | None
    glibc: str | None
    python: str
    gpus: tuple[Gpu, ...]
    driver: str | None
    cuda: CudaTag | None
    cudart: Library | None
    cudart_cuda: CudaTag | None
    lacks: tuple[Lack, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON members."""
        return {
            "machine": self.machine,
            "arch": str(self.arch) if self.arch else None,
            "glibc": self.glibc,
            "python": self.python,
            "gpus": [gpu.to_json() for gpu in self.gpus],
            "driver": self.driver,
            "cuda": str(self.cuda) if self.cuda else None,
            "cudart": (
                {
                    "path": self.cudart.path,
                    "found_via": self.cudart.found_via,
                    "version": self.cudart.version,
                }
                if self.cudart
                else None
            ),
            "lacks": [
                {"what": lack.what, "needed_for": lack.needed_for, "remedy": lack.remedy}
                for lack in self.lacks
            ],
        }


def gather_facts() -> HostFacts:
    """Look at the host. Nothing that is missing is an error; it is listed with its remedy."""
    import platform

    lacks: list[Lack] = []
    machine = os.uname().machine
    try:
        arch: Arch | None = Arch.parse(machine)
    except PlatformError:
        arch = None
        lacks.append(Lack(f"a known CPU ({machine})", "every wheel", "use an x86_64 or aarch64 host"))
    glibc = _glibc()
    if glibc is None:
        lacks.append(Lack("glibc", "manylinux wheels' libraries", "use a distribution with glibc, not musl"))
    driver, cuda, gpus, trouble = _gpus()
    if trouble is not None:
        lacks.append(
            Lack(
                f"a GPU ({trouble})",
                "loading and running kernel modules",
                "install NVIDIA's driver, or start the container with --gpus all",
            )
        )
    cudart, cudart_cuda = _cudart()
    if cudart is None:
        major = cuda.major if cuda else 13
        package = "nvidia-cuda-runtime" if major >= 13 else "nvidia-cuda-runtime-cu12"
        lacks.append(
            Lack("libcudart", "every kernel module", f"pip install {package}, or install CUDA's runtime")
        )
    return HostFacts(
        machine=machine,
        arch=arch,
        glibc=glibc,
        python=platform.python_version(),
        gpus=gpus,
        driver=driver,
        cuda=cuda,
        cudart=cudart,
        cudart_cuda=cudart_cuda,
        lacks=tuple(lacks),
    )


def find_platform(*, cuda: str = AUTO, arch: str = AUTO, sm: str = AUTO) -> Platform:
    """Tell the platform from what is said and, for `auto`, from the host.

    CUDA is what the driver runs, else that of the libcudart found. Without a GPU the SM is unknown. GPUs
    of several kinds in one host need `sm` said. Raise PlatformUnknown or PlatformError.
    """
    the_arch = Arch.parse(os.uname().machine if arch == AUTO else arch)
    the_sm = None if sm in (AUTO, "none", "") else Sm.parse(sm)
    if cuda != AUTO and sm != AUTO:
        return Platform(CudaTag.parse(cuda), the_arch, the_sm)
    driver, driver_cuda, gpus, trouble = _gpus()
    if sm == AUTO and gpus:
        kinds = sorted({gpu.sm for gpu in gpus})
        if len(kinds) > 1:
            raise PlatformUnknown(
                "the host has GPUs of several kinds",
                found=", ".join(f"{gpu.index}: {gpu.name} ({gpu.sm})" for gpu in gpus),
                remedy="say which one with --sm, or --sm none for the bundle that serves all",
            )
        the_sm = kinds[0]
    if cuda != AUTO:
        return Platform(CudaTag.parse(cuda), the_arch, the_sm)
    tag = driver_cuda if driver_cuda is not None else _cudart()[1]
    if tag is None:
        raise PlatformUnknown(
            "the host does not tell its CUDA version",
            expected="an NVIDIA driver or a libcudart",
            found=f"driver {driver}" if driver else trouble,
            remedy="say it, for instance --cuda cu130",
        )
    return Platform(tag, the_arch, the_sm)


def _glibc() -> str | None:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return None
    return text.removeprefix("glibc ") if text and text.startswith("glibc ") else None


def _gpus() -> tuple[str | None, CudaTag | None, tuple[Gpu, ...], str | None]:
    """Ask NVML; the last value says why there is no GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, None, (), f"NVML: {error}"
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        gpus = []
        for index in range(int(pynvml.nvmlDeviceGetCount())):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            gpus.append(Gpu(index, _text(pynvml.nvmlDeviceGetName(handle)), Sm(major, minor), memory))
    except pynvml.NVMLError as error:
        return None, None, (), f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()
    return driver, _tag(number), tuple(gpus), None if gpus else "the driver sees none"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _tag(number: int) -> CudaTag:
    """Read CUDA's own numbering: 13010 is 13.1."""
    return CudaTag(number // 1000, number % 1000 // 10)


def _cudart() -> tuple[Library | None, CudaTag | None]:
    import ctypes

    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        loaded = load_nvidia_dynamic_lib("cudart")
    except (DynamicLibNotFoundError, RuntimeError, OSError):
        return None, None
    path = str(loaded.abs_path)
    number = ctypes.c_int()
    try:
        # A runtime without a driver still tells its own version.
        status = ctypes.CDLL(path).cudaRuntimeGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        status = -1
    tag = _tag(number.value) if status == 0 and number.value else None
    version = f"{tag.major}.{tag.minor}" if tag else None
    return Library("libcudart", path, str(loaded.found_via or "already loaded"), version), tag
