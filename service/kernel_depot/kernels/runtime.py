"""The runtime: the modules a process may call, each loaded once, when it is first asked for.

A module is loaded by apache-tvm-ffi and kept for the life of the process: code of a GPU cannot be unloaded
while anything may still run it.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from kernel_depot.bundle import ArtifactKind, Bundle
from kernel_depot.kernels.errors import (
    FunctionMissing,
    GroupMissing,
    InvalidArgument,
    KernelCallFailed,
    KernelError,
    ModuleMissing,
    ModuleUnloadable,
    NoCodeForGpu,
    RuntimeIncompatible,
    SignatureMismatch,
)
from kernel_depot.kernels.memory import CudaCallFailed, Device, cuda_runtime
from kernel_depot.kernels.signatures import Sent, ask_signature
from kernel_depot.kernels.streams import on_stream, stream_handle
from kernel_depot.kernels.tensors import owned
from kernel_depot.kernels.uri import Release
from kernel_depot.platform import Sm, has_code_for
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.errors import CacheEmpty
from kernel_depot.worker.location import default_cache
from kernel_depot.worker.views import View

JIT_CACHE: Final = "flashinfer-jit-cache"
TVM_FFI: Final = "apache-tvm-ffi"
_VERSION = re.compile(r"(?:\d+!)?(\d+(?:\.\d+)*)")
_ABSENT = re.compile(r"lib(?P<name>\w+)\.so\S*: cannot open shared object file")
_MOST_LIBRARIES: Final = 8

CALL_ERRORS: Final = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
    MemoryError,
)
"""What apache-tvm-ffi raises for a kernel's failure (tvm_ffi/error.py)."""

DEEP_GEMM: Final = "deep_gemm/fp8_gemm_impl.cuh"
"""What fused MoE's DeepSeek kernels are compiled from, below a directory of headers."""


@dataclass(frozen=True, slots=True)
class KernelFile:
    """A module's file, and the targets its fatbin holds. `sms` None means that nobody looked."""

    uri: str
    path: Path
    sms: tuple[str, ...] | None = None
    ptx: tuple[str, ...] = ()
    sha256: str | None = None


class Function:
    """A loaded function. Calling it directly leaves the stream to apache-tvm-ffi, which knows torch's."""

    __slots__ = ("name", "raw", "where")

    def __init__(self, raw: Callable[..., Any], *, name: str, where: str) -> None:
        self.raw = raw
        self.name = name
        self.where = where

    def __call__(self, *arguments: Any) -> Any:
        """Call. Raise KernelCallFailed with the kernel's own text."""
        try:
            return self.raw(*arguments)
        except CALL_ERRORS as error:
            raise self.failure(error) from error

    def failure(self, error: BaseException) -> KernelCallFailed:
        """Return the error for one of CALL_ERRORS that `raw` raised."""
        return KernelCallFailed(self.name, where=self.where, error=error)

    def on(self, device: Device, stream: object, arguments: Sequence[Any]) -> Any:
        """Call on a stream of a device, whatever the tensors' framework thinks current.

        Raise KernelCallFailed, InvalidArgument for what is no stream.
        """
        handle = stream_handle(stream)
        plain = [owned(value) if hasattr(value, "__dlpack__") else value for value in arguments]
        with on_stream(device, handle):
            if not device.is_cuda:
                return self(*plain)
            with cuda_runtime().on_device(device.id):
                return self(*plain)


class Module:
    """A loaded module. Functions are checked against their own signature when first taken."""

    def __init__(self, file: KernelFile, loaded: Any) -> None:
        self.file = file
        self._loaded = loaded
        self._functions: dict[tuple[str, tuple[Sent, ...]], Function] = {}

    def function(self, name: str, sends: tuple[Sent, ...]) -> Function:
        """Return a function that takes arguments of these kinds. Raise FunctionMissing, SignatureMismatch."""
        known = self._functions.get((name, sends))
        if known is not None:
            return known
        return self.check(name, self._raw(name), sends)

    def check(self, name: str, raw: Any, sends: tuple[Sent, ...]) -> Function:
        """Check a function, also one of an object that the module made. Raise SignatureMismatch."""
        signature = ask_signature(raw)
        if signature is None or not signature.accepts(sends):
            raise SignatureMismatch(
                name,
                where=str(self.file.path),
                expected=f"{name}({', '.join(sends)})",
                found=str(signature or "a function that does not tell its signature"),
            )
        function = Function(raw, name=f"{self.file.uri}.{name}", where=str(self.file.path))
        self._functions[name, sends] = function
        return function

    def has(self, name: str) -> bool:
        """Tell whether the module exports a function."""
        try:
            return self._loaded.get_function(name, query_imports=False) is not None
        except AttributeError:
            return False

    def _raw(self, name: str) -> Any:
        try:
            return getattr(self._loaded, name)
        except AttributeError as error:
            raise FunctionMissing(
                f"the kernel module {self.file.uri} has no function {name}",
                where=str(self.file.path),
                expected=name,
                remedy="pin a FlashInfer version this kernel-depot knows, or upgrade kernel-depot",
            ) from error


