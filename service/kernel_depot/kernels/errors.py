"""What can go wrong before, at and after a kernel's call."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_depot.errors import DepotError


class KernelError(DepotError):
    """The base of this room's errors."""

    slug = "kernel-error"
    title = "A kernel cannot be called"
    status = 500


class InvalidArgument(KernelError):
    """An argument that the kernel must not see."""

    slug = "invalid-argument"
    title = "An argument is not what the kernel takes"
    status = 400

    def __init__(self, name: str, *, expected: object, found: object, remedy: str | None = None) -> None:
        super().__init__(
            f"the argument {name} is not what the kernel takes",
            expected=expected,
            found=found,
            remedy=remedy,
            argument=name,
        )
        self.name = name


class ModuleMissing(KernelError):
    """The bundle lacks a module."""

    slug = "kernel-module-missing"
    title = "The bundle lacks a kernel module"
    status = 404

    def __init__(self, uri: str, *, where: str, nearest: Sequence[str]) -> None:
        super().__init__(
            f"the kernel module {uri} is not among those this process has",
            where=where,
            expected=uri,
            found=f"nearest: {', '.join(nearest)}" if nearest else "no module at all",
            remedy="sync it (kernel-depot sync --modules, or --group where it belongs to one), or name it in "
            "a build plan (kernel-depot build) when no pinned wheel carries it",
            uri=uri,
            nearest=list(nearest),
        )
        self.uri = uri


class GroupMissing(KernelError):
    """A module group that this node's bundle does not carry."""

    slug = "module-group-missing"
    title = "The bundle lacks a module group"
    status = 409


class NoCodeForGpu(KernelError):
    """A module without machine code or PTX for this GPU."""

    slug = "no-code-for-gpu"
    title = "The module has no code for this GPU"
    status = 409

    def __init__(self, uri: str, *, where: str, sm: str, sms: Sequence[str], ptx: Sequence[str]) -> None:
        super().__init__(
            f"the kernel module {uri} has no code for this GPU",
            where=where,
            expected=sm,
            found=f"machine code for {', '.join(sms) or 'nothing'}; PTX for {', '.join(ptx) or 'nothing'}",
            remedy=f"sync a bundle resolved for {sm}, or build the module: kernel-depot build --sm {sm}",
            uri=uri,
        )


class ModuleUnloadable(KernelError):
    """A module's file that the dynamic loader refuses."""

    slug = "kernel-module-unloadable"
    title = "The kernel module cannot be loaded"
    status = 500


class FunctionMissing(KernelError):
    """A module that does not export a function."""

    slug = "kernel-function-missing"
    title = "The kernel module lacks a function"
    status = 409


class SignatureMismatch(KernelError):
    """A function that takes other arguments than would be sent."""

    slug = "signature-mismatch"
    title = "The kernel's signature has drifted"
    status = 409

    def __init__(self, function: str, *, where: str, expected: str, found: str) -> None:
        super().__init__(
            f"the kernel function {function} takes other arguments than this release of kernel-depot sends",
            where=where,
            expected=expected,
            found=found,
            remedy="pin a FlashInfer version this kernel-depot knows, or upgrade kernel-depot",
            function=function,
        )


class KernelCallFailed(KernelError):
    """A kernel that refused its call or failed in it."""

    slug = "kernel-call-failed"
    title = "The kernel failed"
    status = 500

    def __init__(self, function: str, *, where: str, error: BaseException) -> None:
        super().__init__(
            f"the kernel function {function} failed: {error}",
            where=where,
            found=f"{type(error).__name__}: {error}",
            remedy="read the kernel's own text; after an illegal access the process must be restarted",
            function=function,
            kind=type(error).__name__,
        )


class RuntimeIncompatible(KernelError):
    """An apache-tvm-ffi that cannot call the pinned modules, or none."""

    slug = "kernel-runtime-incompatible"
    title = "apache-tvm-ffi does not fit the bundle"
    status = 409