class Runtime:
    """The modules of one bundle, or of one directory. Safe for threads.

    `headers` are directories that hold DEEP_GEMM, for modules that compile when they run.
    """

    def __init__(
        self,
        files: Mapping[str, KernelFile],
        *,
        release: Release,
        where: str,
        headers: Sequence[Path] = (),
    ) -> None:
        self.files = dict(files)
        self.headers = tuple(headers)
        self.release = release
        self.where = where
        self._modules: dict[str, Module] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, cache: Path | None = None, *, bundle: str | None = None, group: str | None = None
    ) -> Runtime:
        """Open the modules of a node's current bundle, or of the one whose digest is given.

        `cache` defaults to the node's usual place. With `group` only the modules that the bundle carries for
        this group are opened. Raise CacheEmpty, GroupMissing, RuntimeIncompatible.
        """
        held = Cache(cache if cache is not None else default_cache())
        digest = bundle or held.current_digest()
        manifest = held.bundle(digest) if digest is not None else None
        if digest is None or manifest is None:
            raise CacheEmpty(
                "there is no synced bundle to call kernels of",
                where=str(held.root),
                expected=bundle,
                remedy="run kernel-depot sync first",
            )
        wanted = None if group is None else _group_modules(manifest, group, where=f"{held.root}, {digest}")
        _require_tvm_ffi(_pinned(manifest, TVM_FFI), where=str(held.root))
        files = {
            artifact.module: KernelFile(
                artifact.module, held.blob_path(artifact.sha256), artifact.sms, artifact.ptx, artifact.sha256
            )
            for artifact in manifest.artifacts
            if artifact.kind is ArtifactKind.MODULE
            and artifact.module is not None
            and (wanted is None or artifact.module in wanted)
        }
        return cls(
            files,
            release=flashinfer_release(manifest),
            where=f"{held.root}, bundle {digest}",
            headers=_headers(manifest, held.view_dir(digest) / View.FILES.value),
        )

    @classmethod
    def of_directory(cls, directory: Path, *, release: Release) -> Runtime:
        """Open `<directory>/<uri>/<uri>.so` files that were compiled from one FlashInfer release."""
        _require_tvm_ffi(None, where=str(directory))
        files = {
            path.stem: KernelFile(path.stem, path.absolute())
            for path in sorted(directory.glob("*/*.so"))
            if path.stem == path.parent.name
        }
        return cls(files, release=release, where=str(directory))

    def module(self, uri: str, *, device: Device | None = None) -> Module:
        """Return a module, loading it when it is first asked for.

        Raise ModuleMissing, NoCodeForGpu, ModuleUnloadable, and InvalidArgument for tensors that are not on a
        GPU though the module's code is a GPU's.
        """
        file = self.files.get(uri)
        if device is not None and not device.is_cuda and file is not None and (file.sms or file.ptx):
            raise InvalidArgument("tensors", expected="tensors on a CUDA device", found=str(device))
        known = self._modules.get(uri)
        if known is not None:
            return known
        if file is None:
            raise ModuleMissing(uri, where=self.where, nearest=self.nearest(uri))
        if device is not None and device.is_cuda:
            _require_code(file, device)
        with self._lock:
            if uri not in self._modules:
                self._modules[uri] = Module(file, _load(file))
            return self._modules[uri]

    def nearest(self, uri: str) -> list[str]:
        """Return the names of modules that are here and most like one that is not."""
        return difflib.get_close_matches(uri, list(self.files), n=3, cutoff=0.3)


_default: Runtime | None = None
_default_lock = threading.Lock()


def default_runtime() -> Runtime:
    """Return the runtime of this process, opened on the node's current bundle when first asked for.

    Raise CacheEmpty, RuntimeIncompatible.
    """
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = Runtime.open()
    return _default


def set_default_runtime(runtime: Runtime | None) -> None:
    """Make a runtime the one that calls take which name none; None forgets it."""
    global _default
    with _default_lock:
        _default = runtime


def read_release(version: str) -> Release:
    """Return the numbers of a PEP 440 version's public part: `0.6.3+cu130` is (0, 6, 3)."""
    match = _VERSION.match(version)
    return tuple(int(number) for number in match[1].split(".")) if match else ()


def flashinfer_release(bundle: Bundle) -> Release:
    """Return the FlashInfer release that a bundle's modules were compiled from; (0,) when nothing tells."""
    return read_release(_pinned(bundle, JIT_CACHE) or "0")


@functools.cache
def device_sm(device: Device) -> Sm | None:
    """Return a CUDA device's compute capability; None for other devices. Raise CudaCallFailed."""
    if not device.is_cuda:
        return None
    major, minor = cuda_runtime().capability(device.id)
    return Sm(major, minor)


def _headers(bundle: Bundle, files: Path) -> list[Path]:
    """Return where the view of files has DeepGEMM's headers, of the release that the modules are of."""
    release = flashinfer_release(bundle)
    same = {wheel.sha256 for wheel in bundle.wheels if read_release(wheel.version) == release}
    return [
        files / artifact.path.removesuffix(DEEP_GEMM)
        for artifact in bundle.artifacts
        if artifact.path.endswith("/" + DEEP_GEMM) and artifact.wheel in same
    ]


def _group_modules(bundle: Bundle, name: str, *, where: str) -> frozenset[str]:
    for group in bundle.groups:
        if group.name == name:
            return frozenset(group.modules)
    raise GroupMissing(
        f"this node's bundle does not carry the module group {name}",
        where=where,
        expected=name,
        found=", ".join(group.name for group in bundle.groups) or "no group",
        remedy=f"sync it: kernel-depot sync --group {name}",
    )


def _pinned(bundle: Bundle, project: str) -> str | None:
    for wheel in bundle.wheels:
        if wheel.project.replace("_", "-").lower().startswith(project):
            return wheel.version
    return None


def _require_tvm_ffi(pinned: str | None, *, where: str) -> None:
    try:
        installed = metadata.version(TVM_FFI)
    except metadata.PackageNotFoundError:
        raise RuntimeIncompatible(
            f"kernels are called through {TVM_FFI}, which is not installed",
            where=where,
            expected=pinned or "any 0.1 version",
            found="none",
            remedy="pip install 'kernel-depot[kernels]'",
        ) from None
    wanted = read_release(pinned)[:2] if pinned else (0, 1)
    if read_release(installed)[:2] != wanted:
        raise RuntimeIncompatible(
            f"the installed {TVM_FFI} has another ABI than the pinned one",
            where=where,
            expected=f"{'.'.join(map(str, wanted))}.x (pinned: {pinned or 'none'})",
            found=installed,
            remedy=f"install {TVM_FFI} {'.'.join(map(str, wanted))}.x in this environment",
        )


def _require_code(file: KernelFile, device: Device) -> None:
    sm = device_sm(device)
    if sm is None or file.sms is None or not (file.sms or file.ptx):
        return  # a module without device code of its own, or one nobody looked into
    if not has_code_for(sm, sms=file.sms, ptx=file.ptx):
        raise NoCodeForGpu(file.uri, where=str(file.path), sm=str(sm), sms=file.sms, ptx=file.ptx)


_kept: Final[list[Any]] = []
"""Every module that was loaded, also by runtimes that are gone."""


def _load(file: KernelFile) -> Any:
    """Load a module; libraries of NVIDIA's that the loader does not find are looked for beside Python."""
    import tvm_ffi

    for _ in range(_MOST_LIBRARIES):
        try:
            # load_module goes by a file's suffix, and a blob's name has none.
            loaded = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(os.fspath(file.path), "so")
            _kept.append(loaded)
            return loaded
        except RuntimeError as error:
            absent = _ABSENT.search(str(error))
            if absent is None or not _find_library(absent["name"]):
                raise ModuleUnloadable(
                    f"the kernel module {file.uri} cannot be loaded: {error}",
                    where=str(file.path),
                    remedy="run kernel-depot doctor, which says what this host lacks",
                ) from error
    raise KernelError(f"the kernel module {file.uri} needs more libraries than can be", where=str(file.path))


def _find_library(name: str) -> bool:
    """Load one of NVIDIA's libraries from wherever it is installed; tell whether that went well."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    if name == "cudart":
        try:
            cuda_runtime()
        except CudaCallFailed:
            return False
        return True
    try:
        load_nvidia_dynamic_lib(name)
    except (DynamicLibNotFoundError, RuntimeError, OSError, ValueError):
        return False
    return True
